"""Lowering for backend "cpu": a program's ops become native buffers, weights and ops.

It assigns buffers to values, and quantises each value that a quantised weight reads once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from pagoda import _native
from pagoda.core.cost import KVCacheSpec
from pagoda.models.config import RopeConfig
from pagoda.runtime.program import (
    Activation,
    Add,
    AddPosition,
    Attention,
    Embed,
    Experts,
    GatedActivation,
    LayerNorm,
    Linear,
    Logits,
    Op,
    Program,
    RMSNorm,
    Rope,
    Scale,
    Value,
    inputs_of,
    last_uses,
)
from pagoda.weights.dequantize import dequantize
from pagoda.weights.tensor import TensorType, WeightSource

FLOAT_TYPES = {TensorType.F32, TensorType.F16, TensorType.BF16}


class Lowering:
    """One pass over a program's ops, adding native buffers, weights and ops to a model."""

    def __init__(
        self,
        native: _native.Model,
        program: Program,
        weights: WeightSource,
        spec: KVCacheSpec,
        num_blocks: Sequence[int],
    ) -> None:
        self.native = native
        self.program = program
        self.source = weights
        self.shapes = program.weight_shapes()
        self.last_use = last_uses(program)
        self.weights: dict[str, tuple[int, bool]] = {}  # name: native id, whether in floats
        self.buffers: dict[int, int] = {}  # value index: native buffer
        self.quantised: dict[int, int] = {}  # value index: native buffer of quantised rows
        self.free: defaultdict[int, list[int]] = defaultdict(list)  # width: buffers of dead values
        self.free_quantised: defaultdict[int, list[int]] = defaultdict(list)
        self.angles: dict[RopeConfig, int] = {}
        self.on_logits_rows = False  # whether values are down to the rows whose logits are needed
        self.layers: dict[int, tuple[int, int]] = {}  # layer: group, index in group
        for index, group in enumerate(spec.groups):
            native.add_group(
                len(group.layers), group.num_kv_heads, group.head_dim, num_blocks[index], spec.block_size
            )
            for position, layer in enumerate(group.layers):
                self.layers[layer] = (index, position)

    def run(self) -> None:
        # Largest first: a weight is in memory twice while it is packed, which costs least at the start.
        matrices = {name for op in self.program.ops for name in _matrices(op)}
        for name in sorted(matrices, key=lambda name: (-math.prod(self.shapes[name]), name)):
            self._weight(name)
        first_for_logits = _first_for_logits(self.program.ops)
        for index, op in enumerate(self.program.ops):
            if index == first_for_logits:
                self._keep_logits_rows()
            self._lower(op, index)
            for value in inputs_of(op):
                if self.last_use[value.index] == index:
                    self._release(value)

    def _lower(self, op: Op, index: int) -> None:
        match op:
            case Embed():
                self.native.row_op(
                    "embed", out=self._buffer(op.out), weight=self._weight(op.weight)[0], value=op.scale
                )
                for rope in dict.fromkeys(self.program.config.ropes):
                    self.angles[rope] = self.native.add_angles(
                        np.asarray(rope.inv_freq, np.float64), rope.attention_factor
                    )
                    self.native.row_op("angles", b=self.angles[rope])
            case Linear():
                weight, in_floats = self._weight(op.weight)
                quant = -1 if in_floats else self._quantise(op.x)
                self.native.linear_op(
                    x=self.buffers[op.x.index],
                    quant=quant,
                    out=self._buffer(op.out, reuse=op.residual, index=index),
                    weight=weight,
                    bias=-1 if op.bias is None else self._vector(op.bias),
                    residual=-1 if op.residual is None else self.buffers[op.residual.index],
                    on_logits_rows=self.on_logits_rows,
                )
            case Experts():
                self.native.experts_op(
                    x=self.buffers[op.x.index],
                    router=self.buffers[op.router.index],
                    out=self._buffer(op.out),
                    gates=[self._weight(name)[0] for name in op.gates],
                    ups=[self._weight(name)[0] for name in op.ups],
                    downs=[self._weight(name)[0] for name in op.downs],
                    width=op.x.width,
                    ffn_size=op.ffn_size,
                    num_active=op.num_active,
                    normalised=op.normalised,
                )
            case Attention():
                self._lower_attention(op)
            case Logits():
                self._lower_logits(op)
            case _:
                self._lower_row_op(op, index)

    def _lower_row_op(self, op: Op, index: int) -> None:
        """Ops on single rows without a matrix; most may write over what they read."""
        match op:
            case RMSNorm():
                self._row_op(
                    "norm",
                    a=self.buffers[op.x.index],
                    out=self._buffer(op.out, reuse=op.x, index=index),
                    weight=self._vector(op.weight),
                    width=op.width,
                    value=op.eps,
                )
            case LayerNorm():
                self._row_op(
                    "layer_norm",
                    a=self.buffers[op.x.index],
                    b=self._vector(op.bias),
                    out=self._buffer(op.out, reuse=op.x, index=index),
                    weight=self._vector(op.weight),
                    value=op.eps,
                )
            case AddPosition():
                self._row_op(
                    "add_position",
                    a=self.buffers[op.x.index],
                    out=self._buffer(op.out),
                    weight=self._weight(op.weight)[0],
                )
            case Rope():
                self._row_op(
                    "rope",
                    a=self.buffers[op.x.index],
                    b=self.angles[op.rope],
                    out=self._buffer(op.out, reuse=op.x, index=index),
                    width=op.head_dim,
                )
            case GatedActivation():
                self._row_op(
                    "gated",
                    a=self.buffers[op.gate.index],
                    b=self.buffers[op.up.index],
                    out=self._buffer(op.out, reuse=op.gate, index=index),
                    gelu=op.kind == "gelu_tanh",
                )
            case Activation():
                self._row_op(
                    "gelu",
                    a=self.buffers[op.x.index],
                    out=self._buffer(op.out, reuse=op.x, index=index),
                )
            case Scale():
                self._row_op(
                    "scale",
                    a=self.buffers[op.x.index],
                    out=self._buffer(op.out, reuse=op.x, index=index),
                    value=op.factor,
                )
            case Add():
                self._row_op(
                    "add",
                    a=self.buffers[op.a.index],
                    b=self.buffers[op.b.index],
                    out=self._buffer(op.out, reuse=op.a, index=index),
                )

    def _lower_attention(self, op: Attention) -> None:
        group, index_in_group = self.layers[op.layer]
        layer = self.native.add_layer(
            group, index_in_group, op.num_heads, op.scale, op.softcap or 0.0, op.window or 0
        )
        self.native.row_op("write_kv", a=self.buffers[op.k.index], b=self.buffers[op.v.index], layer=layer)
        out = self._buffer(op.out)
        self.native.attention_op(q=self.buffers[op.q.index], out=out, layer=layer)
        self.native.row_op("merge_attention", out=out, layer=layer)

    def _keep_logits_rows(self) -> None:
        """Past the last attention other rows are of no use: a prompt needs the logits of its last token."""
        for index, buffer in self.buffers.items():
            width = next(v.width for op in self.program.ops for v in inputs_of(op) if v.index == index)
            self.buffers[index] = self.native.add_buffer(width)
            self.native.row_op("gather", a=buffer, out=self.buffers[index], on_logits_rows=True)
        self.quantised.clear()
        self.free.clear()  # buffers of all rows are larger
        self.on_logits_rows = True

    def _lower_logits(self, op: Logits) -> None:
        weight, in_floats = self._weight(op.weight)
        if not self.on_logits_rows:
            self._keep_logits_rows()
        logits = self.native.add_buffer(self.program.config.vocab_size)
        self.native.linear_op(
            x=self.buffers[op.x.index],
            quant=-1 if in_floats else self._quantise(op.x),
            out=logits,
            weight=weight,
            on_logits_rows=True,
        )
        if op.softcap is not None:
            self.native.row_op("softcap", a=logits, value=op.softcap, on_logits_rows=True)
        self.native.set_logits(logits)

    def _row_op(self, kind: str, **arguments: Any) -> None:
        self.native.row_op(kind, on_logits_rows=self.on_logits_rows, **arguments)

    def _buffer(self, value: Value, *, reuse: Value | None = None, index: int = -1) -> int:
        """A buffer for a value; that of `reuse`, an input read element by element, when it dies here."""
        if reuse is not None and self.last_use[reuse.index] == index and reuse.width == value.width:
            buffer = self.buffers[reuse.index]
        else:
            free = self.free[value.width]
            buffer = free.pop() if free else self.native.add_buffer(value.width)
        self.buffers[value.index] = buffer
        return buffer

    def _release(self, value: Value) -> None:
        buffer = self.buffers.pop(value.index, None)
        if buffer is not None and buffer not in self.buffers.values():
            self.free[value.width].append(buffer)
        quantised = self.quantised.pop(value.index, None)
        if quantised is not None:
            self.free_quantised[value.width].append(quantised)

    def _quantise(self, value: Value) -> int:
        if value.index not in self.quantised:
            free = self.free_quantised[value.width]
            quant = free.pop() if free else self.native.add_quant_buffer(value.width)
            self._row_op("quantize", a=self.buffers[value.index], out=quant)
            self.quantised[value.index] = quant
        return self.quantised[value.index]

    def _weight(self, name: str) -> tuple[int, bool]:
        if name not in self.weights:
            tensor = self.source.tensors[name]
            rows, cols = tensor.shape
            native_id = self.native.add_weight(int(tensor.type), tensor.data, rows, cols)
            self.source.release(name)
            self.weights[name] = (native_id, tensor.type in FLOAT_TYPES)
        return self.weights[name]

    def _vector(self, name: str) -> int:
        return self.native.add_vector(dequantize(self.source.tensors[name]).reshape(-1))


def _first_for_logits(ops: Sequence[Op]) -> int:
    """Index of the first op after the last one of all rows: attention, and experts, whose rows meet."""
    return 1 + max(i for i, op in enumerate(ops) if isinstance(op, Embed | Attention | Experts | AddPosition))


def _matrices(op: Op) -> tuple[str, ...]:
    match op:
        case Embed() | Linear() | Logits() | AddPosition():
            return (op.weight,)
        case Experts():
            return (*op.gates, *op.ups, *op.downs)
    return ()
