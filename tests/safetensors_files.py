"""Writes safetensors files and Hugging Face folders: tiny models, and files with one chosen fault."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = {
    "float32": "F32", "float16": "F16", "float64": "F64", "int32": "I32", "int64": "I64", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
Arrays = Mapping[str, NDArray[Any]]


def bf16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Values rounded towards zero to bfloat16; `safetensors_bytes` calls uint16 BF16."""
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def safetensors_bytes(arrays: Arrays, metadata: Mapping[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": "BF16" if array.dtype == np.uint16 else DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return file_bytes(header, data)


def file_bytes(header: object, data: bytes = b"") -> bytes:
    """A file with any header: an object to be written as JSON, or bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    arrays: Arrays,
    *,
    num_shards: int = 1,
    files: Mapping[str, object] | None = None,
) -> Path:
    """A model folder; `files` are further files, objects written as JSON and text as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if num_shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(arrays, {"format": "pt"}))
    else:
        write_shards(folder, arrays, num_shards)
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def write_shards(folder: Path, arrays: Arrays, num_shards: int) -> None:
    names = list(arrays)
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        own = names[i::num_shards]
        (folder / file).write_bytes(safetensors_bytes({name: arrays[name] for name in own}))
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": sum(a.nbytes for a in arrays.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
