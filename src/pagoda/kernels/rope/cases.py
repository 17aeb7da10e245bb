"""Sizes of `rope` that matter, what each costs, and how far a native result may be from the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagoda.runtime.forward_batch import Float32Array, Int32Array


class RopeInputs(NamedTuple):
    x: Float32Array
    positions: Int32Array
    inv_freq: tuple[float, ...]
    head_dim: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class RopeCase:
    """Tokens sit at positions `first_position`, + 1, ...; columns past `rotary_dim` of a head stay."""

    num_tokens: int
    num_heads: int
    head_dim: int
    rotary_dim: int
    first_position: int = 0
    theta: float = 10000.0
    attention_factor: float = 1.0
    tolerance: float = 1e-5  # largest error relative to the largest result

    @property
    def num_flops(self) -> int:
        return 3 * self.num_tokens * self.num_heads * self.rotary_dim

    @property
    def num_bytes(self) -> int:
        return 8 * self.num_tokens * self.num_heads * self.head_dim

    def make_inputs(self, seed: int = 0) -> RopeInputs:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((self.num_tokens, self.num_heads * self.head_dim), np.float32)
        positions = np.arange(self.first_position, self.first_position + self.num_tokens, dtype=np.int32)
        exponents = np.arange(0, self.rotary_dim, 2) / self.rotary_dim
        inv_freq = tuple((self.theta**-exponents).tolist())
        return RopeInputs(x, positions, inv_freq, self.head_dim, self.attention_factor)


CASES: tuple[RopeCase, ...] = (
    *(RopeCase(5, 3, head_dim, head_dim) for head_dim in (16, 40, 64, 80, 96, 112, 128, 256)),
    # Partial rotary.
    RopeCase(4, 2, 80, 32),
    RopeCase(4, 2, 128, 96),
    # Positions where a float32 angle would be off by 1e-2.
    RopeCase(3, 9, 64, 64, first_position=131_000, theta=100_000.0),
    RopeCase(2, 4, 128, 128, first_position=32_000, theta=1_000_000.0, attention_factor=1.19),
    RopeCase(64, 14, 64, 64, theta=1_000_000.0),
)

# What steps of real models run: one token and a full step, all query heads of a layer.
STEP_CASES: tuple[RopeCase, ...] = tuple(
    RopeCase(num_tokens, num_heads, head_dim, head_dim)
    for num_tokens in (1, 512)
    for num_heads, head_dim in ((9, 64), (14, 64), (4, 256))
)
