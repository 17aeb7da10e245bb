"""How each kernel folder's cases are run natively: the error against the reference, and a run to time.

A case whose data comes from memory in a real step (weights and KV of decode) is run over enough copies of it
to leave no cache warm; every other case finds its data in caches, as rows do that were just computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagoda.backends.cpu import sample_arguments
from pagoda.backends.lowering import FLOAT_TYPES
from pagoda.bench.native_ops import NativeOps, run_attention, run_experts, run_linear
from pagoda.kernels.activation.cases import GatedCase
from pagoda.kernels.activation.reference import gated
from pagoda.kernels.attention.cases import AttentionCase, AttentionInputs
from pagoda.kernels.attention.reference import attention, fixed_point, write_kv
from pagoda.kernels.embed.cases import EmbedCase
from pagoda.kernels.embed.reference import embed
from pagoda.kernels.experts.cases import ExpertsCase
from pagoda.kernels.experts.reference import experts
from pagoda.kernels.layer_norm.cases import LayerNormCase
from pagoda.kernels.layer_norm.reference import layer_norm
from pagoda.kernels.linear.cases import LinearCase
from pagoda.kernels.linear.reference import linear
from pagoda.kernels.quantize.cases import QuantizeCase
from pagoda.kernels.quantize.reference import quantize
from pagoda.kernels.rms_norm.cases import RMSNormCase
from pagoda.kernels.rms_norm.reference import rms_norm
from pagoda.kernels.rope.cases import RopeCase
from pagoda.kernels.rope.reference import rope
from pagoda.kernels.sample.cases import SampleCase
from pagoda.kernels.sample.reference import sample
from pagoda.runtime.forward_batch import Float32Array, SampleResult
from pagoda.weights.dequantize import dequantize
from pagoda.weights.tensor import Tensor, TensorType

COLD_BYTES = 256 << 20  # read between two uses of the same byte; what the ceiling of memory is measured with
MAX_COPIES = 1000  # of small cases, which then are not cold
MAX_COLD_TOKENS = 8  # of a linear layer: beyond, its time is that of the products, wherever weights come from
ROW_OP_BYTES = 1 << 20  # rows that one stage of row ops works on, so that its barrier does not count


@dataclass(frozen=True, slots=True)
class PreparedCase:
    """A case that has run once.

    `error` is measured as the case's `tolerance` says. `is_cold` says that its data comes from memory,
    `counts_dots` that its operations are byte dot products. `measure(n)` runs it n times and returns the
    seconds of all of them; a call may do `num_executions` of it at once.
    """

    error: float
    is_cold: bool
    counts_dots: bool
    num_executions: int
    measure: Callable[[int], float]


def relative_error(result: Float32Array, expected: Float32Array) -> float:
    """Largest error over the largest value expected; infinite when a result is not finite."""
    if not np.isfinite(result).all():
        return float("inf")
    return float(np.abs(result - expected).max() / np.abs(expected).max())


def prepare_linear(case: LinearCase, isa: str, num_threads: int) -> PreparedCase:
    x, weight, bias, residual = case.make_inputs()
    num_copies, is_cold = _num_copies(len(weight.data)) if case.num_tokens <= MAX_COLD_TOKENS else (1, False)
    ops = NativeOps(isa, num_threads)
    result = run_linear(ops, x, weight, bias, residual, num_copies=num_copies)
    matrix = dequantize(weight)
    error = result - linear(x, matrix, bias, residual)
    # The size of a result whose terms do not happen to cancel.
    size = np.mean(x**2 @ (matrix**2).T)
    return PreparedCase(
        error=float(np.sqrt(np.mean(error**2) / size)),
        is_cold=is_cold,
        counts_dots=weight.type not in FLOAT_TYPES,
        num_executions=num_copies,
        measure=lambda n: _stage_s(ops.repeat(n), "linear"),
    )


def prepare_attention(case: AttentionCase, isa: str, num_threads: int) -> PreparedCase:
    inputs = case.make_inputs()
    is_decode = all(num_tokens == 1 for _, num_tokens in case.requests)
    num_layers, is_cold = _num_copies(case.num_bytes) if is_decode else (1, False)
    ops = NativeOps(isa, num_threads)
    result = run_attention(ops, case, inputs, num_layers=num_layers)
    expected = _expected_attention(case, inputs)
    return PreparedCase(
        error=relative_error(result, expected),
        is_cold=is_cold,
        counts_dots=False,
        num_executions=num_layers,
        measure=lambda n: sum(ops.repeat(n).values()),  # with writing keys and values, and merging parts
    )


def _expected_attention(case: AttentionCase, inputs: AttentionInputs) -> Float32Array:
    """The reference's result on queries, keys and values as the KV type of the cpu backend keeps them."""

    def kept(rows: Float32Array, num_heads: int) -> Float32Array:
        return fixed_point(rows.reshape(-1, num_heads, case.head_dim)).reshape(rows.shape)

    q, k, v = kept(inputs.q, case.num_heads), *(kept(x, case.num_kv_heads) for x in (inputs.k, inputs.v))
    k_cache, v_cache = fixed_point(inputs.k_cache), fixed_point(inputs.v_cache)
    write_kv(k, v, k_cache, v_cache, inputs.slot_mapping)
    return attention(
        q,
        k_cache,
        v_cache,
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_table,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
    )


def prepare_experts(case: ExpertsCase, isa: str, num_threads: int) -> PreparedCase:
    inputs = case.make_inputs()
    num_layers, is_cold = _num_copies(case.num_bytes) if case.num_tokens <= MAX_COLD_TOKENS else (1, False)
    ops = NativeOps(isa, num_threads)
    result = run_experts(ops, case, inputs, num_layers=num_layers)
    gates, ups, downs = (
        [dequantize(t) for t in tensors] for tensors in (inputs.gates, inputs.ups, inputs.downs)
    )
    expected = experts(
        inputs.x, inputs.router, gates, ups, downs, case.num_active, normalised=case.normalised
    )
    return PreparedCase(
        error=float(np.sqrt(np.mean((result - expected) ** 2) / np.mean(expected**2))),
        is_cold=is_cold,
        counts_dots=case.weight_type not in FLOAT_TYPES,
        num_executions=num_layers,
        measure=lambda n: sum(ops.repeat(n).values()),  # with routing, quantising and adding up
    )


def prepare_layer_norm(case: LayerNormCase, isa: str, num_threads: int) -> PreparedCase:
    x, weight, bias, eps = case.make_inputs()

    def add(ops: NativeOps, source: int, out: int) -> None:
        vectors = [ops.model.add_vector(v) for v in (weight, bias)]
        ops.model.row_op("layer_norm", a=source, b=vectors[1], out=out, weight=vectors[0], value=eps)

    expected = layer_norm(x, weight, bias, eps)
    return _prepare_rows(case, isa, num_threads, {"x": x}, case.width, add, expected)


def prepare_rms_norm(case: RMSNormCase, isa: str, num_threads: int) -> PreparedCase:
    x, weight, eps = case.make_inputs()

    def add(ops: NativeOps, source: int, out: int) -> None:
        vector = ops.model.add_vector(weight)
        ops.model.row_op("norm", a=source, out=out, weight=vector, width=case.run_width, value=eps)

    return _prepare_rows(case, isa, num_threads, {"a": x}, case.width, add, rms_norm(x, weight, eps))


def prepare_rope(case: RopeCase, isa: str, num_threads: int) -> PreparedCase:
    x, positions, inv_freq, head_dim, factor = case.make_inputs()
    angles: list[int] = []

    def add(ops: NativeOps, source: int, out: int) -> None:
        if not angles:
            angles.append(ops.model.add_angles(np.asarray(inv_freq, np.float64), factor))
            ops.model.row_op("angles", b=angles[0])  # once for all layers, as in a step
        ops.model.row_op("rope", a=source, b=angles[0], out=out, width=head_dim)

    expected = rope(x, positions, inv_freq, head_dim, factor)
    batch = {"positions": positions}
    return _prepare_rows(case, isa, num_threads, {"a": x}, x.shape[1], add, expected, batch)


def prepare_gated(case: GatedCase, isa: str, num_threads: int) -> PreparedCase:
    gate, up, kind = case.make_inputs()

    def add(ops: NativeOps, source: int, out: int) -> None:
        ops.model.row_op("gated", a=source, b=source + 1, out=out, gelu=kind == "gelu_tanh")

    rows = {"gate": gate, "up": up}
    return _prepare_rows(case, isa, num_threads, rows, case.width, add, gated(gate, up, kind))


def prepare_embed(case: EmbedCase, isa: str, num_threads: int) -> PreparedCase:
    token_ids, weight, scale = case.make_inputs()
    table: list[int] = []

    def add(ops: NativeOps, source: int, out: int) -> None:
        if not table:
            table.append(ops.model.add_weight(int(weight.type), weight.data, *weight.shape))
        ops.model.row_op("embed", out=out, weight=table[0], value=scale)

    expected = embed(token_ids, dequantize(weight), scale)
    batch = {"token_ids": token_ids, "num_rows": case.num_tokens}
    return _prepare_rows(case, isa, num_threads, {}, case.width, add, expected, batch)


def prepare_quantize(case: QuantizeCase, isa: str, num_threads: int) -> PreparedCase:
    """Quantised rows cannot be read, so an identity in Q8_0, which changes no bit of them, reads a few."""
    (x,) = case.make_inputs()
    few = x[:4]
    error = relative_error(run_linear(NativeOps(isa), few, _identity(case.width)), quantize(few))
    ops = NativeOps(isa, num_threads)
    source, quant = ops.buffer(x), ops.model.add_quant_buffer(case.width)
    num_executions = _num_row_ops(case)
    for _ in range(num_executions):
        ops.model.row_op("quantize", a=source, out=quant)
    ops.run(source, [(source, x)])
    return PreparedCase(error, False, False, num_executions, lambda n: _stage_s(ops.repeat(n), "row"))


def prepare_sample(case: SampleCase, isa: str, num_threads: int) -> PreparedCase:
    logits, batch = case.make_inputs()
    model = NativeOps(isa, num_threads).model
    fields = sample_arguments(batch)
    result, expected = SampleResult(*model.sample(logits, *fields)), sample(logits, batch)
    is_same = np.array_equal(result.token_ids, expected.token_ids)
    errors = [
        np.abs(a - b) / (1 + np.abs(b))
        for a, b in (
            (result.logprobs, expected.logprobs),
            (result.top_logprobs, expected.top_logprobs),
        )
    ]
    error = max((float(e[~np.isnan(e)].max(initial=0)) for e in errors), default=0.0)

    def measure(num_times: int) -> float:
        start_s = time.perf_counter()
        for _ in range(num_times):
            model.sample(logits, *fields)
        return time.perf_counter() - start_s

    return PreparedCase(error if is_same else float("inf"), False, False, 1, measure)


def _prepare_rows(
    case: Any,
    isa: str,
    num_threads: int,
    inputs: dict[str, Float32Array],
    width: int,
    add: Callable[[NativeOps, int, int], None],
    expected: Float32Array,
    batch: dict[str, Any] | None = None,
) -> PreparedCase:
    """A row op, several times over in one stage. `add` is given the first of the buffers of `inputs`."""
    ops = NativeOps(isa, num_threads)
    buffers = [(ops.buffer(rows), rows) for rows in inputs.values()]
    out = ops.model.add_buffer(width)
    num_executions = _num_row_ops(case)
    for _ in range(num_executions):
        add(ops, buffers[0][0] if buffers else -1, out)
    result = ops.run(out, buffers, **(batch or {}))
    error = relative_error(result, expected)
    return PreparedCase(error, False, False, num_executions, lambda n: _stage_s(ops.repeat(n), "row"))


def _stage_s(seconds: dict[str, float], kind: str) -> float:
    """Seconds of stages of one kind, until the last thread is through."""
    return seconds[kind] + seconds["wait"]


def _num_copies(num_bytes: int) -> tuple[int, bool]:
    """How many copies of so many bytes to go through, and whether no cache holds them all."""
    num_copies = min(MAX_COPIES, -(-COLD_BYTES // num_bytes))
    return num_copies, num_copies * num_bytes >= COLD_BYTES


def _num_row_ops(case: Any) -> int:
    return max(1, min(64, ROW_OP_BYTES // int(case.num_bytes)))


def _identity(width: int) -> Tensor:
    """The unit matrix in Q8_0: a block is a half-precision scale of 1 and 32 signed bytes."""
    blocks = np.zeros((width, width // 32, 34), np.uint8)
    blocks[:, :, :2] = np.array([1], np.float16).view(np.uint8)
    column = np.arange(width)
    blocks[column, column // 32, 2 + column % 32] = 1
    return Tensor("identity", TensorType.Q8_0, (width, width), blocks.reshape(-1))
