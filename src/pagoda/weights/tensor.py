"""A tensor as it lies in a model file: quantised bytes, not yet unpacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod
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
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30
    MXFP4 = 39

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
    TensorType.IQ4_NL: (32, 18),
    TensorType.IQ4_XS: (256, 136),
    TensorType.MXFP4: (32, 17),
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


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a type that no weight has; `dtype` is its name in the file's format."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorOutline:
    """What is known of a tensor before it is read or made."""

    type: TensorType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.type.num_bytes(prod(self.shape))


class DerivedTensors(Mapping[str, Tensor]):
    """Tensors that are made anew each time they are looked up, as they may be large; none is kept.

    `outlines` has types and shapes of all, for which nothing is read.
    """

    def __init__(self, outlines: Mapping[str, TensorOutline], make: Callable[[str], Tensor]) -> None:
        self.outlines = outlines
        self._make = make

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.outlines:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self.outlines

    def __iter__(self) -> Iterator[str]:
        return iter(self.outlines)

    def __len__(self) -> int:
        return len(self.outlines)


def outlines_of(tensors: Mapping[str, Tensor]) -> Mapping[str, TensorOutline]:
    """Types and shapes, without making tensors that are made on demand."""
    outlines: Mapping[str, TensorOutline] | None = getattr(tensors, "outlines", None)
    if outlines is not None:
        return outlines
    return {name: TensorOutline(tensor.type, tensor.shape) for name, tensor in tensors.items()}


class WeightSource(Protocol):
    """Named tensors of one model under GGUF's names (`blk.0.attn_q.weight`, `token_embd.weight`, ...).

    Whatever a file format does to rows (the q/k order of llama's GGUF files) is undone here: rotary
    dimension i of a head always pairs with i + rotary_dim / 2.
    """

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def release(self, name: str) -> None:
        """Say that a tensor has been packed, so that its file pages need not stay in memory."""
