"""`TensorFile`: the mapped files of one model and where each tensor lies in them, whatever their format."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType

import numpy as np

from pagoda.errors import ModelFileError
from pagoda.weights.tensor import StoredArray, Tensor, TensorType

_NUM_SAMPLES = 4  # of a tensor, for the digest; spread evenly, both ends included
_SAMPLE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `start` is counted from the beginning of the file.

    `type` is the format's own name where it is no type of weights.
    """

    name: str
    type: TensorType | str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """`num_bytes` is the header's own length, before any padding that precedes tensor data."""

    metadata: Mapping[str, object]
    tensors: tuple[TensorInfo, ...]
    num_bytes: int


class TensorFile:
    """An open, memory-mapped model. Tensors are views of the mapping and stay valid until it is closed.

    `arrays` has what is stored in types that no weight has: packed integers, masks.
    """

    def __init__(self, paths: Sequence[Path], maps: Sequence[mmap.mmap], headers: Sequence[Header]) -> None:
        self.paths = tuple(paths)
        self.metadata = headers[0].metadata
        self.tensors: dict[str, Tensor] = {}
        self.arrays: dict[str, StoredArray] = {}
        self._maps = list(maps)
        self._header_bytes = [header.num_bytes for header in headers]
        self._places: dict[str, tuple[mmap.mmap, TensorInfo]] = {}
        for shard, header in zip(maps, headers, strict=True):
            _drop_pages(shard, 0, header.num_bytes)
            for info in header.tensors:
                data = np.frombuffer(shard, np.uint8, info.num_bytes, info.start)
                if isinstance(info.type, TensorType):
                    self.tensors[info.name] = Tensor(info.name, info.type, info.shape, data)
                else:
                    self.arrays[info.name] = StoredArray(info.name, info.type, info.shape, data)
                self._places[info.name] = (shard, info)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as they lie in the file, quantised."""
        return sum(info.num_bytes for _, info in self._places.values())

    def digest(self) -> str:
        """Identifies the content, in hex: of sizes, headers and a sample of every tensor's bytes.

        Not of all bytes, which would take as long as reading them. Files that were trained or quantised
        differently differ nearly everywhere, and small tensors are read whole.
        """
        state = sha256()
        for shard, num_bytes in zip(self._maps, self._header_bytes, strict=True):
            state.update(len(shard).to_bytes(8, "little"))
            with memoryview(shard) as view, view[:num_bytes] as header:
                state.update(header)
            _drop_pages(shard, 0, num_bytes)
        for stored in [t.data for t in self.tensors.values()] + [a.data for a in self.arrays.values()]:
            data = stored.data
            if len(data) <= _NUM_SAMPLES * _SAMPLE_BYTES:
                state.update(data)
                continue
            last = len(data) - _SAMPLE_BYTES
            for i in range(_NUM_SAMPLES):
                start = last * i // (_NUM_SAMPLES - 1)
                state.update(data[start : start + _SAMPLE_BYTES])
        return state.hexdigest()[:32]

    def release(self, name: str) -> None:
        """Let the file pages of one tensor leave memory; reading it again pages it in again."""
        shard, info = self._places[name]
        _drop_pages(shard, info.start, info.num_bytes)

    def check_size(self) -> None:
        """Raise ModelFileError when a file has shrunk since it was opened: reading it would end by signal."""
        for path, shard in zip(self.paths, self._maps, strict=True):
            size = shard.size()
            if size < len(shard):
                raise ModelFileError(
                    f"{path}: the file had {len(shard)} bytes when it was opened and now has {size}",
                    hint="something is rewriting the file; wait until it is complete",
                )

    def close(self) -> None:
        """Drop the mapping; where tensors are still held elsewhere, it goes with the last of them."""
        self.tensors.clear()
        self.arrays.clear()
        self._places.clear()
        for shard in self._maps:
            try:
                shard.close()
            except BufferError:
                continue
        self._maps = []
        self.paths = ()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file for reading.

    Raises:
        ModelFileError: it is empty, no regular file, or cannot be read.
    """
    if path.is_dir():
        raise ModelFileError(f"{path}: this is a folder", hint="give the path of a model file")
    if not path.is_file():
        raise ModelFileError(f"{path}: this is not a regular file", hint="give the path of a model file")
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(f"{path}: the file is empty", hint="fetch the model file again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {e.strerror}") from e


def _drop_pages(data: mmap.mmap, start: int, num_bytes: int) -> None:
    """Pages shared with a neighbour go too: the mapping is read-only, so they come back when read."""
    if not hasattr(mmap, "MADV_DONTNEED") or not num_bytes:
        return
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    data.madvise(mmap.MADV_DONTNEED, first, start + num_bytes - first)
