"""Elementwise functions: the gated activations of feed-forward layers and the soft cap of logits."""

from __future__ import annotations

from typing import Literal

import numpy as np

from pagoda.runtime.forward_batch import Float32Array

ActivationKind = Literal["silu", "gelu_tanh"]


def gated(gate: Float32Array, up: Float32Array, kind: ActivationKind) -> Float32Array:
    """out = activation(gate) * up: SwiGLU for "silu", GeGLU for "gelu_tanh" (Shazeer 2020, arXiv 2002.05202).

    Args:
        gate: float32 [num_tokens, width].
        up: float32 [num_tokens, width].
        kind: the activation.

    Returns:
        float32 [num_tokens, width].
    """
    return (silu(gate) if kind == "silu" else gelu_tanh(gate)) * up


def silu(x: Float32Array) -> Float32Array:
    """x * sigmoid(x), finite for every finite x."""
    # exp(-|x|) cannot overflow; both branches of the sigmoid are written with it.
    e = np.exp(-np.abs(x))
    out: Float32Array = x * np.where(x >= 0, np.float32(1), e) / (np.float32(1) + e)
    return out


def gelu_tanh(x: Float32Array) -> Float32Array:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    out: Float32Array = np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))
    return out


def activation(x: Float32Array, kind: Literal["gelu_tanh"]) -> Float32Array:
    """out = gelu_tanh(x), for feed-forward layers without a gate."""
    assert kind == "gelu_tanh"
    return gelu_tanh(x)


def softcap(x: Float32Array, cap: float | None) -> Float32Array:
    """cap * tanh(x / cap), which bounds x by cap (Gemma 2, arXiv 2408.00118); None changes nothing."""
    if cap is None:
        return x
    out: Float32Array = np.float32(cap) * np.tanh(x / np.float32(cap))
    return out
