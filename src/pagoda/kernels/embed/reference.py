"""Rows of the embedding table."""

from __future__ import annotations

import numpy as np

from pagoda.runtime.forward_batch import Float32Array, Int32Array


def embed(token_ids: Int32Array, weight: Float32Array, scale: float = 1.0) -> Float32Array:
    """out = weight[token_ids] * scale.

    Args:
        token_ids: int32 [num_tokens], each in [0, vocab).
        weight: float32 [vocab, width], dequantised.
        scale: a factor of the architecture (Gemma scales by sqrt(width)).

    Returns:
        float32 [num_tokens, width].
    """
    out: Float32Array = weight[token_ids] * np.float32(scale)
    return out
