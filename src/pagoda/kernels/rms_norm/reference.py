"""Root mean square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import numpy as np

from pagoda.runtime.forward_batch import Float32Array


def rms_norm(x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """out = x / sqrt(mean(x^2) + eps) * weight, over each run of `len(weight)` columns.

    A weight as wide as a row normalises rows; a weight of `head_dim` normalises each head (QK-norm).

    Args:
        x: float32 [num_tokens, width].
        weight: float32 [n], where n divides width.
        eps: added to the mean square, which it keeps from being zero.

    Returns:
        float32 [num_tokens, width].
    """
    runs = x.reshape(-1, len(weight))
    mean_square = np.mean(runs * runs, axis=1, keepdims=True, dtype=np.float64)
    inverse = (1.0 / np.sqrt(mean_square + eps)).astype(np.float32)
    out: Float32Array = (runs * inverse * weight).reshape(x.shape)
    return out
