"""Backend "cpu": a program lowered to native stages, run by persistent threads in one call a step.

`backends/lowering.py` turns ops into native ones, which the native side joins into stages (`kernels/step.h`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pagoda import _native
from pagoda.backends.lowering import Lowering
from pagoda.core.cost import CPU_KV_DTYPE, KVCacheSpec
from pagoda.core.step import BlockCopy
from pagoda.errors import UnsupportedError
from pagoda.runtime.forward_batch import Float32Array, ForwardBatch, SampleResult, SamplingBatch
from pagoda.runtime.program import Program
from pagoda.weights.checkpoint import require_all_read
from pagoda.weights.tensor import WeightSource

MAX_HEAD_DIM = 512


class CPUBackend:
    """Native kernels on `num_threads` threads.

    `isa` forces an instruction set of `pagoda._native.isas()`, as the variable PAGODA_ISA does; results are
    the same bits on all of them.
    """

    name = "cpu"
    default_kv_dtype = CPU_KV_DTYPE

    def __init__(self, *, num_threads: int = 1, isa: str | None = None) -> None:
        if num_threads < 1:
            raise UnsupportedError(f"num_threads is {num_threads}; it must be at least 1")
        isa = isa or os.environ.get("PAGODA_ISA")
        if isa and isa not in _native.isas():
            raise UnsupportedError(
                f"this machine has no instruction set {isa!r}",
                hint=f"choose one of: {', '.join(_native.isas())}",
            )
        self._num_threads = num_threads
        self._isa = isa or ""

    def compile(
        self, program: Program, weights: WeightSource, spec: KVCacheSpec, num_blocks: Sequence[int]
    ) -> CPUModel:
        """Pack weights into panels and reserve KV memory, which is committed when it is first written.

        Raises:
            ModelFileError: the file's tensors are not those that the program reads.
            UnsupportedError: a KV type, block size or head dim that the kernels do not have.
        """
        if spec.dtype != self.default_kv_dtype:
            raise UnsupportedError(
                f"the cpu backend has no KV type {spec.dtype!r}",
                hint="choose i16: integers of 13 bits in 16, with a scale for each key and value of a head",
            )
        if spec.block_size % 16:
            raise UnsupportedError(f"block_size is {spec.block_size}; it must be a multiple of 16")
        for group in spec.groups:
            if group.head_dim > MAX_HEAD_DIM:
                raise UnsupportedError(f"head_dim is {group.head_dim}; it must be at most {MAX_HEAD_DIM}")
        require_all_read(weights, program)
        native = _native.Model(self._isa, self._num_threads)
        Lowering(native, program, weights, spec, num_blocks).run()
        return CPUModel(native, spec)


class CPUModel:
    """A lowered program with packed weights and paged KV in i16; see `CompiledModel` for the methods."""

    def __init__(self, native: _native.Model, spec: KVCacheSpec) -> None:
        self.native = native
        self.spec = spec

    def forward(self, batch: ForwardBatch) -> Float32Array:
        return self.native.forward(
            batch.token_ids,
            batch.positions,
            batch.query_start_loc,
            batch.seq_lens,
            list(batch.block_tables),
            list(batch.slot_mapping),
            batch.logits_rows,
        )

    def sample(self, logits: Float32Array, batch: SamplingBatch) -> SampleResult:
        return SampleResult(*self.native.sample(logits, *sample_arguments(batch)))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for group, source, target in copies:
            self.native.copy_block(group, source, target)

    def kv_bytes_resident(self) -> int:
        return self.native.kv_bytes_resident

    def close(self) -> None:
        """Native memory goes when the object does; there is nothing that outlives it."""


def sample_arguments(batch: SamplingBatch) -> tuple[object, ...]:
    """The arrays of a sampling batch in the order that native code takes them."""
    return (
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        batch.repetition_penalty,
        batch.presence_penalty,
        batch.frequency_penalty,
        batch.seed,
        batch.counter,
        batch.history_start_loc,
        batch.history_token_ids,
        batch.history_output_counts,
        batch.bias_start_loc,
        batch.bias_token_ids,
        batch.bias_values,
        batch.num_logprobs,
        batch.allowed_mask,
    )
