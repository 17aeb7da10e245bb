"""AWQ and GPTQ: linear layers of four-bit integers, as they lie in safetensors files, to Q4_1.

Both store integers q and zero points z of four bits, eight to an int32, and half-precision scales s of groups
of inputs: w = (q - z) * s (Frantar et al. 2022, https://arxiv.org/abs/2210.17323; Lin et al. 2023,
https://arxiv.org/abs/2306.00978). Every 32 inputs of a group become a block of Q4_1 with scale s and minimum
-z * s: integers and scales stay what they are, the minimum is rounded to half precision, by s / 128 at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.weights.safetensors_header import WEIGHT_DTYPES
from pagoda.weights.tensor import DerivedTensors, StoredArray, Tensor, TensorOutline, TensorType, outlines_of
from pagoda.weights.tensor_file import TensorFile

GROUP = 32  # inputs of a block of Q4_1
PARTS = ("qweight", "qzeros", "scales", "g_idx")  # of one layer; g_idx in GPTQ only

# AWQ puts the eight columns of an int32 into its nibbles, lowest first, in this order.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_IN_ORDER = tuple(range(8))
_BUFFERS = (".position_ids", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".masked_bias")


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """How a folder's four-bit layers are packed. `group_size` is a number of inputs; None: all of a row."""

    method: str  # "awq" or "gptq"
    group_size: int | None
    zero_offset: int  # what is to be added to stored zero points


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The stored parts of one layer, whose shapes agree."""

    name: str
    outputs: int
    inputs: int
    group_size: int
    qweight: StoredArray
    qzeros: StoredArray
    scales: Tensor
    g_idx: StoredArray | None


def packed_int4_from_config(config: Mapping[str, Any]) -> PackedInt4 | None:
    """`quantization_config` of config.json; None when there is none.

    Raises:
        UnsupportedError: a method or a variation of it that cannot be read; the message names it.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise ModelFileError(f"'quantization_config' must be an object, it is {quantization!r:.80}")
    method = quantization.get("quant_method")
    if method not in ("awq", "gptq"):
        raise UnsupportedError(
            f"weights quantised with {method!r:.80} are not supported ('quant_method' in config.json)",
            hint="awq and gptq with 4 bits are; or take the model's unquantised weights, or a GGUF file",
        )
    bits = quantization.get("bits", quantization.get("w_bit"))
    group_size = quantization.get("group_size", quantization.get("q_group_size", 128))
    version = quantization.get("version", "gemm")
    checkpoint_format = quantization.get("checkpoint_format", "gptq")
    allowed = [
        ("bits", bits, type(bits) is int and bits == 4, "4"),
        ("group_size", group_size, _is_group_size(group_size), "-1 or a multiple of 32"),
        ("version", version, method != "awq" or str(version).lower() == "gemm", "gemm"),
        (
            "checkpoint_format",
            checkpoint_format,
            method != "gptq" or checkpoint_format in ("gptq", "gptq_v2"),
            "gptq or gptq_v2",
        ),
    ]
    for key, value, ok, choice in allowed:
        if not ok:
            raise UnsupportedError(
                f"{method} with {key!r} = {value!r:.80} is not supported", hint=f"it must be {choice}"
            )
    first_version = method == "gptq" and checkpoint_format == "gptq"
    return PackedInt4(method, None if group_size == -1 else group_size, zero_offset=int(first_version))


def _is_group_size(value: object) -> bool:
    return type(value) is int and (value == -1 or (value > 0 and value % GROUP == 0))


def packed_layer(
    name: str, packing: PackedInt4, arrays: Mapping[str, StoredArray], tensors: Mapping[str, Tensor]
) -> PackedLayer:
    """The layer called `name` (`model.layers.0.mlp.up_proj`), found by its parts.

    Raises:
        ModelFileError: a part is missing, or of the wrong type or shape.
        UnsupportedError: its inputs are in another order than those of the layer before (GPTQ's `desc_act`).
    """
    qweight, qzeros = (_int32(f"{name}.{part}", arrays) for part in ("qweight", "qzeros"))
    scales = tensors.get(f"{name}.scales")
    if scales is None:
        raise ModelFileError(f"tensor '{name}.scales' is missing, or not of a floating-point type")
    rows, cols = qweight.shape
    outputs, inputs = (cols * 8, rows) if packing.method == "awq" else (cols, rows * 8)
    group_size = packing.group_size or inputs
    groups = inputs // group_size
    expected = {qzeros.name: (groups, outputs // 8), scales.name: (groups, outputs)}
    if inputs % group_size or group_size % GROUP or outputs % 8:
        raise ModelFileError(
            f"tensor {qweight.name!r} has shape {list(qweight.shape)}: {inputs} inputs are no whole number "
            f"of groups of {group_size}"
        )
    for part in (qzeros, scales):
        if part.shape != expected[part.name]:
            raise ModelFileError(
                f"tensor {part.name!r} has shape {list(part.shape)}, groups of {group_size} need "
                f"{list(expected[part.name])}"
            )
    g_idx = arrays.get(f"{name}.g_idx")
    if g_idx is not None:
        g_idx = _int32(g_idx.name, arrays, num_dimensions=1)
        if g_idx.shape != (inputs,):
            raise ModelFileError(f"tensor {g_idx.name!r} has shape {list(g_idx.shape)}, not [{inputs}]")
    return PackedLayer(name, outputs, inputs, group_size, qweight, qzeros, scales, g_idx)


def _int32(name: str, arrays: Mapping[str, StoredArray], num_dimensions: int = 2) -> StoredArray:
    array = arrays.get(name)
    if array is None or array.dtype not in ("I32", "U32") or len(array.shape) != num_dimensions:
        found = "it is missing" if array is None else f"it is {array.dtype} {list(array.shape)}"
        wanted = f"32-bit integers in {num_dimensions} dimensions"
        raise ModelFileError(f"tensor {name!r} must hold {wanted}, {found}")
    return array


def with_packed_layers(file: TensorFile, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The file's tensors, each packed layer one of them, `<layer>.weight`, that is unpacked when looked up.

    Raises:
        ModelFileError: parts of a layer do not fit each other, or a weight has a type that none can have.
        UnsupportedError: see `packed_int4_from_config`.
    """
    packing = packed_int4_from_config(config)
    if packing is None:
        _refuse_arrays(file.arrays)
        return file.tensors
    stems = [name.removesuffix(".qweight") for name in file.arrays if name.endswith(".qweight")]
    layers = {f"{stem}.weight": packed_layer(stem, packing, file.arrays, file.tensors) for stem in stems}
    consumed = {f"{stem}.{part}" for stem in stems for part in PARTS}
    _refuse_arrays({name: array for name, array in file.arrays.items() if name not in consumed})
    plain = {name: tensor for name, tensor in file.tensors.items() if name not in consumed}
    outlines = dict(outlines_of(plain))
    for name, layer in layers.items():
        if name in outlines:
            raise ModelFileError(f"tensor {name!r} is there both packed and not")
        outlines[name] = TensorOutline(TensorType.Q4_1, (layer.outputs, layer.inputs))

    def make(name: str) -> Tensor:
        return to_q4_1(layers[name], packing) if name in layers else plain[name]

    return DerivedTensors(outlines, make)


def packed_parts(weight: str) -> tuple[str, ...]:
    """Names in the file of what the packed layer of that weight is made of, but for the small ones."""
    return (f"{weight.removesuffix('.weight')}.qweight",)


def _refuse_arrays(arrays: Mapping[str, StoredArray]) -> None:
    """Masks and position numbers of old files are no weights; anything else that is no float is refused."""
    for name, array in arrays.items():
        if not name.endswith(_BUFFERS):
            raise UnsupportedError(
                f"tensor {name!r} has type {array.dtype}, which is not supported",
                hint=f"supported: {', '.join(WEIGHT_DTYPES)}, and layers packed by awq or gptq",
            )


def to_q4_1(layer: PackedLayer, packing: PackedInt4) -> Tensor:
    """The layer's weight, type Q4_1 and shape (outputs, inputs), called `<layer>.weight`.

    Raises:
        UnsupportedError: `g_idx` puts inputs into groups in another order than they come.
    """
    from pagoda.weights.dequantize import dequantize

    _require_order(layer)
    if packing.method == "awq":
        q = _columns(layer.qweight, _AWQ_ORDER).T  # [outputs, inputs]
        z = _columns(layer.qzeros, _AWQ_ORDER).T  # [outputs, groups]
    else:
        q = _rows(layer.qweight).T
        z = _columns(layer.qzeros, _IN_ORDER).T
    z = (z + np.uint8(packing.zero_offset)) & 15
    scales = dequantize(layer.scales).T
    repeat = layer.group_size // GROUP
    blocks = np.empty((layer.outputs, layer.inputs // GROUP, TensorType.Q4_1.block_bytes), np.uint8)
    blocks[:, :, :2] = _half_bytes(scales, repeat)
    blocks[:, :, 2:4] = _half_bytes(-scales * z, repeat)
    q = np.ascontiguousarray(q).reshape(layer.outputs, -1, GROUP)
    blocks[:, :, 4:] = q[:, :, :16] | (q[:, :, 16:] << 4)
    return Tensor(f"{layer.name}.weight", TensorType.Q4_1, (layer.outputs, layer.inputs), blocks.reshape(-1))


def _require_order(layer: PackedLayer) -> None:
    if layer.g_idx is None:
        return
    groups = layer.g_idx.data.view("<i4")
    if not np.array_equal(groups, np.arange(layer.inputs) // layer.group_size):
        raise UnsupportedError(
            f"{layer.name} has its inputs grouped out of order (GPTQ's 'desc_act'), which is not supported",
            hint="take a model that was quantised with desc_act = false",
        )


def _half_bytes(values: NDArray[np.float32], repeat: int) -> NDArray[np.uint8]:
    """Rounded to half precision and repeated, as bytes: [rows, cols * repeat, 2]."""
    with np.errstate(over="ignore"):
        halves = np.repeat(values.astype("<f2"), repeat, axis=1)
    return np.ascontiguousarray(halves).view(np.uint8).reshape(*halves.shape, 2)


def _nibbles(array: StoredArray) -> NDArray[np.uint8]:
    """[rows, cols, 8]: the nibbles of every int32, lowest first."""
    packed = array.data.reshape(*array.shape, 4)
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*array.shape, 8)


def _columns(array: StoredArray, order: tuple[int, ...]) -> NDArray[np.uint8]:
    """[rows, 8 * cols]: nibble i of an int32 belongs to column `order[i]` of its eight."""
    nibbles = _nibbles(array)
    return nibbles[:, :, np.argsort(order)].reshape(len(nibbles), -1)


def _rows(array: StoredArray) -> NDArray[np.uint8]:
    """[8 * rows, cols]: nibble i of an int32 belongs to row i of its eight."""
    rows, cols = array.shape
    values: NDArray[np.uint8] = _nibbles(array).swapaxes(1, 2).reshape(8 * rows, cols)
    return values
