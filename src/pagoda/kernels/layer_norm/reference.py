"""Layer normalisation (Ba et al. 2016, arXiv 1607.06450)."""

from __future__ import annotations

import numpy as np

from pagoda.runtime.forward_batch import Float32Array


def layer_norm(x: Float32Array, weight: Float32Array, bias: Float32Array, eps: float) -> Float32Array:
    """out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, row by row.

    Args:
        x: float32 [num_tokens, width].
        weight: float32 [width].
        bias: float32 [width].
        eps: added to the variance, which it keeps from being zero.

    Returns:
        float32 [num_tokens, width].
    """
    mean = np.mean(x, axis=1, keepdims=True, dtype=np.float64)
    centred = x - mean
    variance = np.mean(centred * centred, axis=1, keepdims=True)
    out: Float32Array = (centred / np.sqrt(variance + eps)).astype(np.float32) * weight + bias
    return out
