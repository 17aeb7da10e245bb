"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagoda.runtime.forward_batch import Float32Array, Int32Array


def rope(
    x: Float32Array,
    positions: Int32Array,
    inv_freq: Sequence[float],
    head_dim: int,
    attention_factor: float = 1.0,
) -> Float32Array:
    """Rotate each pair (i, i + rotary_dim / 2) of every head by positions * inv_freq[i] radians.

    Only the first rotary_dim = 2 * len(inv_freq) columns of a head turn; the rest pass through. Angles,
    sines and cosines are taken in float64, because a float32 angle is off by 1e-4 at position 1000.

    Args:
        x: float32 [num_tokens, num_heads * head_dim].
        positions: int32 [num_tokens].
        inv_freq: radians per position, rotary_dim / 2 values with every scaling rule applied.
        head_dim: columns of one head.
        attention_factor: multiplies sines and cosines (yarn, longrope).

    Returns:
        float32, the shape of x.
    """
    half = len(inv_freq)
    angles = positions[:, None].astype(np.float64) * np.asarray(inv_freq, np.float64)
    cos = (attention_factor * np.cos(angles)).astype(np.float32)[:, None, :]
    sin = (attention_factor * np.sin(angles)).astype(np.float32)[:, None, :]
    out: Float32Array = x.copy()
    heads = x.reshape(len(x), -1, head_dim)
    rotated = out.reshape(heads.shape)
    first, second = heads[..., :half], heads[..., half : 2 * half]
    rotated[..., :half] = first * cos - second * sin
    rotated[..., half : 2 * half] = second * cos + first * sin
    return out
