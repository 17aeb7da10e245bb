"""A tensor as it lies in a model file: quantised bytes, not yet unpacked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TensorType(IntEnum):
    """Element types of GGUF, with GGUF's numbers (ggml_type)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30

    @property
    def block_elements(self) -> int:
        """Elements that one quantisation block covers."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        return _BLOCKS[self][1]

    def num_bytes(self, num_elements: int) -> int:
        return num_elements // self.block_elements * self.block_bytes


_BLOCKS = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor. `shape` is row-major, so a linear layer's is (outputs, inputs); rows are contiguous.

    `data` is uint8 [bytes], usually a view of a memory-mapped file: reading it may page it in.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class WeightSource(Protocol):
    """Named tensors of one model under GGUF's names (`blk.0.attn_q.weight`, `token_embd.weight`, ...).

    Whatever a file format does to rows (the q/k order of llama's GGUF files) is undone here: rotary
    dimension i of a head always pairs with i + rotary_dim / 2.
    """

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def release(self, name: str) -> None:
        """Say that a tensor has been packed, so that its file pages need not stay in memory."""
