"""The header of a safetensors file: where each tensor lies. Nothing in the file is trusted.

Eight bytes of length, then JSON that gives dtype, shape and byte range of every tensor; their bytes follow
without gaps. The format is described at https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from math import prod
from typing import TypeAlias, TypeGuard

from pagoda.errors import ModelFileError
from pagoda.weights.tensor import TensorType
from pagoda.weights.tensor_file import Header, TensorInfo

Bytes: TypeAlias = "bytes | mmap.mmap"

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_MAX_DIMENSIONS = 8
_MAX_NAME_CHARS = 1024
_DAMAGED = "the file is damaged or was cut short; fetch it again"

WEIGHT_DTYPES = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}
# Bits of an element of the other dtypes that the format has.
_OTHER_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def parse_header(data: Bytes, file: str) -> Header:
    """Read and check everything but the tensors' contents; `file` names the file in messages.

    Raises:
        ModelFileError: the bytes are not a consistent safetensors file.
    """
    size = len(data)
    start = bytes(data[:64])
    if reason := _something_else(start):
        raise ModelFileError(f"{file}: {reason[0]}", hint=reason[1])
    if size < 8:
        raise ModelFileError(f"{file}: the file has {size} bytes, a header needs 8 or more", hint=_DAMAGED)
    length = int.from_bytes(start[:8], "little")
    if length > min(size - 8, _MAX_HEADER_BYTES):
        limit = f"at most {_MAX_HEADER_BYTES} are allowed" if length <= size - 8 else f"the file has {size}"
        raise ModelFileError(f"{file}: the header would need {length} bytes, {limit}", hint=_DAMAGED)
    try:
        entries = _parse_json(bytes(data[8 : 8 + length]))
        metadata = _metadata(entries.pop("__metadata__", {}))
        data_start = 8 + length
        infos = tuple(_tensor_info(name, entry, data_start, size) for name, entry in entries.items())
        _check_coverage(infos, data_start, size)
    except _HeaderError as e:
        raise ModelFileError(f"{file}: {e}", hint=_DAMAGED) from None
    return Header(metadata, infos, data_start)


class _HeaderError(Exception):
    """What is wrong with a header; `parse_header` adds the file's name."""


def _something_else(start: bytes) -> tuple[str, str] | None:
    """Message and hint for a file that begins like something else."""
    fetch_again = "fetch the model file again"
    if not start:
        return "the file is empty", fetch_again
    if start.startswith(b"version https://git-lfs"):
        return (
            "this is a git-lfs pointer, not the weights it stands for",
            "run `git lfs pull` in its repository",
        )
    if start.startswith(b"GGUF"):
        return "this is a GGUF file, not a safetensors file", "give the file's own path as the model"
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):
        return "this is a PyTorch checkpoint, not a safetensors file", "convert the weights to safetensors"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a web page, not a model file", fetch_again
    if not start.strip(b"\0"):
        return "the file begins with zeros, not with a safetensors header", fetch_again
    return None


def _parse_json(raw: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise _HeaderError(f"the header names {twice[:80]!r} twice")
        return result

    try:
        header = json.loads(raw.decode(), object_pairs_hook=unique)
    except UnicodeDecodeError as e:
        raise _HeaderError(f"the header is not UTF-8 ({e.reason})") from None
    except ValueError as e:
        raise _HeaderError(f"the header is not JSON: {_one_line(e)}") from None
    except RecursionError:
        raise _HeaderError("the header is nested too deeply") from None
    if not isinstance(header, dict):
        raise _HeaderError("the header is no JSON object")
    return header


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def _metadata(value: object) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise _HeaderError("'__metadata__' must map text to text")
    return value


def _tensor_info(name: str, entry: object, data_start: int, size: int) -> TensorInfo:
    """One tensor, its range checked against the file."""
    if not name or len(name) > _MAX_NAME_CHARS or not name.isprintable():
        raise _HeaderError(f"a tensor has the name {name[:80]!r}")
    what = f"tensor {name!r}"
    if not isinstance(entry, dict):
        raise _HeaderError(f"{what} is not described by a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or (dtype not in WEIGHT_DTYPES and dtype not in _OTHER_BITS):
        raise _HeaderError(f"{what} has the unknown dtype {dtype!r:.80}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise _HeaderError(f"{what} has the shape {shape!r:.80}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _HeaderError(f"{what} has the data offsets {offsets!r:.80}")
    if 0 in shape:
        raise _HeaderError(f"{what} has a dimension of zero: {shape!r:.80}")
    begin, end = offsets
    weight_type = WEIGHT_DTYPES.get(dtype)
    bits = 8 * weight_type.block_bytes if weight_type is not None else _OTHER_BITS[dtype]
    num_bits = prod(shape) * bits
    if begin > end or 8 * (end - begin) != num_bits:
        raise _HeaderError(
            f"{what} of {dtype} and shape {shape!r:.80} needs {num_bits // 8} bytes, "
            f"its data offsets {offsets} give it {end - begin}"
        )
    if data_start + end > size:
        raise _HeaderError(f"{what} ends at byte {data_start + end}, the file has {size}")
    stored_type = dtype if weight_type is None else weight_type
    return TensorInfo(name, stored_type, tuple(shape), data_start + begin, end - begin)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    """Whether it is a list of non-negative integers that fit into 63 bits; true and false are none."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_coverage(infos: Sequence[TensorInfo], data_start: int, size: int) -> None:
    """Tensors follow each other without gap or overlap up to the end of the file, as the format demands."""
    position, before = data_start, "the header"
    for info in sorted(infos, key=lambda info: info.start):
        if info.start < position:
            raise _HeaderError(
                f"{before} and tensor {info.name!r} overlap: the first ends at byte {position}, "
                f"the second starts at {info.start}"
            )
        if info.start > position:
            raise _HeaderError(f"no tensor has the {info.start - position} bytes before {info.name!r}")
        position, before = info.start + info.num_bytes, f"tensor {info.name!r}"
    if position != size:
        raise _HeaderError(f"the file goes on for {size - position} bytes after {before}")
