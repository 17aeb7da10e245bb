"""Writes GGUF files: tiny models, and files that are wrong in one chosen way.

    write_gguf(path, {"general.architecture": "llama", "llama.block_count": 2}, {"a.weight": array})
    write_gguf(path, metadata, {"a.weight": encode("a.weight", TensorType.Q8_0, array)}, version=2)
    write_split(folder / "m.gguf", metadata, tensors, num_shards=3)
    write_tiny_model(path, TINY_MODELS["qwen2"], tensor_type=TensorType.Q8_0, metadata={...tokenizer...})

Metadata values: bool, str, list[str]; int becomes u32 (i32 or 64 bits where it does not fit), float
becomes f32; numpy scalars and arrays keep their type; `Raw` writes any type number and bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagoda.weights.tensor import Tensor, TensorType
from tests.models.tiny_checkpoints import TinyModel, rope_factors, weights

VALUE_TYPES = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": 7,
    "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Raw:
    """A metadata value written as it is given."""

    value_type: int
    payload: bytes


Tensors = Mapping[str, "NDArray[np.float32] | NDArray[np.float16] | Tensor"]


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Tensors | None = None,
    *,
    version: int = 3,
    alignment: int = 32,
    byte_order: str = "<",
) -> Path:
    path.write_bytes(
        gguf_bytes(metadata, tensors, version=version, alignment=alignment, byte_order=byte_order)
    )
    return path


def gguf_bytes(
    metadata: Mapping[str, object],
    tensors: Tensors | None = None,
    *,
    version: int = 3,
    alignment: int = 32,
    byte_order: str = "<",
    num_keys: int | None = None,
    num_tensors: int | None = None,
    offsets: Mapping[str, int] | None = None,
    dimensions: Mapping[str, list[int]] | None = None,
    types: Mapping[str, int] | None = None,
) -> bytes:
    """A whole file. The last five arguments replace what would be right: counts of the header, and by
    tensor its offset, its dimensions (innermost first, as the file has them) and its type.

    `alignment` other than 32 is not declared: put "general.alignment" into `metadata`.
    """
    stored = {name: _as_tensor(name, t) for name, t in (tensors or {}).items()}
    o = byte_order
    out = b"GGUF" + struct.pack(o + "I", version)
    out += struct.pack(o + "Q", len(stored) if num_tensors is None else num_tensors)
    out += struct.pack(o + "Q", len(metadata) if num_keys is None else num_keys)
    for key, value in metadata.items():
        out += key_value(key, value, o)
    offset = 0
    for name, tensor in stored.items():
        shape = (dimensions or {}).get(name, list(reversed(tensor.shape)))
        number = (types or {}).get(name, int(tensor.type))
        out += tensor_info(name, shape, number, (offsets or {}).get(name, offset), o)
        offset += _padded(len(tensor.data), alignment)
    out = out.ljust(_padded(len(out), alignment), b"\0")
    for tensor in stored.values():
        out += tensor.data.tobytes().ljust(_padded(len(tensor.data), alignment), b"\0")
    return out


def string(text: str | bytes, byte_order: str = "<") -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack(byte_order + "Q", len(raw)) + raw


def key_value(key: str | bytes, value: object, byte_order: str = "<") -> bytes:
    value_type, payload = _value(value, byte_order)
    return string(key, byte_order) + struct.pack(byte_order + "I", value_type) + payload


def tensor_info(
    name: str | bytes, dimensions: list[int], tensor_type: int, offset: int, byte_order: str = "<"
) -> bytes:
    o = byte_order
    return (
        string(name, o)
        + struct.pack(f"{o}I{len(dimensions)}Q", len(dimensions), *dimensions)
        + struct.pack(o + "IQ", tensor_type, offset)
    )


def split_parts(
    metadata: Mapping[str, object], tensors: Tensors, num_shards: int, *, empty_first: bool = False
) -> list[tuple[dict[str, object], Tensors]]:
    """Metadata and tensors of each shard; all keys are in the first, as converters write them."""
    names = list(tensors)
    holders = num_shards - empty_first
    per_shard = -(-len(names) // holders)
    shards: list[tuple[dict[str, object], Tensors]] = []
    for i in range(num_shards):
        first = (i - empty_first) * per_shard
        own = [] if first < 0 else names[first : first + per_shard]
        split_keys = {
            "split.no": np.uint16(i),
            "split.count": np.uint16(num_shards),
            "split.tensors.count": np.int32(len(names)),
        }
        shards.append(((dict(metadata) if i == 0 else {}) | split_keys, {n: tensors[n] for n in own}))
    return shards


def shard_path(path: Path, index: int, num_shards: int) -> Path:
    return path.with_name(f"{path.stem}-{index + 1:05}-of-{num_shards:05}.gguf")


def write_split(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Tensors,
    num_shards: int,
    *,
    empty_first: bool = False,
) -> list[Path]:
    """A model in several files beside `path`, whose stem they carry."""
    return [
        write_gguf(shard_path(path, i, num_shards), keys, own)
        for i, (keys, own) in enumerate(split_parts(metadata, tensors, num_shards, empty_first=empty_first))
    ]


def encode(name: str, tensor_type: TensorType, values: ArrayLike) -> Tensor:
    """Quantise as the `gguf` package does; it cannot make all (see `ENCODABLE`, `random_tensor`)."""
    array = np.asarray(values, np.float32)
    data = gguf.quants.quantize(array, gguf.GGMLQuantizationType(int(tensor_type)))
    return Tensor(name, tensor_type, array.shape, np.ascontiguousarray(data).view(np.uint8).reshape(-1))


_HALVES = {
    TensorType.Q4_0: (0,),
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_0: (0,),
    TensorType.Q5_1: (0, 2),
    TensorType.Q8_0: (0,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
    TensorType.IQ4_NL: (0,),
    TensorType.IQ4_XS: (0,),
    TensorType.MXFP4: (),
}
# What the `gguf` package can make of floats.
ENCODABLE = tuple(t for t in TensorType if t.block_elements <= 32 and t not in (TensorType.IQ4_NL,))


def random_tensor(
    name: str, tensor_type: TensorType, shape: tuple[int, ...], rng: np.random.Generator, scale: float = 0.01
) -> Tensor:
    """Every bit of a quantised block random, but for its 16-bit scales and minima: up to `scale`."""
    num_elements = int(np.prod(shape))
    if tensor_type in (TensorType.F32, TensorType.F16, TensorType.BF16):
        return encode(name, tensor_type, rng.uniform(-scale, scale, shape))
    num_blocks = num_elements // tensor_type.block_elements
    blocks = rng.integers(0, 256, (num_blocks, tensor_type.block_bytes), dtype=np.uint8)
    if tensor_type is TensorType.MXFP4:
        blocks[:, 0] = rng.integers(100, 120, num_blocks)
    for start in _HALVES[tensor_type]:
        halves = rng.uniform(-scale, scale, (num_blocks, 1)).astype("<f2")
        blocks[:, start : start + 2] = halves.view(np.uint8)
    return Tensor(name, tensor_type, shape, blocks.reshape(-1))


def interleave_rows(array: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """The order that llama's GGUF files give to the rows of attn_q and attn_k."""
    shape = array.shape
    return array.reshape(num_heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)


def tiny_metadata(model: TinyModel) -> dict[str, object]:
    arch = model.architecture
    keys: dict[str, object] = {
        "context_length": model.max_position,
        "embedding_length": model.hidden_size,
        "block_count": model.num_layers,
        "feed_forward_length": model.ffn_size,
        "attention.head_count": model.num_heads,
        "attention.head_count_kv": model.num_kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": model.rope_theta,
        "rope.dimension_count": model.head_dim,
    }
    if model.window is not None:
        keys["attention.sliding_window"] = model.window
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in keys.items()}


def tiny_tensors(model: TinyModel, tensor_type: TensorType = TensorType.F32) -> dict[str, Tensor]:
    """The model's tensors as a converter stores them: matrices in `tensor_type`, vectors in F32.

    `tensor_type` other than F32, F16 and BF16 needs sizes that are multiples of 32.
    """
    arrays = weights(model)
    if model.architecture == "llama":
        heads = {"attn_q": model.num_heads, "attn_k": model.num_kv_heads}
        for name, array in arrays.items():
            for stem, num_heads in heads.items():
                if f".{stem}." in name:
                    arrays[name] = interleave_rows(array, num_heads)
    if model.rope_scaling:
        arrays["rope_freqs.weight"] = rope_factors(model).astype(np.float32)
    return {
        name: encode(name, tensor_type if array.ndim == 2 else TensorType.F32, array)
        for name, array in arrays.items()
    }


def write_tiny_model(
    path: Path,
    model: TinyModel,
    *,
    tensor_type: TensorType = TensorType.F32,
    metadata: Mapping[str, object] | None = None,
) -> Path:
    """A whole model; `metadata` adds keys (a tokenizer) or replaces them."""
    return write_gguf(path, tiny_metadata(model) | dict(metadata or {}), tiny_tensors(model, tensor_type))


def _as_tensor(name: str, value: NDArray[np.float32] | NDArray[np.float16] | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    tensor_type = {"float32": TensorType.F32, "float16": TensorType.F16}[value.dtype.name]
    return Tensor(name, tensor_type, value.shape, np.ascontiguousarray(value).view(np.uint8).reshape(-1))


def _padded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def _value(value: object, o: str) -> tuple[int, bytes]:
    if isinstance(value, Raw):
        return value.value_type, value.payload
    if isinstance(value, str):
        return STRING, string(value, o)
    if isinstance(value, list):
        strings = b"".join(string(v, o) for v in value)
        return ARRAY, struct.pack(o + "IQ", STRING, len(value)) + strings
    if isinstance(value, np.ndarray):
        payload = value.astype(value.dtype.newbyteorder(o)).tobytes()
        return ARRAY, struct.pack(o + "IQ", VALUE_TYPES[value.dtype.name], value.size) + payload
    scalar = _scalar(value)
    return VALUE_TYPES[scalar.dtype.name], scalar.astype(scalar.dtype.newbyteorder(o)).tobytes()


def _scalar(value: object) -> np.generic:
    if isinstance(value, np.generic):
        return value
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, float):
        return np.float32(value)
    assert isinstance(value, int)
    for kind in (np.uint32, np.int32, np.int64, np.uint64):
        if np.iinfo(kind).min <= value <= np.iinfo(kind).max:
            return kind(value)
    raise ValueError(f"{value} does not fit into 64 bits")
