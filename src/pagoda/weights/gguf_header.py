"""The header of a GGUF file: metadata and where each tensor lies. Nothing in the file is trusted.

Every count, length, type and offset is compared with the bytes that are left before it is used, so a
damaged file costs an error and not memory. The format is described in ggml's `docs/gguf.md`.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from pagoda.errors import UnsupportedError
from pagoda.weights.gguf_reader import DAMAGED, Bytes, Reader
from pagoda.weights.tensor import TensorType
from pagoda.weights.tensor_file import Header, TensorInfo

_MAX_DIMENSIONS = 4
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one letter, type, one byte of value
_MIN_TENSOR_BYTES = (
    8 + 1 + 4 + 8 + 4 + 8
)  # length, one letter, number of dimensions, one of them, type, offset
_DEFAULT_ALIGNMENT = 32

# Types that ggml defines and this build cannot unpack, to tell an unusual file from a damaged one.
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


def parse_header(data: Bytes, file: str) -> Header:
    """Read and check everything but the tensors' contents; `file` names the file in messages.

    Raises:
        ModelFileError: the bytes are not a consistent GGUF file of version 2 or 3.
        UnsupportedError: a tensor has a type that GGUF defines and this build cannot unpack.
    """
    reader = Reader(data, file)
    _check_version(reader)
    num_tensors = reader.u64("the number of tensors")
    num_keys = reader.u64("the number of metadata keys")
    reader.require(num_keys * _MIN_KEY_BYTES, f"{num_keys} metadata keys")
    metadata: dict[str, object] = {}
    for i in range(num_keys):
        key = reader.name(f"metadata key {i}")
        if key in metadata:
            raise reader.error(f"metadata key {key!r} appears twice")
        metadata[key] = reader.value(reader.u32(f"the type of {key!r}"), f"metadata key {key!r}")
    reader.require(num_tensors * _MIN_TENSOR_BYTES, f"{num_tensors} tensor descriptions")
    alignment = _alignment(reader, metadata)
    infos = [_read_tensor_info(reader, i, alignment) for i in range(num_tensors)]
    header_bytes = reader.position
    data_start = -(-header_bytes // alignment) * alignment
    tensors = tuple(_place(reader, info, data_start) for info in infos)
    _check_disjoint(reader, tensors)
    return Header(metadata, tensors, header_bytes)


def _check_version(reader: Reader) -> None:
    magic = bytes(reader.data[:4])
    if magic != b"GGUF":
        raise reader.error(*_not_gguf(bytes(reader.data[:64])))
    reader.position = 4
    version = reader.u32("the version")
    if version and version & 0xFFFF == 0:
        raise reader.error(*_BIG_ENDIAN)
    if version not in (2, 3):
        hint = "convert the model again with a current converter" if version in (0, 1) else DAMAGED
        raise reader.error(f"GGUF version {version} is not supported, only 2 and 3", hint)


_BIG_ENDIAN = (
    "the file is in big-endian byte order, this machine reads little-endian",
    "fetch the little-endian file of this model, or convert it (gguf-convert-endian FILE little)",
)


def _not_gguf(start: bytes) -> tuple[str, str]:
    """Message and hint for a file that begins like something else."""
    fetch_again = "fetch the model file again"
    if start.startswith(b"version https://git-lfs"):
        return (
            "this is a git-lfs pointer, not the model it stands for",
            "run `git lfs pull` in its repository",
        )
    if start.startswith(b"FUGG"):
        return _BIG_ENDIAN
    if not start.strip(b"\0"):
        return "the file is empty" if not start else "the file begins with zeros, not with GGUF", fetch_again
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a web page, not a model file", fetch_again
    if start[:4] in (b"lmgg", b"tjgg", b"algg", b"fmgg"):
        return "this file has the format that came before GGUF", "convert the model again to GGUF"
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):
        return "this is a PyTorch checkpoint, not a GGUF file", "convert the model to GGUF"
    if start[8:9] == b"{" and len(start) > 8:
        return "this looks like a safetensors file, not a GGUF file", "convert the model to GGUF"
    return f"this is not a GGUF file: it begins with {start[:4]!r}", "give the path of a GGUF file"


def _alignment(reader: Reader, metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or isinstance(alignment, bool):
        raise reader.error(f"metadata key 'general.alignment' must be an integer, it is {alignment!r:.80}")
    if alignment < 8 or alignment & (alignment - 1):
        raise reader.error(
            f"metadata key 'general.alignment' must be a power of two and at least 8, it is {alignment}"
        )
    return alignment


def _read_tensor_info(reader: Reader, index: int, alignment: int) -> TensorInfo:
    """One description; `start` is still relative to the data section."""
    name = reader.name(f"tensor {index}")
    what = f"tensor {name!r}"
    num_dimensions = reader.u32(f"the number of dimensions of {what}")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise reader.error(f"{what} has {num_dimensions} dimensions, 1 to {_MAX_DIMENSIONS} are allowed")
    dimensions = [reader.u64(f"the shape of {what}") for _ in range(num_dimensions)]
    tensor_type = _tensor_type(reader, reader.u32(f"the type of {what}"), what)
    offset = reader.u64(f"the offset of {what}")
    if 0 in dimensions:
        raise reader.error(f"{what} has a dimension of zero: {dimensions}")
    if offset % alignment:
        raise reader.error(f"{what} lies at offset {offset}, not a multiple of the alignment {alignment}")
    if dimensions[0] % tensor_type.block_elements:
        raise reader.error(
            f"{what} has rows of {dimensions[0]} elements, but {tensor_type.name} stores "
            f"blocks of {tensor_type.block_elements}"
        )
    num_bytes = tensor_type.num_bytes(prod(dimensions))
    return TensorInfo(name, tensor_type, tuple(reversed(dimensions)), offset, num_bytes)


def _tensor_type(reader: Reader, number: int, what: str) -> TensorType:
    try:
        return TensorType(number)
    except ValueError:
        pass
    if number in _OTHER_TYPES:
        supported = ", ".join(t.name for t in TensorType)
        raise UnsupportedError(
            f"{reader.file}: {what} has type {_OTHER_TYPES[number]}, which is not supported",
            hint=f"take a file whose tensors are of these types: {supported}",
        )
    raise reader.error(f"{what} has the unknown type {number}")


def _place(reader: Reader, info: TensorInfo, data_start: int) -> TensorInfo:
    start = data_start + info.start
    if start + info.num_bytes > reader.end:
        raise reader.error(
            f"tensor {info.name!r} needs {info.num_bytes} bytes at offset {start}, "
            f"up to {start + info.num_bytes}, the file has {reader.end}"
        )
    return TensorInfo(info.name, info.type, info.shape, start, info.num_bytes)


def _check_disjoint(reader: Reader, tensors: tuple[TensorInfo, ...]) -> None:
    names: set[str] = set()
    for info in tensors:
        if info.name in names:
            raise reader.error(f"tensor {info.name!r} appears twice")
        names.add(info.name)
    in_order = sorted(tensors, key=lambda info: info.start)
    for first, second in pairwise(in_order):
        if first.start + first.num_bytes > second.start:
            raise reader.error(
                f"tensors {first.name!r} and {second.name!r} overlap: the first ends at byte "
                f"{first.start + first.num_bytes}, the second starts at {second.start}"
            )
