"""Matrix product of a linear layer, with what is fused to it."""

from __future__ import annotations

import numpy as np

from pagoda.runtime.forward_batch import Float32Array


def linear(
    x: Float32Array,
    weight: Float32Array,
    bias: Float32Array | None = None,
    residual: Float32Array | None = None,
) -> Float32Array:
    """out = x @ weight.T + bias + residual.

    Args:
        x: float32 [num_tokens, inputs].
        weight: float32 [outputs, inputs], dequantised.
        bias: float32 [outputs].
        residual: float32 [num_tokens, outputs].

    Returns:
        float32 [num_tokens, outputs].
    """
    out: Float32Array = x @ weight.T
    if bias is not None:
        np.add(out, bias, out=out)
    if residual is not None:
        np.add(out, residual, out=out)
    return out
