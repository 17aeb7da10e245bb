"""Quantising weights as they are loaded: from floats to blocks of Q8_0 or Q4_1.

A block has 32 values of a row. Q8_0: one scale, x ~ q * scale with q in [-127, 127]. Q4_1: scale and minimum,
x ~ q * scale + minimum with q in [0, 15]. Scales and minima are rounded to half precision first, and quants
chosen for the rounded ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
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
_ROWS_AT_ONCE_ELEMENTS = 1 << 20


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
    """
    encode = {TensorType.Q8_0: encode_q8_0, TensorType.Q4_1: encode_q4_1}[wanted]
    rows = tensor.data.reshape(-1, tensor.shape[-1] * tensor.type.block_bytes)
    groups_per_row = tensor.shape[-1] // GROUP
    out = np.empty((len(rows), groups_per_row, wanted.block_bytes), np.uint8)
    step = max(1, _ROWS_AT_ONCE_ELEMENTS // tensor.shape[-1])

    def run(start: int) -> None:
        part = rows[start : start + step]
        values = dequantize(
            Tensor(tensor.name, tensor.type, (len(part) * groups_per_row, GROUP), part.reshape(-1))
        )
        out[start : start + step] = encode(values).reshape(len(part), groups_per_row, -1)

    with ThreadPoolExecutor(
        machine.num_usable_cores()
    ) as pool:  # numpy lets go of the interpreter while it computes
        list(pool.map(run, range(0, len(rows), step)))
    return Tensor(tensor.name, wanted, tensor.shape, out.reshape(-1))


def encode_q8_0(values: Floats) -> Blocks:
    """Blocks [groups, 34] of values [groups, 32]: each value to the nearest of 255 steps."""
    with np.errstate(invalid="ignore", over="ignore"):
        scale = (np.abs(values).max(axis=1, keepdims=True) / np.float32(127)).astype("<f2")
        steps = np.rint(values / _divisor(scale))
    blocks = np.empty((len(values), TensorType.Q8_0.block_bytes), np.uint8)
    blocks[:, :2] = scale.view(np.uint8)
    with np.errstate(invalid="ignore"):
        blocks[:, 2:] = np.clip(steps, -127, 127).astype(np.int8).view(np.uint8)
    return blocks


def encode_q4_1(values: Floats) -> Blocks:
    """Blocks [groups, 20] of values [groups, 32].

    The better, by squared error, of two ways to choose scale and minimum: from the extremes, so that no
    value is off by more than half a step, or by least squares on the quants that those give.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        low = values.min(axis=1, keepdims=True).astype("<f2")
        scale = ((values.max(axis=1, keepdims=True) - low) / np.float32(15)).astype("<f2")
        q, error = _fit_quants(values, scale, low)
        new_scale, new_low = _least_squares(values, q)
        new_q, new_error = _fit_quants(values, new_scale, new_low)
        better = new_error < error  # false where a scale is not finite
    scale, low = np.where(better, new_scale, scale), np.where(better, new_low, low)
    packed = np.where(better, new_q, q)
    blocks = np.empty((len(values), TensorType.Q4_1.block_bytes), np.uint8)
    blocks[:, :2], blocks[:, 2:4] = scale.view(np.uint8), low.view(np.uint8)
    with np.errstate(invalid="ignore"):
        nibbles = packed.astype(np.uint8)
    blocks[:, 4:] = nibbles[:, :16] | (nibbles[:, 16:] << 4)
    return blocks


def _divisor(scale: NDArray[np.float16]) -> Floats:
    """A scale to divide by; groups of equal values have none, and every quant does."""
    return np.where(scale == 0, np.float32(1), scale.astype(np.float32))


def _fit_quants(
    values: Floats, scale: NDArray[np.float16], low: NDArray[np.float16]
) -> tuple[Floats, NDArray[np.float64]]:
    """Nearest quants [groups, 32], and the squared error of each group [groups, 1]."""
    d, m = scale.astype(np.float32), low.astype(np.float32)
    q = np.clip(np.rint((values - m) / _divisor(scale)), 0, 15)
    lost = (q * d + m - values).astype(np.float64)
    return q, np.square(lost).sum(axis=1, keepdims=True)


def _least_squares(values: Floats, q: Floats) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Scale and minimum [groups, 1] that lose least with these quants: the regression of values on q."""
    mean_q, mean_x = q.mean(axis=1, keepdims=True), values.mean(axis=1, keepdims=True)
    spread = np.square(q - mean_q).sum(axis=1, keepdims=True)
    slope = ((q - mean_q) * (values - mean_x)).sum(axis=1, keepdims=True) / np.where(spread == 0, 1, spread)
    return slope.astype("<f2"), (mean_x - slope * mean_q).astype("<f2")
