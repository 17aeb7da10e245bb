"""Seeds of requests and of their choices. All are unsigned 64-bit numbers."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request: choice 0 has the request's own, so n = 1 equals choice 0.

    The others are steps of SplitMix64 (Steele, Lea and Flood 2014), far apart for neighbouring seeds.
    """
    seed &= _MASK
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
