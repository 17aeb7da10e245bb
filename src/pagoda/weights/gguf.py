"""Reading GGUF files: one file, or a model split into `NAME-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import TracebackType

import numpy as np

from pagoda.errors import ModelFileError, ModelNotFoundError
from pagoda.weights.gguf_header import Header, TensorInfo, parse_header
from pagoda.weights.gguf_reader import DAMAGED
from pagoda.weights.metadata import get_int
from pagoda.weights.tensor import Tensor

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BYTE_PIECE_NAME = re.compile(
    r".+\.gguf[.-]?(part\d+of\d+|split-?[a-z]{1,2}|part-?\w{1,3}|\d{3})", re.IGNORECASE
)
_NUM_SAMPLES = 4  # of a tensor, for the digest; spread evenly, both ends included
_SAMPLE_BYTES = 1024


class GGUFFile:
    """An open, memory-mapped model. Tensors are views of the mapping and stay valid until it is closed.

    Values of `metadata` are int, float, bool, str, list[str], or a read-only numpy array of the type that
    the file declares; `weights.metadata` has accessors that check and convert them.
    """

    def __init__(self, paths: list[Path], maps: list[mmap.mmap], headers: list[Header]) -> None:
        self.paths = tuple(paths)
        self.metadata: Mapping[str, object] = headers[0].metadata
        self.tensors: dict[str, Tensor] = {}
        self._maps = maps
        self._header_bytes = [header.num_bytes for header in headers]
        self._places: dict[str, tuple[mmap.mmap, TensorInfo]] = {}
        for shard, header in zip(maps, headers, strict=True):
            _drop_pages(shard, 0, header.num_bytes)
            for info in header.tensors:
                data = np.frombuffer(shard, np.uint8, info.num_bytes, info.start)
                self.tensors[info.name] = Tensor(info.name, info.type, info.shape, data)
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
        for tensor in self.tensors.values():
            data = tensor.data.data
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
        self._places.clear()
        for shard in self._maps:
            try:
                shard.close()
            except BufferError:
                continue
        self._maps = []
        self.paths = ()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF model of version 2 or 3; `path` may name any shard of a split model.

    Only headers are read. Every length and offset has been checked against the files when this returns.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFileError: a file is damaged, incomplete or not GGUF; the message names what is wrong.
        UnsupportedError: a tensor has a type that this build cannot unpack.
    """
    paths = _shard_paths(Path(path))
    maps: list[mmap.mmap] = []
    try:
        maps = [_map_file(p) for p in paths]
        headers = [parse_header(data, str(p)) for data, p in zip(maps, paths, strict=True)]
        _check_shards(paths, headers)
    except BaseException:
        for data in maps:
            data.close()
        raise
    return GGUFFile(paths, maps, headers)


def _shard_paths(path: Path) -> list[Path]:
    """The files of the model that `path` belongs to, in order."""
    try:
        exists = path.exists()
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {e.strerror}") from e
    if not exists:
        raise ModelNotFoundError(f"{path}: no such file")
    if _BYTE_PIECE_NAME.fullmatch(path.name):
        raise ModelFileError(
            f"{path}: this is a piece of a GGUF file that was cut by bytes",
            hint="join the pieces in order into one file first (cat PIECE1 PIECE2 ... > MODEL.gguf)",
        )
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise ModelFileError(
            f"{path}: named as shard {number} of {count}", hint="give the file its original name back"
        )
    paths = [path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelFileError(
            f"{path}: {len(missing)} of the model's {count} files are missing: {named}",
            hint="fetch them into the same folder",
        )
    return paths


def _map_file(path: Path) -> mmap.mmap:
    if path.is_dir():
        raise ModelFileError(f"{path}: this is a folder", hint="give the path of a GGUF file")
    if not path.is_file():
        raise ModelFileError(f"{path}: this is not a regular file", hint="give the path of a GGUF file")
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(f"{path}: the file is empty", hint="fetch the model file again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {e.strerror}") from e


def _check_shards(paths: list[Path], headers: list[Header]) -> None:
    """A split model is whole: shards in order, every count as declared, no tensor twice."""
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        count = get_int(header.metadata, "split.count", file=path)
        number = get_int(header.metadata, "split.no", file=path)
        if count is None and number is None and len(paths) == 1:
            continue
        if count != len(paths) or number != index:
            declared = f"shard {number} of {count}" if number is None else f"shard {number + 1} of {count}"
            raise ModelFileError(
                f"{path}: the file says it is {declared}, its name says {index + 1} of {len(paths)}",
                hint="give the shards their original names back (NAME-00001-of-00003.gguf)",
            )
    seen: dict[str, Path] = {}
    for path, header in zip(paths, headers, strict=True):
        for info in header.tensors:
            if info.name in seen:
                raise ModelFileError(
                    f"{path}: tensor {info.name!r} is in {seen[info.name].name} as well", hint=DAMAGED
                )
            seen[info.name] = path
    declared_tensors = get_int(headers[0].metadata, "split.tensors.count", file=paths[0])
    if declared_tensors is not None and declared_tensors != len(seen):
        raise ModelFileError(
            f"{paths[0]}: the model should have {declared_tensors} tensors, its files hold {len(seen)}",
            hint="fetch all its files again",
        )


def _drop_pages(data: mmap.mmap, start: int, num_bytes: int) -> None:
    """Pages shared with a neighbour go too: the mapping is read-only, so they come back when read."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    data.madvise(mmap.MADV_DONTNEED, first, start + num_bytes - first)
