"""Linear layers, attention and experts in one call, for the instruction set that a test asks for."""

from __future__ import annotations

from pagoda.bench.native_ops import NativeOps, run_attention, run_experts, run_linear
from pagoda.kernels.attention.cases import AttentionCase, AttentionInputs
from pagoda.kernels.experts.cases import ExpertsCase, ExpertsInputs
from pagoda.runtime.forward_batch import Float32Array
from pagoda.weights.tensor import Tensor

__all__ = ["NativeOps", "attention", "experts", "linear"]


def linear(
    isa: str,
    x: Float32Array,
    weight: Tensor,
    bias: Float32Array | None = None,
    residual: Float32Array | None = None,
    num_threads: int = 1,
) -> Float32Array:
    return run_linear(NativeOps(isa, num_threads), x, weight, bias, residual)


def attention(isa: str, case: AttentionCase, inputs: AttentionInputs, num_threads: int = 1) -> Float32Array:
    return run_attention(NativeOps(isa, num_threads), case, inputs)


def experts(isa: str, case: ExpertsCase, inputs: ExpertsInputs, num_threads: int = 1) -> Float32Array:
    return run_experts(NativeOps(isa, num_threads), case, inputs)
