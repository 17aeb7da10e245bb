"""Linear layers and attention in one call, for the instruction set that a test asks for."""

from __future__ import annotations

from pagoda.bench.native_ops import NativeOps, run_attention, run_linear
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
    ops = NativeOps(isa, num_threads)
    x, router, out = ops.buffer(inputs.x), ops.buffer(inputs.router), ops.model.add_buffer(case.width)
    gates, ups, downs = (
        [ops.model.add_weight(int(t.type), t.data, *t.shape) for t in tensors]
        for tensors in (inputs.gates, inputs.ups, inputs.downs)
    )
    ops.model.experts_op(
        x=x, router=router, out=out, gates=gates, ups=ups, downs=downs, width=case.width,
        ffn_size=case.ffn_size, num_active=case.num_active, normalised=case.normalised,
    )  # fmt: skip
    return ops.run(out, [(x, inputs.x), (router, inputs.router)])
