"""Every tensor type unpacks to what the `gguf` package unpacks it to, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.weights.dequantize import dequantize
from pagoda.weights.tensor import Tensor, TensorType
from tests.gguf_files import encode, random_tensor

TYPES = list(TensorType)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4), blocks=st.integers(1, 5))
@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_random_blocks_unpack_to_the_same_bits(
    tensor_type: TensorType, seed: int, rows: int, blocks: int
) -> None:
    """Blocks of random bytes: scales are infinite, NaN and subnormal now and then."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks * tensor_type.block_bytes), dtype=np.uint8)
    shape = (rows, blocks * tensor_type.block_elements)
    ours = dequantize(Tensor("t", tensor_type, shape, data.reshape(-1)))
    with np.errstate(invalid="ignore", over="ignore"):
        theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(int(tensor_type)))
    assert ours.dtype == np.float32
    assert ours.shape == shape
    assert np.array_equal(bits(ours)[~np.isnan(ours)], bits(theirs)[~np.isnan(theirs)])
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))


@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_large_tensors_unpack_as_their_parts(tensor_type: TensorType) -> None:
    """More values than are unpacked at once; any shape; data that is no multiple of 4 bytes into a file."""
    shape = (17, 2, 128 * 1024)
    tensor = random_tensor("t", tensor_type, shape, np.random.default_rng(1))
    padded = np.concatenate((np.zeros(1, np.uint8), tensor.data))
    whole = dequantize(Tensor("t", tensor_type, shape, padded[1:]))
    assert whole.shape == shape
    row_bytes = len(tensor.data) // 34
    for row in (0, 15, 16, 33):
        data = tensor.data[row * row_bytes : (row + 1) * row_bytes]
        part = dequantize(Tensor("t", tensor_type, (128 * 1024,), data))
        assert np.array_equal(part, whole.reshape(34, -1)[row])


@pytest.mark.parametrize(
    ("tensor_type", "steps"),
    [
        (TensorType.F32, np.inf),
        (TensorType.F16, 2**11),
        (TensorType.BF16, 2**8),
        (TensorType.Q8_0, 254),
        (TensorType.Q5_1, 31),
        (TensorType.Q5_0, 31),
        (TensorType.Q4_1, 15),
        (TensorType.Q4_0, 15),
        (TensorType.MXFP4, 6),  # between 4 and 6, its widest step is a third of the largest value
    ],
)
def test_values_come_back_within_half_a_step(tensor_type: TensorType, steps: float) -> None:
    """The error of a block of values in [-1, 1] is about half of its range over its number of steps."""
    values = np.random.default_rng(2).uniform(-1, 1, (8, 256)).astype(np.float32)
    values[:, ::32], values[:, 1::32] = -1, 1
    error = np.abs(dequantize(encode("t", tensor_type, values)) - values).max()
    assert error <= 1.3 * 2 / steps  # formats with a zero in the middle waste one step at one end
    assert np.isinf(steps) or error > 0
