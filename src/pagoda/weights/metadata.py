"""Typed access to a GGUF file's metadata: any integer width, and arrays whose elements are all equal.

Converters disagree about types (`head_count_kv` is u32 in one file, an array of i32 in the next), so
readers of metadata go through here. `get_*` returns None for a key that is absent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from pagoda.errors import ModelFileError, UnsupportedError

Metadata = Mapping[str, object]
_File = str | os.PathLike[str] | None


def get_int(metadata: Metadata, key: str, *, file: _File = None) -> int | None:
    """An integer of any width, or an array of equal ones."""
    value = _uniform(metadata, key, file)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(key, "an integer", value, file)
    return value


def get_float(metadata: Metadata, key: str, *, file: _File = None) -> float | None:
    """A finite number: a float or an integer of any width, or an array of equal ones."""
    value = _uniform(metadata, key, file)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise _wrong(key, "a finite number", value, file)
    return float(value)


def get_bool(metadata: Metadata, key: str, *, file: _File = None) -> bool | None:
    value = _uniform(metadata, key, file)
    if value is not None and not isinstance(value, bool):
        raise _wrong(key, "true or false", value, file)
    return value


def get_str(metadata: Metadata, key: str, *, file: _File = None) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise _wrong(key, "text", value, file)
    return value


def get_strings(metadata: Metadata, key: str, *, file: _File = None) -> list[str] | None:
    value = metadata.get(key)
    if value is not None and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        raise _wrong(key, "an array of text", value, file)
    return value


def get_int_array(metadata: Metadata, key: str, *, file: _File = None) -> NDArray[np.int64] | None:
    """An array of integers of any width that fit into 64 signed bits."""
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        raise _wrong(key, "an array of integers", value, file)
    if value.dtype.kind == "u" and value.size and int(value.max()) > np.iinfo(np.int64).max:
        raise _wrong(key, "an array of 64-bit integers", value, file)
    return value.astype(np.int64)


def get_float_array(metadata: Metadata, key: str, *, file: _File = None) -> NDArray[np.float32] | None:
    """An array of floats or integers of any width, as float32."""
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        raise _wrong(key, "an array of numbers", value, file)
    with np.errstate(over="ignore"):
        return value.astype(np.float32)


def _uniform(metadata: Metadata, key: str, file: _File) -> object:
    """The value, or the one element that an array repeats."""
    value = metadata.get(key)
    if not isinstance(value, np.ndarray):
        return value
    if value.size == 0:
        raise _wrong(key, "a number", value, file)
    if (value != value[0]).any():
        raise UnsupportedError(
            f"{_place(file)}metadata key {key!r} differs by layer ({value[:8].tolist()} ...)",
            hint="only models with one value for all layers are supported",
        )
    element: object = value[0].item()
    return element


def _wrong(key: str, wanted: str, value: object, file: _File) -> ModelFileError:
    if isinstance(value, np.ndarray):
        shown = f"an array of {value.size} {value.dtype.name} values"
    elif isinstance(value, list):
        shown = f"an array of {len(value)} strings"
    else:
        shown = f"{type(value).__name__} {value!r:.80}"
    return ModelFileError(
        f"{_place(file)}metadata key {key!r} must be {wanted}, it is {shown}",
        hint="convert the model again with a current converter",
    )


def _place(file: _File) -> str:
    return "" if file is None else f"{os.fspath(file)}: "
