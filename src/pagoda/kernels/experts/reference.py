"""Routed experts (Shazeer et al. 2017, arXiv 1701.06538; Jiang et al. 2024, arXiv 2401.04088)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagoda.kernels.activation.reference import gated
from pagoda.kernels.linear.reference import linear
from pagoda.runtime.forward_batch import Float32Array, Int32Array


def route(router: Float32Array, num_active: int, *, normalised: bool) -> tuple[Int32Array, Float32Array]:
    """The experts of each token and their weights, largest first; ties go to the lower index.

    Args:
        router: float32 [num_tokens, num_experts], a score for each expert.
        num_active: experts a token.
        normalised: the weights of the active experts sum to 1; otherwise those of all experts do.

    Returns:
        int32 and float32 [num_tokens, num_active].
    """
    exponentials = np.exp(router - router.max(axis=1, keepdims=True))
    chosen = np.argsort(-router, axis=1, kind="stable")[:, :num_active]
    weights = np.take_along_axis(exponentials, chosen, axis=1)
    total = (weights if normalised else exponentials).sum(axis=1, keepdims=True)
    return chosen.astype(np.int32), weights / total


def experts(
    x: Float32Array,
    router: Float32Array,
    gates: Sequence[Float32Array],
    ups: Sequence[Float32Array],
    downs: Sequence[Float32Array],
    num_active: int,
    *,
    normalised: bool,
) -> Float32Array:
    """out = sum over a token's active experts e, largest weight first, of
    weight_e * down_e @ (silu(gate_e @ x) * (up_e @ x)).

    Args:
        x: float32 [num_tokens, width].
        router: float32 [num_tokens, num_experts].
        gates: float32 [ffn_size, width] of each expert.
        ups: the same.
        downs: float32 [width, ffn_size] of each expert.
        num_active: experts a token.
        normalised: see `route`.

    Returns:
        float32 [num_tokens, width].
    """
    chosen, weights = route(router, num_active, normalised=normalised)
    parts = np.empty((*chosen.shape, x.shape[1]), np.float32)
    for expert in np.unique(chosen):
        tokens, slots = np.nonzero(chosen == expert)
        rows = x[tokens]
        hidden = gated(linear(rows, gates[expert]), linear(rows, ups[expert]), "silu")
        parts[tokens, slots] = linear(hidden, downs[expert])
    out: Float32Array = np.einsum("tkw,tk->tw", parts, weights).astype(np.float32)
    return out
