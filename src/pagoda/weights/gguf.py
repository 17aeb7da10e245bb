"""Reading GGUF files: one file, or a model split into `NAME-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

from pagoda.errors import ModelFileError, ModelNotFoundError
from pagoda.weights.gguf_header import parse_header
from pagoda.weights.gguf_reader import DAMAGED
from pagoda.weights.metadata import get_int
from pagoda.weights.tensor_file import Header, TensorFile, map_file

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BYTE_PIECE_NAME = re.compile(
    r".+\.gguf[.-]?(part\d+of\d+|split-?[a-z]{1,2}|part-?\w{1,3}|\d{3})", re.IGNORECASE
)


def read_gguf(path: str | os.PathLike[str]) -> TensorFile:
    """Open a GGUF model of version 2 or 3; `path` may name any shard of a split model.

    Values of its `metadata` are int, float, bool, str, list[str], or a read-only numpy array of the type that
    the file declares; `weights.metadata` has accessors that check and convert them. Only headers are read;
    every length and offset has been checked against the files when this returns.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFileError: a file is damaged, incomplete or not GGUF; the message names what is wrong.
        UnsupportedError: a tensor has a type that this build cannot unpack.
    """
    paths = _shard_paths(Path(path))
    maps: list[mmap.mmap] = []
    try:
        maps = [map_file(p) for p in paths]
        headers = [parse_header(data, str(p)) for data, p in zip(maps, paths, strict=True)]
        _check_shards(paths, headers)
    except BaseException:
        for data in maps:
            data.close()
        raise
    return TensorFile(paths, maps, headers)


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
