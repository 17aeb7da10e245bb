"""Quantising weights as they are loaded: from floats to blocks of Q8_0 or Q4_1.

A block has 32 values of a row. Q8_0: one scale, x ~ q * scale with q in [-127, 127]. Q4_1: scale and minimum,
x ~ q * scale + minimum with q in [0, 15]. Scales and minima are rounded to half precision first, and quants
chosen for the rounded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from math import prod
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pagoda import machine
from pagoda.errors import ConfigError, UnsupportedError
from pagoda.weights.dequantize import dequantize
from pagoda.weights.tensor import DerivedTensors, Tensor, TensorOutline, TensorType, outlines_of

Quantization = Literal["q8", "q4"]
Floats = NDArray[np.float32]
Blocks = NDArray[np.uint8]

GROUP = 32
FLOAT_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16)

_TYPES: dict[str, TensorType] = {"q8": TensorType.Q8_0, "q4": TensorType.Q4_1}
_EIGHT_BITS = ("token_embd.weight", "output.weight")  # rounding them to four bits costs much and saves little
_AS_STORED = ("ffn_gate_inp.weight", "position_embd.weight")  # routers and learned positions
_GROUPS_AT_ONCE = 1 << 15


def check_quantization(value: str | None) -> Quantization | None:
    """Raises: ConfigError: it is neither None nor one of `Quantization`."""
    if value is not None and value not in get_args(Quantization):
        raise ConfigError(
            f"quantization is {value!r}; it must be one of {', '.join(get_args(Quantization))}",
            param="quantization",
            hint="leave it out to keep the weights as the model has them",
        )
    return value  # type: ignore[return-value]


def quantized(tensors: Mapping[str, Tensor], quantization: Quantization) -> DerivedTensors:
    """The same tensors with every matrix in floats quantised when it is looked up.

    Embeddings and the head take 8 bits. Vectors, routers, learned positions, and matrices whose rows are no
    whole number of groups stay as they are.

    Raises:
        UnsupportedError: weights are quantised already.
    """
    stored = outlines_of(tensors)
    already = {o.type.name for o in stored.values() if o.type not in FLOAT_TYPES}
    if already:
        raise UnsupportedError(
            f"the model's weights are quantised already ({', '.join(sorted(already))}), "
            f"so --quantization {quantization} cannot be honoured",
            hint="leave --quantization out, or take the model's unquantised weights",
        )
    outlines = {name: _outline(name, outline, quantization) for name, outline in stored.items()}

    def make(name: str) -> Tensor:
        tensor = tensors[name]
        wanted = outlines[name].type
        return tensor if tensor.type is wanted else quantize(tensor, wanted)

    return DerivedTensors(outlines, make)


def _outline(name: str, outline: TensorOutline, quantization: str) -> TensorOutline:
    if len(outline.shape) < 2 or outline.shape[-1] % GROUP or name.endswith(_AS_STORED):
        return outline
    wanted = TensorType.Q8_0 if name in _EIGHT_BITS else _TYPES[quantization]
    return TensorOutline(wanted, outline.shape)


def quantize(tensor: Tensor, wanted: TensorType) -> Tensor:
    """`tensor`, of floats, as Q8_0 or Q4_1 on all usable cores. Rows must be whole groups of 32.

    Values that are not finite make scales that are not, and are found when the model is checked at load.
    `encode_q8_0` and `encode_q4_1` are the meaning; native code has the same bits in a tenth of the time.
    """
    encode = _native_encode() or _encode
    num_groups = prod(tensor.shape) // GROUP
    values = tensor.data.reshape(num_groups, GROUP * tensor.type.block_bytes)
    blocks = np.empty((num_groups, wanted.block_bytes), np.uint8)

    def run(start: int) -> None:
        part = slice(start, start + _GROUPS_AT_ONCE)
        encode(int(tensor.type), values[part].reshape(-1), int(wanted), blocks[part].reshape(-1))

    # The interpreter is let go of while native code or numpy computes.
    with ThreadPoolExecutor(machine.num_usable_cores()) as pool:
        list(pool.map(run, range(0, num_groups, _GROUPS_AT_ONCE)))
    return Tensor(tensor.name, wanted, tensor.shape, blocks.reshape(-1))


def _native_encode() -> Callable[[int, Blocks, int, Blocks], None] | None:
    try:
        native = import_module("pagoda._native")
    except ImportError:
        return None
    encode: Callable[[int, Blocks, int, Blocks], None] = native.encode
    return encode


def _encode(from_type: int, values: Blocks, to_type: int, blocks: Blocks) -> None:
    """What the native function does: values in, `blocks` filled."""
    type, wanted = TensorType(from_type), TensorType(to_type)
    groups = dequantize(Tensor("", type, (len(values) // (GROUP * type.block_bytes), GROUP), values))
    encoded = encode_q8_0(groups) if wanted is TensorType.Q8_0 else encode_q4_1(groups)
    blocks[:] = encoded.reshape(-1)


def encode_q8_0(values: Floats) -> Blocks:
    """Blocks [groups, 34] of values [groups, 32]: each value to the nearest of 255 steps."""
    finite = np.isfinite(values).all(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.abs(values).max(axis=1, keepdims=True)
        scale = np.where(finite, largest / np.float32(127), np.float32(np.nan)).astype("<f2")
        steps = np.clip(np.rint(values / _divisor(scale)), -127, 127)
        quants = steps.astype(np.int8)
    blocks = np.empty((len(values), TensorType.Q8_0.block_bytes), np.uint8)
    blocks[:, :2], blocks[:, 2:] = scale.view(np.uint8), quants.view(np.uint8)
    return blocks


def encode_q4_1(values: Floats) -> Blocks:
    """Blocks [groups, 20] of values [groups, 32].

    The better, by squared error, of two ways to choose scale and minimum: from the extremes, so that no
    value is off by more than half a step, or by least squares on the quants that those give.
    """
    finite = np.isfinite(values).all(axis=1, keepdims=True)
    values = np.where(finite, values, np.float32(0))
    with np.errstate(invalid="ignore", over="ignore"):
        values = values + np.float32(0)  # so that no zero is negative
        low = values.min(axis=1, keepdims=True).astype("<f2")
        scale = ((values.max(axis=1, keepdims=True) - low.astype(np.float32)) / np.float32(15)).astype("<f2")
        q, error = _fit_quants(values, scale, low)
        new_scale, new_low = _least_squares(values, q)
        new_q, new_error = _fit_quants(values, new_scale, new_low)
        better = new_error < error  # false where a scale is not finite
        nibbles = np.where(better, new_q, q).astype(np.uint8)
    scale, low = (
        np.where(finite, np.where(better, new, old), np.float16(np.nan))
        for new, old in ((new_scale, scale), (new_low, low))
    )
    blocks = np.empty((len(values), TensorType.Q4_1.block_bytes), np.uint8)
    blocks[:, :2], blocks[:, 2:4] = scale.view(np.uint8), low.view(np.uint8)
    blocks[:, 4:] = nibbles[:, :16] | (nibbles[:, 16:] << 4)
    return blocks


def _divisor(scale: NDArray[np.float16]) -> Floats:
    """A scale to divide by; groups of equal values have none, and every quant does."""
    return np.where(scale == 0, np.float32(1), scale.astype(np.float32))


def _fit_quants(
    values: Floats, scale: NDArray[np.float16], low: NDArray[np.float16]
) -> tuple[Floats, Floats]:
    """Nearest quants [groups, 32], and the squared error of each group [groups, 1]."""
    d, m = scale.astype(np.float32), low.astype(np.float32)
    q = np.clip(np.rint((values - m) / _divisor(scale)), 0, 15)
    return q, _tree_sum(np.square(q * d + m - values))


def _least_squares(values: Floats, q: Floats) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Scale and minimum [groups, 1] that lose least with these quants: the regression of values on q."""
    mean_q, mean_x = _tree_sum(q) / np.float32(GROUP), _tree_sum(values) / np.float32(GROUP)
    spread = _tree_sum(np.square(q - mean_q))
    slope = _tree_sum((q - mean_q) * (values - mean_x)) / np.where(spread == 0, np.float32(1), spread)
    return slope.astype("<f2"), (mean_x - slope * mean_q + np.float32(0)).astype("<f2")


def _tree_sum(values: Floats) -> Floats:
    """Sums [groups, 1] of values [groups, 32], by halves, in the order of the native code."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values
