"""Values off the front of a GGUF file, each checked against the bytes that are left."""

from __future__ import annotations

import mmap
import struct
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagoda.errors import ModelFileError

Bytes: TypeAlias = "bytes | mmap.mmap"

DAMAGED = "the file is damaged or was cut short; fetch it again"

_MAX_STRING_BYTES = 1 << 26
_MAX_ARRAY_ELEMENTS = 1 << 26
_MAX_NAME_BYTES = 1024

_WINDOW_BYTES = 1 << 16
_FEW_STRINGS = 64
_BATCH_STRINGS = 256

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


class Reader:
    """Takes little-endian values off the front of a file, never past its end."""

    def __init__(self, data: Bytes, file: str) -> None:
        self.data = data
        self.file = file
        self.end = len(data)
        self.position = 0

    def error(self, message: str, hint: str = DAMAGED) -> ModelFileError:
        return ModelFileError(f"{self.file}: {message}", hint=hint)

    def require(self, num_bytes: int, what: str) -> None:
        left = self.end - self.position
        if num_bytes > left:
            raise self.error(
                f"{what} would need {num_bytes} bytes at offset {self.position}, the file has {left} left"
            )

    def u32(self, what: str) -> int:
        self.require(4, what)
        (value,) = _U32.unpack_from(self.data, self.position)
        self.position += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.require(8, what)
        (value,) = _U64.unpack_from(self.data, self.position)
        self.position += 8
        return int(value)

    def name(self, what: str) -> str:
        """A key or the name of a tensor: non-empty text without control characters."""
        name = self.string(what, _MAX_NAME_BYTES)
        if not name:
            raise self.error(f"{what} is empty")
        if not name.isprintable():
            raise self.error(f"{what} has a name with control characters: {name[:80]!r}")
        return name

    def string(self, what: str, max_bytes: int = _MAX_STRING_BYTES) -> str:
        return self._strings_one_by_one(1, what, max_bytes)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """Vocabularies have hundreds of thousands: many at once where they are regular, else one by one."""
        self.require(8 * count, f"{count} strings of {what}")
        result: list[str] = []
        while len(result) < count:
            window = self.data[self.position : self.position + _WINDOW_BYTES]
            strings, num_bytes = split_short_strings(window, count - len(result))
            self.position += num_bytes
            result += strings
            if len(strings) < _FEW_STRINGS and len(result) < count:
                batch = min(_BATCH_STRINGS, count - len(result))
                result += self._strings_one_by_one(batch, what, _MAX_STRING_BYTES, len(result))
        return result

    def _strings_one_by_one(self, count: int, what: str, max_bytes: int, first: int = 0) -> list[str]:
        data, end, position, unpack = self.data, self.end, self.position, _U64.unpack_from
        result: list[str] = []
        for _ in range(count):
            start = position + 8
            if start > end:
                self.position = position
                self.require(8, f"string {first + len(result)} of {what}")
            (num_bytes,) = unpack(data, position)
            position = start + num_bytes
            if position > end or num_bytes > max_bytes:
                self.position = start
                self.require(num_bytes, f"string {first + len(result)} of {what}")
                raise self.error(f"{what} has a string of {num_bytes} bytes; at most {max_bytes} are allowed")
            try:
                result.append(data[start:position].decode())
            except UnicodeDecodeError as e:
                raise self.error(
                    f"string {first + len(result)} of {what} is not UTF-8 ({e.reason})"
                ) from None
        self.position = position
        return result

    def value(self, value_type: int, what: str) -> object:
        if value_type == _STRING:
            return self.string(what)
        if value_type == _ARRAY:
            return self.array(what)
        return self.scalars(value_type, 1, what)[0].item()

    def array(self, what: str) -> object:
        element_type = self.u32(f"the element type of {what}")
        count = self.u64(f"the length of {what}")
        if element_type == _ARRAY:
            raise self.error(f"{what} is an array of arrays, which no model needs")
        if count > _MAX_ARRAY_ELEMENTS:
            raise self.error(f"{what} has {count} elements; at most {_MAX_ARRAY_ELEMENTS} are allowed")
        if element_type == _STRING:
            return self.strings(count, what)
        return self.scalars(element_type, count, what)

    def scalars(self, value_type: int, count: int, what: str) -> NDArray[Any]:
        dtype = _SCALARS.get(value_type)
        if dtype is None:
            raise self.error(f"{what} has the unknown value type {value_type}")
        num_bytes = count * dtype.itemsize
        self.require(num_bytes, f"{count} values of {what}")
        raw = self.data[self.position : self.position + num_bytes]
        self.position += num_bytes
        if value_type == _BOOL and raw.strip(b"\0\1"):
            raise self.error(f"{what} is boolean but holds a byte that is neither 0 nor 1")
        return np.frombuffer(raw, dtype)


def split_short_strings(window: bytes, max_strings: int) -> tuple[list[str], int]:
    """The regular strings at the front of `window`, and the bytes they take, without a loop in Python.

    Regular are non-empty strings under 256 bytes without zero bytes. Among them a length is one non-zero
    byte and seven zeros, and there are no other zeros. The first irregular string ends the result.
    """
    raw = np.frombuffer(window, np.uint8)
    nonzero = np.flatnonzero(raw)
    length_at = np.flatnonzero(np.diff(nonzero) == 8)  # index into `nonzero` of each length
    starts = nonzero[length_at]
    if len(starts) == 0 or starts[0] != 0:
        return [], 0
    lengths = raw[starts[:-1]].astype(np.int64)
    regular = (np.diff(starts) == 8 + lengths) & (np.diff(length_at) == 1 + lengths)
    num_strings = min(int(np.argmin(np.append(regular, False))), max_strings)
    kept = raw[nonzero[: length_at[num_strings]]]
    is_text = np.ones(len(kept), np.bool_)
    is_text[length_at[:num_strings]] = False
    unused = np.flatnonzero(np.bincount(kept[is_text], minlength=128)[1:128] == 0) + 1
    if num_strings == 0 or len(unused) == 0:
        return [], 0
    kept[~is_text] = unused[0]
    try:
        strings = kept.tobytes().decode()[1:].split(chr(unused[0]))
    except UnicodeDecodeError:
        return [], 0
    return strings, int(starts[num_strings])
