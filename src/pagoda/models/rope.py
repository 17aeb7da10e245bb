"""Rotary frequencies of every scaling kind: default, linear, dynamic, yarn, llama3 and longrope.

A kind is settled when a model is read, for the longest sequence that it will run: keys in the KV cache are
rotated already, so a rule that changes with the length (dynamic, longrope) must not change while they are
there. Frequencies are radians a position, base^(-2i / rotary_dim), rounded to float32 at the end so that
every backend sees the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.models.config import RopeConfig
from pagoda.weights.settings import CONVERT_AGAIN, Settings

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@contextmanager
def usable_frequencies(settings: Settings) -> Iterator[None]:
    """Numbers of a file that overflow, divide by zero or have no logarithm become an error about the file."""
    try:
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            yield
    except (ArithmeticError, ValueError) as error:
        raise ModelFileError(
            f"{settings.label('rope')}: its numbers give no rotary frequencies ({error})", hint=CONVERT_AGAIN
        ) from error


def frequencies(base: float, rotary_dim: int) -> NDArray[np.float64]:
    """float64 [rotary_dim / 2]"""
    return np.asarray(base ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim))


def rope(inv_freq: NDArray[np.float64], attention_factor: float = 1.0) -> RopeConfig:
    return RopeConfig(
        inv_freq=tuple(float(f) for f in inv_freq.astype(np.float32)), attention_factor=attention_factor
    )


def default(base: float, rotary_dim: int, *, factor: float = 1.0, factors: ArrayLike = 1.0) -> RopeConfig:
    """`factor` slows all dimensions down (linear scaling, kaiokendev 2023), `factors` each by its own."""
    return rope(frequencies(base, rotary_dim) / factor / np.asarray(factors, np.float64))


def dynamic(base: float, rotary_dim: int, *, factor: float, trained: int, length: int) -> RopeConfig:
    """NTK-aware scaling for sequences of `length` (bloc97, emozilla 2023): the base grows past `trained`."""
    stretch = factor * max(length, trained) / trained - (factor - 1)
    return default(base * stretch ** (rotary_dim / (rotary_dim - 2)), rotary_dim)


def llama3(
    base: float, rotary_dim: int, *, factor: float, low: float, high: float, trained: int
) -> RopeConfig:
    """Long wavelengths slow down by `factor`, short ones stay, a ramp lies between (Llama 3.1, 2024)."""
    inv_freq = frequencies(base, rotary_dim)
    turns = trained * inv_freq / (2 * math.pi)  # within the trained length
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return rope(inv_freq * ((1 - ramp) / factor + ramp))


def yarn(
    base: float,
    rotary_dim: int,
    *,
    factor: float,
    trained: int,
    attention_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> RopeConfig:
    """Peng et al. 2023, arXiv 2309.00071: a ramp over dimensions, and sharper attention."""

    def dimension_of(num_turns: float) -> float:
        return rotary_dim * math.log(trained / (num_turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    slowed = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return rope(frequencies(base, rotary_dim) * (slowed / factor + 1 - slowed), attention_factor)


def longrope(
    base: float,
    rotary_dim: int,
    *,
    short: Sequence[float],
    long: Sequence[float],
    trained: int,
    length: int,
    factor: float,
    attention_factor: float | None = None,
) -> RopeConfig:
    """Ding et al. 2024, arXiv 2402.13753: factors by dimension, others for sequences past `trained`."""
    factors = long if length > trained else short
    if len(factors) != rotary_dim // 2 or min(factors) <= 0:
        raise ModelFileError(
            f"longrope needs {rotary_dim // 2} positive factors, the file has {len(factors)}",
            hint=CONVERT_AGAIN,
        )
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return rope(frequencies(base, rotary_dim) / np.asarray(factors), attention_factor)


def from_hf(
    settings: Settings,
    parameters: Settings | None,
    *,
    head_dim: int,
    max_position: int,
    length: int | None,
    base: float,
) -> RopeConfig:
    """The rule of a config.json: `parameters` is its `rope_parameters` or `rope_scaling`, or one layer
    type's part of it, and `settings` the level around it, where older files keep the base.

    Raises:
        UnsupportedError: a kind that is not in `KINDS`.
        ModelFileError: a key is missing or out of range.
    """
    with usable_frequencies(settings):
        return _from_hf(settings, parameters, head_dim, max_position, length, base)


def _from_hf(
    settings: Settings,
    parameters: Settings | None,
    head_dim: int,
    max_position: int,
    length: int | None,
    base: float,
) -> RopeConfig:
    p = parameters or Settings({}, file=settings.file)
    kind = p.text("rope_type") or p.text("type") or "default"
    kind = {"su": "longrope"}.get(kind, kind)
    base = p.positive("rope_theta", base)
    partial = p.positive("partial_rotary_factor", settings.positive("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ModelFileError(f"{rotary_dim} rotary dimensions do not fit heads of {head_dim}")
    if kind not in KINDS:
        raise UnsupportedError(
            f"rope scaling {kind!r:.80} is not supported ({p.label('rope_type')})",
            hint=f"supported rope scalings: {', '.join(KINDS)}",
        )
    if kind == "default":
        return default(base, rotary_dim)
    if kind == "linear":
        return default(base, rotary_dim, factor=p.positive("factor"))
    if kind == "dynamic":
        factor = p.positive("factor")
        return dynamic(base, rotary_dim, factor=factor, trained=max_position, length=length or max_position)
    trained = p.size("original_max_position_embeddings", default=max_position)
    trained = settings.size("original_max_position_embeddings", default=trained)
    if kind == "llama3":
        low, high = p.positive("low_freq_factor"), p.positive("high_freq_factor")
        return llama3(base, rotary_dim, factor=p.positive("factor"), low=low, high=high, trained=trained)
    given = p.number("attention_factor")
    factor = p.positive("factor", max_position / trained)
    if kind == "yarn":
        if given is None and (p.number("mscale") or p.number("mscale_all_dim")):
            given = _mscale(factor, p.number("mscale")) / _mscale(factor, p.number("mscale_all_dim"))
        return yarn(
            base, rotary_dim, factor=factor, trained=trained, attention_factor=given,
            beta_fast=p.positive("beta_fast", 32.0), beta_slow=p.positive("beta_slow", 1.0),
            truncate=p.flag("truncate", True),
        )  # fmt: skip
    short, long = p.numbers("short_factor"), p.numbers("long_factor")
    if not short or not long:
        raise p.missing("long_factor" if short else "short_factor")
    return longrope(
        base, rotary_dim, short=short, long=long, trained=trained, length=length or max_position,
        factor=factor, attention_factor=given,
    )  # fmt: skip


def _mscale(factor: float, scale: float | None) -> float:
    return 0.1 * (scale or 1.0) * math.log(factor) + 1.0 if factor > 1 else 1.0


def max_position_of_hf(parameters: Settings | None, max_position: int) -> int:
    """Longest sequence: dynamic and yarn go past `max_position_embeddings`, which is what was trained."""
    if parameters is None:
        return max_position
    kind = parameters.text("rope_type") or parameters.text("type")
    if kind not in ("dynamic", "yarn"):
        return max_position
    trained = parameters.size("original_max_position_embeddings", default=max_position)
    if kind == "dynamic":
        trained = max_position
    return max(max_position, int(trained * parameters.positive("factor", max_position / trained)))
