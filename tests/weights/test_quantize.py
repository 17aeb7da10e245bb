"""Weights quantised at load come back within bounds that follow from the number of steps."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda import _native
from pagoda.errors import ConfigError, UnsupportedError
from pagoda.weights.dequantize import dequantize
from pagoda.weights.quantize import _encode, check_quantization, quantize, quantized
from pagoda.weights.tensor import Tensor, TensorType
from tests.gguf_files import encode

HALF = 2.0**-11  # relative error of rounding to half precision
RNG = np.random.default_rng(0)


def tensor(values: np.ndarray, name: str = "w", type: TensorType = TensorType.F32) -> Tensor:
    return encode(name, type, np.asarray(values, np.float32))


def errors(values: np.ndarray, wanted: TensorType) -> np.ndarray:
    """By group: the error of every value, [groups, 32]."""
    error: np.ndarray = dequantize(quantize(tensor(values), wanted)) - values
    return np.abs(error).reshape(-1, 32)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 100), st.floats(-3, 3), st.integers(1, 3))
def test_eight_bits_are_off_by_half_a_step_at_most(seed: int, size: float, shift: float, rows: int) -> None:
    values = np.float32(size) * (np.random.default_rng(seed).standard_normal((rows, 96)) + shift)
    values = values.astype(np.float32)
    largest = np.abs(values).reshape(-1, 32).max(axis=1)
    assert (errors(values, TensorType.Q8_0).max(axis=1) <= largest / 127 * (0.5 + 127 * HALF)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 100), st.floats(-3, 3), st.integers(1, 3))
def test_four_bits_lose_no_more_than_half_a_step_on_average(
    seed: int, size: float, shift: float, rows: int
) -> None:
    """By squared error, a fit by least squares is never worse than steps between the extremes."""
    values = np.float32(size) * (np.random.default_rng(seed).standard_normal((rows, 96)) + shift)
    values = values.astype(np.float32)
    groups = values.reshape(-1, 32)
    step = (groups.max(axis=1) - groups.min(axis=1)) / 15
    bound = step * 0.5 + HALF * (np.abs(groups).max(axis=1) + 15 * step)
    assert (np.sqrt(np.square(errors(values, TensorType.Q4_1)).mean(axis=1)) <= bound).all()


@pytest.mark.parametrize("wanted", [TensorType.Q8_0, TensorType.Q4_1], ids=lambda t: t.name)
def test_normal_weights_lose_no_more_than_with_the_gguf_package(wanted: TensorType) -> None:
    values = (0.02 * RNG.standard_normal((64, 512))).astype(np.float32)
    theirs = dequantize(encode("w", wanted, values)) - values
    assert np.square(errors(values, wanted)).mean() <= 1.001 * np.square(theirs).mean()


@pytest.mark.parametrize("wanted", [TensorType.Q8_0, TensorType.Q4_1], ids=lambda t: t.name)
def test_quantising_what_was_quantised_changes_nothing(wanted: TensorType) -> None:
    once = dequantize(quantize(tensor(RNG.standard_normal((8, 64))), wanted))
    twice = dequantize(quantize(tensor(once), wanted))
    np.testing.assert_allclose(twice, once, rtol=0, atol=4 * HALF * np.abs(once).max())


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 65504.0, 1e-7])
def test_groups_of_one_value_keep_it(value: float) -> None:
    values = np.full((2, 64), value, np.float32)
    assert errors(values, TensorType.Q4_1).max() <= max(abs(value) * HALF, 2.0**-25)
    assert errors(values, TensorType.Q8_0).max() <= max(abs(value) * 2 * HALF, 127 * 2.0**-25)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("wanted", [TensorType.Q8_0, TensorType.Q4_1], ids=lambda t: t.name)
def test_values_that_are_not_finite_do_not_become_finite(wanted: TensorType, bad: float) -> None:
    """The check of the model's logits at load then refuses it, as it does without quantisation."""
    values = RNG.standard_normal((1, 64)).astype(np.float32)
    values[0, 5] = bad
    group = dequantize(quantize(tensor(values), wanted))[0, :32]
    assert not np.isfinite(group).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1e-8, 1e-4, 0.02, 1.0, 1e5, 1e30]),
    shift=st.sampled_from([0.0, 1.0, -30.0]),
    type=st.sampled_from([TensorType.F32, TensorType.F16, TensorType.BF16]),
)
@pytest.mark.parametrize("wanted", [TensorType.Q8_0, TensorType.Q4_1], ids=lambda t: t.name)
def test_native_code_gives_the_same_bits(
    wanted: TensorType, seed: int, size: float, shift: float, type: TensorType
) -> None:
    """Values of any size, some repeated, some zero; a few groups of one value."""
    values = np.random.default_rng(seed).standard_normal((8, 128)) + shift
    values[:, 3:9] = values[:, 2:3]
    values[1, 40:50] = 0
    values[2, 64:] = values[2, 64]
    with np.errstate(over="ignore"):
        stored = tensor((size * values).astype(np.float32), type=type)
    blocks = [np.empty(8 * 4 * wanted.block_bytes, np.uint8) for _ in range(2)]
    for quantise, out in zip((_native.encode, _encode), blocks, strict=True):
        quantise(int(type), stored.data, int(wanted), out)
    ours, theirs = (dequantize(Tensor("w", wanted, (8, 128), out)) for out in blocks)
    finite = np.isfinite(theirs)
    assert np.array_equal(finite, np.isfinite(ours))
    assert np.array_equal(ours[finite], theirs[finite])
    whole = finite.reshape(-1, 32).all(axis=1)
    assert np.array_equal(*(out.reshape(-1, wanted.block_bytes)[whole] for out in blocks))


@pytest.mark.parametrize("type", [TensorType.F16, TensorType.BF16], ids=lambda t: t.name)
def test_half_precision_is_read_as_the_floats_it_stands_for(type: TensorType) -> None:
    stored = tensor(RNG.standard_normal((5, 96)), type=type)
    for wanted in (TensorType.Q8_0, TensorType.Q4_1):
        again = quantize(tensor(dequantize(stored)), wanted)
        assert np.array_equal(quantize(stored, wanted).data, again.data)


def test_rows_are_quantised_alike_wherever_they_are() -> None:
    values = RNG.standard_normal((700, 2048)).astype(np.float32)  # more groups than are done at once
    for wanted in (TensorType.Q8_0, TensorType.Q4_1):
        whole = quantize(tensor(values), wanted).data.reshape(700, -1)
        for row in (0, 511, 512, 699):
            assert np.array_equal(whole[row], quantize(tensor(values[row : row + 1]), wanted).data)


def test_what_is_quantised_and_what_is_not() -> None:
    shapes = {
        "token_embd.weight": (8, 64),
        "output.weight": (8, 64),
        "blk.0.attn_q.weight": (8, 64),
        "blk.0.attn_q.bias": (64,),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_gate_inp.weight": (4, 64),
        "blk.0.ffn_down.weight": (8, 48),  # no whole groups
        "position_embd.weight": (8, 64),
    }
    tensors = {name: tensor(RNG.standard_normal(shape), name) for name, shape in shapes.items()}
    derived = quantized(tensors, "q4")
    types = {name: outline.type.name for name, outline in derived.outlines.items()}
    assert types == dict.fromkeys(shapes, "F32") | {
        "token_embd.weight": "Q8_0",
        "output.weight": "Q8_0",
        "blk.0.attn_q.weight": "Q4_1",
    }
    for name, shape in shapes.items():
        assert (derived[name].type.name, derived[name].shape) == (types[name], shape)
    assert quantized(tensors, "q8").outlines["blk.0.attn_q.weight"].type is TensorType.Q8_0


def test_weights_that_are_quantised_already_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"quantised already .Q8_0.") as caught:
        quantized({"w": tensor(np.ones((2, 32)), type=TensorType.Q8_0)}, "q4")
    assert "leave --quantization out" in (caught.value.hint or "")


@pytest.mark.parametrize("value", ["q5", "int8", "", "Q4", "awq"])
def test_other_names_are_refused_with_those_allowed(value: str) -> None:
    with pytest.raises(ConfigError, match="it must be one of q8, q4"):
        check_quantization(value)
    assert check_quantization(None) is None


def test_the_bits_are_those_of_gguf() -> None:
    """Blocks are ggml's: its own reader gives the same floats."""
    for wanted in (TensorType.Q8_0, TensorType.Q4_1):
        ours = quantize(tensor(RNG.standard_normal((3, 64))), wanted)
        theirs = gguf.quants.dequantize(ours.data.reshape(3, -1), gguf.GGMLQuantizationType(int(wanted)))
        assert np.array_equal(dequantize(ours), theirs)
