"""Single ops on the native backend, so that each kernel can be held against its reference and timed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagoda import _native
from pagoda.backends.lowering import FLOAT_TYPES
from pagoda.kernels.attention.cases import AttentionCase, AttentionInputs
from pagoda.kernels.experts.cases import ExpertsCase, ExpertsInputs
from pagoda.runtime.forward_batch import Float32Array, Int32Array
from pagoda.weights.tensor import Tensor


class NativeOps:
    """A native model that holds only the ops of interest."""

    def __init__(self, isa: str, num_threads: int = 1) -> None:
        self.model = _native.Model(isa, num_threads)

    def buffer(self, rows: Float32Array) -> int:
        """A buffer as wide as these rows, which `run` writes to it once all ops are added."""
        return self.model.add_buffer(rows.shape[1])

    def run(
        self,
        out: int,
        inputs: Sequence[tuple[int, Float32Array]],
        *,
        positions: Int32Array | None = None,
        token_ids: Int32Array | None = None,
        query_start_loc: Int32Array | None = None,
        seq_lens: Int32Array | None = None,
        block_tables: Sequence[Int32Array] = (),
        slot_mapping: Sequence[Int32Array] = (),
        num_rows: int | None = None,
    ) -> Float32Array:
        """Run all ops once. Returns the rows of buffer `out`, float32 [num_rows, its width].

        `inputs` are buffers and what to write to them first; what of a batch is not given is that of one
        request which starts.
        """
        n = num_rows if num_rows is not None else len(inputs[0][1])
        everything = np.arange(n, dtype=np.int32)
        self.model.set_logits(out)
        for buffer, rows in inputs:
            self.model.write_buffer(buffer, np.ascontiguousarray(rows))
        self._batch = (
            everything if token_ids is None else token_ids,
            everything if positions is None else positions,
            np.asarray([0, n], np.int32) if query_start_loc is None else query_start_loc,
            np.asarray([n], np.int32) if seq_lens is None else seq_lens,
            list(block_tables),
            list(slot_mapping),
            everything,
        )
        result: Float32Array = self.model.forward(*self._batch).copy()
        return result

    def repeat(self, num_times: int) -> dict[str, float]:
        """Run what `run` ran again. Returns seconds of one thread by kind of stage, all times together.

        "wait" is what it waited for the others.
        """
        self.model.set_profile(True)
        self.model.take_profile()
        for _ in range(num_times):
            self.model.forward(*self._batch)
        self.model.set_profile(False)
        seconds = dict(self.model.take_profile())
        del seconds["steps"]
        return seconds


def run_linear(
    ops: NativeOps,
    x: Float32Array,
    weight: Tensor,
    bias: Float32Array | None = None,
    residual: Float32Array | None = None,
    *,
    num_copies: int = 1,
) -> Float32Array:
    """The result of a linear layer. Copies of the weight are multiplied one after the other, each a stage."""
    rows, cols = weight.shape
    source, out = ops.buffer(x), ops.model.add_buffer(rows)
    inputs = [(source, x)]
    quant = -1
    if weight.type not in FLOAT_TYPES:
        quant = ops.model.add_quant_buffer(cols)
        ops.model.row_op("quantize", a=source, out=quant)
    added = -1
    if residual is not None:
        added = ops.buffer(residual)
        inputs.append((added, residual))
    for _ in range(num_copies):  # all write to `out`: products that write apart would join into one stage
        ops.model.linear_op(
            x=source,
            quant=quant,
            out=out,
            weight=ops.model.add_weight(int(weight.type), weight.data, rows, cols),
            bias=-1 if bias is None else ops.model.add_vector(bias),
            residual=added,
        )
    return ops.run(out, inputs)


def run_attention(
    ops: NativeOps, case: AttentionCase, inputs: AttentionInputs, *, num_layers: int = 1
) -> Float32Array:
    """The result of writing a step's keys and values and attending, in each of so many layers."""
    model = ops.model
    model.add_group(num_layers, case.num_kv_heads, case.head_dim, len(inputs.k_cache), case.block_size)
    layers = [
        model.add_layer(0, i, case.num_heads, case.scale, case.softcap or 0.0, case.window or 0)
        for i in range(num_layers)
    ]
    q, k, v = (ops.buffer(rows) for rows in (inputs.q, inputs.k, inputs.v))
    out = model.add_buffer(inputs.q.shape[1])
    for layer in layers:
        model.row_op("write_kv", a=k, b=v, layer=layer)
        model.attention_op(q=q, out=out, layer=layer)
        model.row_op("merge_attention", out=out, layer=layer)
    model.poison()
    written = np.flatnonzero(~np.isnan(inputs.k_cache[:, :, 0, 0].reshape(-1))).astype(np.int32)
    if len(written):
        flat = (-1, case.num_kv_heads * case.head_dim)
        keys, values = inputs.k_cache.reshape(flat)[written], inputs.v_cache.reshape(flat)[written]
        for layer in layers:
            model.write_kv(layer, written, keys, values)
    return ops.run(
        out,
        [(q, inputs.q), (k, inputs.k), (v, inputs.v)],
        positions=inputs.positions,
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens,
        block_tables=[inputs.block_table],
        slot_mapping=[inputs.slot_mapping],
    )


def run_experts(
    ops: NativeOps, case: ExpertsCase, inputs: ExpertsInputs, *, num_layers: int = 1
) -> Float32Array:
    """The result of routed experts. Layers run one after the other, each with its own weights."""
    x, router, out = ops.buffer(inputs.x), ops.buffer(inputs.router), ops.model.add_buffer(case.width)
    for _ in range(num_layers):
        gates, ups, downs = (
            [ops.model.add_weight(int(t.type), t.data, *t.shape) for t in tensors]
            for tensors in (inputs.gates, inputs.ups, inputs.downs)
        )
        ops.model.experts_op(
            x=x,
            router=router,
            out=out,
            gates=gates,
            ups=ups,
            downs=downs,
            width=case.width,
            ffn_size=case.ffn_size,
            num_active=case.num_active,
            normalised=case.normalised,
        )
    return ops.run(out, [(x, inputs.x), (router, inputs.router)])
