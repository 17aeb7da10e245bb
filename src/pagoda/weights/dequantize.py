"""From the bytes of a model file to float32: the meaning of every tensor type.

Block layouts are ggml's (`ggml-common.h`). A type stores rows as blocks, and each function here unpacks
blocks uint8 [num_blocks, block_bytes] to float32 [num_blocks, block_elements] with float32 arithmetic in
ggml's order, so that results are equal to its own bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagoda.weights.tensor import Tensor, TensorType

Blocks = NDArray[np.uint8]
Floats = NDArray[np.float32]

_ELEMENTS_AT_ONCE = 1 << 22  # bounds the memory of intermediate values


def dequantize(tensor: Tensor) -> Floats:
    """The tensor's values, float32 of `tensor.shape`."""
    unpack = _UNPACK[tensor.type]
    blocks = tensor.data.reshape(-1, tensor.type.block_bytes)
    out = np.empty((len(blocks), tensor.type.block_elements), np.float32)
    step = _ELEMENTS_AT_ONCE // tensor.type.block_elements
    with np.errstate(invalid="ignore", over="ignore"):  # a scale may be infinite or NaN
        for start in range(0, len(blocks), step):
            out[start : start + step] = unpack(blocks[start : start + step])
    return out.reshape(tensor.shape)


def _half(blocks: Blocks, start: int) -> Floats:
    """The half-precision number at byte `start` of every block, as a column."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Blocks) -> Blocks:
    """Low halves of all bytes, then high halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _f32(blocks: Blocks) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4")


def _f16(blocks: Blocks) -> Floats:
    return _half(blocks, 0)


def _bf16(blocks: Blocks) -> Floats:
    upper = np.ascontiguousarray(blocks).view("<u2").astype(np.uint32)
    return (upper << 16).view(np.float32)


def _q4_0(blocks: Blocks) -> Floats:
    """16 bits scale, 32 x 4 bits: (q - 8) * scale."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Blocks) -> Floats:
    """16 bits scale, 16 bits minimum, 32 x 4 bits: q * scale + minimum."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _fifth_bits(blocks: Blocks, start: int) -> Blocks:
    """Bit 4 of 32 values, from a 32-bit mask at byte `start`."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return np.left_shift(bits, 4, dtype=np.uint8)


def _q5_0(blocks: Blocks) -> Floats:
    """16 bits scale, 32 fifth bits, 32 x 4 bits: (q - 16) * scale."""
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (q.astype(np.float32) - 16)


def _q5_1(blocks: Blocks) -> Floats:
    """16 bits scale, 16 bits minimum, 32 fifth bits, 32 x 4 bits: q * scale + minimum."""
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * q.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Blocks) -> Floats:
    """16 bits scale, 32 x 8 bits signed: q * scale."""
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _k_scales(blocks: Blocks) -> tuple[Floats, Floats]:
    """Scales and minima of a K-block's eight groups of 32, [num_blocks, 8] each.

    12 bytes at byte 4 hold eight 6-bit scales and eight 6-bit minima: groups 0-3 in the low six bits of
    bytes 0-3 and 4-7, groups 4-7 in the nibbles of bytes 8-11 with their two upper bits on top of the former.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), _half(blocks, 2) * minima.astype(np.float32)


def _scale_groups(blocks: Blocks, q: Blocks) -> Floats:
    """q [num_blocks, 8, 32] * scale - minimum, a group each."""
    scales, minima = _k_scales(blocks)
    return (scales[:, :, None] * q.astype(np.float32) - minima[:, :, None]).reshape(len(blocks), 256)


def _q4_k(blocks: Blocks) -> Floats:
    """16 bits scale of scales, 16 bits scale of minima, 8 x (6 + 6) bits, 256 x 4 bits."""
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return _scale_groups(blocks, q.reshape(-1, 8, 32))


def _q5_k(blocks: Blocks) -> Floats:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit g of byte i is value i of group g."""
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1) << 4
    q = _nibbles(blocks[:, 48:].reshape(-1, 4, 32))
    return _scale_groups(blocks, q.reshape(-1, 8, 32) | fifth)


def _q6_k(blocks: Blocks) -> Floats:
    """256 x 4 bits, 256 x 2 bits, 16 x 8 bits signed scale, 16 bits scale of scales: (q - 32) * scale.

    A half of 128 values has four runs of 32: low nibbles of 64 bytes, then their high nibbles; run r takes
    bits 2r and 2r + 1 of 32 bytes as its bits 4 and 5.
    """
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    q = (low | (high << 4)).astype(np.float32) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[:, :, None] * q.reshape(-1, 16, 16)).reshape(len(blocks), 256)


# What the nibbles of IQ4_NL and IQ4_XS stand for (ggml's kvalues_iq4nl), and those of MXFP4: twice the values
# of a four-bit float with two exponent bits (OCP Microscaling Formats v1.0, section 5.3.3).
_IQ4_VALUES = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32)
_FP4_VALUES = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)


def _iq4_nl(blocks: Blocks) -> Floats:
    """16 bits scale, 32 x 4 bits: values[q] * scale."""
    return _half(blocks, 0) * _IQ4_VALUES[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: Blocks) -> Floats:
    """16 bits scale of scales, 8 x (2 + 4) bits of s, 256 x 4 bits: values[q] * (s - 32) * scale."""
    lower = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    upper = (blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(-1, 8) & 3
    scales = _half(blocks, 0) * ((lower | (upper << 4)).astype(np.float32) - 32)
    values: Floats = scales[:, :, None] * _IQ4_VALUES[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    return values.reshape(len(blocks), 256)


def _mxfp4(blocks: Blocks) -> Floats:
    """8 bits exponent, 32 x 4 bits: values[q] * 2^(exponent - 128)."""
    exponents = blocks[:, :1].astype(np.int32) - 128
    values: Floats = np.ldexp(_FP4_VALUES[_nibbles(blocks[:, 1:])], exponents)
    return values


_UNPACK: dict[TensorType, Callable[[Blocks], Floats]] = {
    TensorType.F32: _f32,
    TensorType.F16: _f16,
    TensorType.BF16: _bf16,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
    TensorType.IQ4_NL: _iq4_nl,
    TensorType.IQ4_XS: _iq4_xs,
    TensorType.MXFP4: _mxfp4,
}
