"""Backend "reference": what a program means, in numpy and float32.

It dequantises every weight and runs one op after the other with the functions of `kernels/*/reference.py`.
Other backends have to agree with it. It also checks what they take for granted: a step whose slots or
block tables are wrong raises here instead of corrupting another request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.core.cost import KVCacheSpec
from pagoda.core.step import BlockCopy
from pagoda.errors import UnsupportedError
from pagoda.kernels.activation.reference import activation, gated, softcap
from pagoda.kernels.attention.reference import KVArray, attention, write_kv
from pagoda.kernels.embed.reference import embed
from pagoda.kernels.experts.reference import experts
from pagoda.kernels.layer_norm.reference import layer_norm
from pagoda.kernels.linear.reference import linear
from pagoda.kernels.rms_norm.reference import rms_norm
from pagoda.kernels.rope.reference import rope
from pagoda.runtime.forward_batch import Float32Array, ForwardBatch, Int32Array, SampleResult, SamplingBatch
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
    last_uses,
)
from pagoda.weights.checkpoint import require_all_read
from pagoda.weights.dequantize import dequantize
from pagoda.weights.tensor import WeightSource

KV_DTYPES: dict[str, type[np.float16] | type[np.float32]] = {"f16": np.float16, "f32": np.float32}


class ReferenceBackend:
    """Compiles programs for numpy. `kv_fill` is what fresh KV slots hold; tests pass NaN."""

    name = "reference"
    default_kv_dtype = "f16"

    def __init__(self, *, kv_fill: float = 0.0) -> None:
        self._kv_fill = kv_fill

    def compile(
        self, program: Program, weights: WeightSource, spec: KVCacheSpec, num_blocks: Sequence[int]
    ) -> ReferenceModel:
        """Dequantise the weights to float32 and reserve KV arrays of `spec.dtype`.

        Raises:
            ModelFileError: a tensor that the program reads is missing or has another shape, or the file
                holds tensors that nothing reads.
            UnsupportedError: the KV type is none of `KV_DTYPES`.
        """
        if spec.dtype not in KV_DTYPES:
            raise UnsupportedError(
                f"the reference backend has no KV type {spec.dtype!r}",
                hint=f"choose one of: {', '.join(KV_DTYPES)}",
            )
        arrays = _load_weights(program, weights)
        return ReferenceModel(program, arrays, KVArrays(spec, num_blocks, self._kv_fill))


class KVArrays:
    """Physical KV: for each layer keys and values [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, spec: KVCacheSpec, num_blocks: Sequence[int], fill: float) -> None:
        self.spec = spec
        self.num_blocks = tuple(num_blocks)
        self.group_of_layer: dict[int, int] = {}
        self.layers: dict[int, tuple[KVArray, KVArray]] = {}
        self.touched = [np.zeros(n, np.bool_) for n in self.num_blocks]
        for index, (group, n) in enumerate(zip(spec.groups, self.num_blocks, strict=True)):
            for layer in group.layers:
                shape = (n, spec.block_size, group.num_kv_heads, group.head_dim)
                self.group_of_layer[layer] = index
                self.layers[layer] = (self._reserve(shape, fill), self._reserve(shape, fill))

    def _reserve(self, shape: tuple[int, ...], fill: float) -> KVArray:
        dtype = KV_DTYPES[self.spec.dtype]
        # Zeroed pages are not committed until they are written; any other fill commits them now.
        return np.zeros(shape, dtype) if fill == 0.0 else np.full(shape, fill, dtype)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for group, source, target in copies:
            for layer in self.spec.groups[group].layers:
                for array in self.layers[layer]:
                    array[target] = array[source]
            self.touched[group][target] = True

    def bytes_resident(self) -> int:
        return sum(int(t.sum()) * self.spec.block_bytes(g) for g, t in enumerate(self.touched))


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A program with float32 weights and its KV arrays; see `CompiledModel` for the methods."""

    program: Program
    weights: dict[str, Float32Array]
    kv: KVArrays

    def forward(self, batch: ForwardBatch) -> Float32Array:
        """Logits float32 [len(logits_rows), vocab] of one step; keys and values go to the KV cache.

        Raises:
            ValueError: the batch contradicts itself or the KV cache. Nothing has been written then.
        """
        check_batch(batch, self.kv, self.program.config.vocab_size)
        for group, slots in enumerate(batch.slot_mapping):
            self.kv.touched[group][slots // self.kv.spec.block_size] = True
        values: dict[int, Float32Array] = {}
        logits: Float32Array | None = None
        for op, last_used in zip(self.program.ops, _released(self.program), strict=True):
            result = self._run(op, values, batch)
            if isinstance(op, Logits):
                logits = result
            else:
                values[op.out.index] = result
            for index in last_used:
                del values[index]
        assert logits is not None, "the program has no logits op"
        return logits

    def _run(self, op: Op, values: dict[int, Float32Array], batch: ForwardBatch) -> Float32Array:
        w = self.weights

        def of(value: Value) -> Float32Array:
            return values[value.index]

        match op:
            case Embed():
                return embed(batch.token_ids, w[op.weight], op.scale)
            case RMSNorm():
                return rms_norm(of(op.x), w[op.weight], op.eps)
            case LayerNorm():
                return layer_norm(of(op.x), w[op.weight], w[op.bias], op.eps)
            case AddPosition():
                return embed(batch.positions, w[op.weight]) + of(op.x)
            case Linear():
                bias = None if op.bias is None else w[op.bias]
                residual = None if op.residual is None else of(op.residual)
                return linear(of(op.x), w[op.weight], bias, residual)
            case Rope():
                r = op.rope
                return rope(of(op.x), batch.positions, r.inv_freq, op.head_dim, r.attention_factor)
            case Attention():
                return self._attend(op, of(op.q), of(op.k), of(op.v), batch)
            case GatedActivation():
                return gated(of(op.gate), of(op.up), op.kind)
            case Activation():
                return activation(of(op.x), op.kind)
            case Experts():
                gates, ups, downs = ([w[name] for name in names] for names in (op.gates, op.ups, op.downs))
                return experts(
                    of(op.x), of(op.router), gates, ups, downs, op.num_active, normalised=op.normalised
                )
            case Add():
                return of(op.a) + of(op.b)
            case Scale():
                scaled: Float32Array = of(op.x) * np.float32(op.factor)
                return scaled
            case Logits():
                return softcap(linear(of(op.x)[batch.logits_rows], w[op.weight]), op.softcap)

    def _attend(
        self, op: Attention, q: Float32Array, k: Float32Array, v: Float32Array, batch: ForwardBatch
    ) -> Float32Array:
        group = self.kv.group_of_layer[op.layer]
        k_cache, v_cache = self.kv.layers[op.layer]
        write_kv(k, v, k_cache, v_cache, batch.slot_mapping[group])
        return attention(
            q,
            k_cache,
            v_cache,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_tables[group],
            scale=op.scale,
            window=op.window,
            softcap=op.softcap,
        )

    def sample(self, logits: Float32Array, batch: SamplingBatch) -> SampleResult:
        """One token a row of logits; `kernels/sample/reference.py` is the meaning."""
        from pagoda.kernels.sample.reference import sample

        return sample(logits, batch)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in order, in every layer of their group."""
        self.kv.copy(copies)

    def kv_bytes_resident(self) -> int:
        """Bytes of the blocks written so far."""
        return self.kv.bytes_resident()

    def close(self) -> None:
        """Let weights and KV go; the model cannot run afterwards."""
        self.weights.clear()
        self.kv.layers.clear()
        for touched in self.kv.touched:
            touched[:] = False


def check_batch(batch: ForwardBatch, kv: KVArrays, vocab_size: int) -> None:
    """Refuse a step that reads or writes what it must not.

    Every token's slot has to be that of its position in its request's block table, no slot may be written
    twice, and ids, positions and rows have to be in range.

    Raises:
        ValueError: names the array that is wrong.
    """
    num_tokens = len(batch.token_ids)
    counts = np.diff(batch.query_start_loc)
    request_of_row = np.repeat(np.arange(len(counts)), counts)
    if batch.query_start_loc[0] != 0 or len(request_of_row) != num_tokens or (counts < 0).any():
        raise ValueError("query_start_loc does not cut token_ids into requests")
    from_end = batch.query_start_loc[1:][request_of_row] - np.arange(num_tokens)
    _require(np.array_equal(batch.positions, batch.seq_lens[request_of_row] - from_end), "positions")
    _require(bool((batch.positions >= 0).all()), "positions")
    _require(_in_range(batch.token_ids, vocab_size), "token_ids")
    _require(_in_range(batch.logits_rows, num_tokens), "logits_rows")
    _require(len(batch.block_tables) == len(batch.slot_mapping) == len(kv.num_blocks), "block_tables")
    block_size = kv.spec.block_size
    for table, slots, n in zip(batch.block_tables, batch.slot_mapping, kv.num_blocks, strict=True):
        block_of_row = batch.positions // block_size
        _require(_in_range(block_of_row, table.shape[1]), "block_tables")
        blocks = table[request_of_row, block_of_row]
        _require(_in_range(blocks, n), "block_tables")
        _require(np.array_equal(slots, blocks * block_size + batch.positions % block_size), "slot_mapping")
        _require(len(np.unique(slots)) == num_tokens, "slot_mapping")


def _require(ok: bool, name: str) -> None:
    if not ok:
        raise ValueError(f"{name} of the batch is wrong")


def _in_range(indices: Int32Array, end: int) -> bool:
    return bool(((indices >= 0) & (indices < end)).all())


def _load_weights(program: Program, weights: WeightSource) -> dict[str, Float32Array]:
    require_all_read(weights, program)
    arrays: dict[str, Float32Array] = {}
    for name in program.weight_names():
        arrays[name] = dequantize(weights.tensors[name])
        weights.release(name)
    return arrays


def _released(program: Program) -> Iterator[tuple[int, ...]]:
    """For each op, the values that no later op reads, so that a long prompt need not keep them all."""
    released: list[list[int]] = [[] for _ in program.ops]
    for index, number in last_uses(program).items():
        released[number].append(index)
    return (tuple(indices) for indices in released)
