"""Rows of activations in 8 bits, as linear layers with quantised weights read them."""

from __future__ import annotations

import numpy as np

from pagoda.runtime.forward_batch import Float32Array

GROUP = 32  # values that share one scale


def quantize(x: Float32Array) -> Float32Array:
    """What is left of `x` after rounding: scale * round(x / scale), with scale = max |x| / 127 of a group.

    Symmetric quantisation, a scale for each 32 values of a row (as Q8_0 of llama.cpp). An implementation may
    keep outliers apart, so that the rest of their group loses less, and nothing may lose more.

    Args:
        x: float32 [num_tokens, width], width a multiple of 32.

    Returns:
        float32, the shape of x.
    """
    groups = x.reshape(-1, GROUP)
    scale = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    out: Float32Array = (np.rint(groups * inverse) * scale).reshape(x.shape)
    return out
