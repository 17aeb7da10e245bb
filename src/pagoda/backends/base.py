"""The seam between a model's program and a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagoda.core.cost import KVCacheSpec
from pagoda.core.step import BlockCopy
from pagoda.runtime.forward_batch import Float32Array, ForwardBatch, SampleResult, SamplingBatch
from pagoda.runtime.program import Program
from pagoda.weights.tensor import WeightSource


class CompiledModel(Protocol):
    """A program with its weights and its physical KV cache on one device."""

    def forward(self, batch: ForwardBatch) -> Float32Array:
        """Run one step. Returns logits [len(logits_rows), vocab], valid until the next call."""

    def sample(self, logits: Float32Array, batch: SamplingBatch) -> SampleResult:
        """Choose one token a row (`kernels/sample/reference.py` is the meaning)."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...

    def kv_bytes_resident(self) -> int:
        """Bytes of KV memory that have been touched so far; the pool is committed on use."""

    def close(self) -> None: ...


class Backend(Protocol):
    name: str
    default_kv_dtype: str  # of `core.cost.BYTES_PER_VALUE`

    def compile(
        self, program: Program, weights: WeightSource, spec: KVCacheSpec, num_blocks: Sequence[int]
    ) -> CompiledModel:
        """Pack weights and reserve KV memory.

        Raises:
            ModelFileError: a tensor that the program reads is missing or has another shape, or the file
                holds tensors that nothing reads.
        """
