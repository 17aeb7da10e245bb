"""D04, D07: metadata is converted when nothing is lost, and refused by name when something would be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.weights.metadata import (
    get_bool,
    get_float,
    get_float_array,
    get_int,
    get_int_array,
    get_str,
    get_strings,
)

INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]


@given(st.sampled_from(INTEGERS), st.integers(0, 127), st.integers(1, 40))
def test_integers_of_any_width_and_uniform_arrays_are_one_integer(width: str, value: int, n: int) -> None:
    """D07."""
    for stored in (value, np.full(n, value, width)):
        read = get_int({"k": stored}, "k")
        assert read == value
        assert type(read) is int
        assert get_float({"k": stored}, "k") == float(value)


@pytest.mark.parametrize("stored", [True, 32.0, "32", ["32"], np.array([True]), np.zeros(0, np.int32)])
def test_other_types_are_no_integer(stored: object) -> None:
    """D07: the message names the key and what it holds."""
    with pytest.raises(ModelFileError, match=r"metadata key 'llama\.k' must be an? .*, it is"):
        get_int({"llama.k": stored}, "llama.k")


def test_an_array_that_differs_by_layer_is_no_single_value() -> None:
    """D07."""
    with pytest.raises(UnsupportedError, match="'k' differs by layer"):
        get_int({"k": np.array([4, 4, 8])}, "k")


@pytest.mark.parametrize("stored", [float("nan"), float("inf"), True, "1.5", np.array([float("inf")])])
def test_numbers_must_be_finite(stored: object) -> None:
    with pytest.raises(ModelFileError, match="'k' must be a finite number"):
        get_float({"k": stored}, "k")


@pytest.mark.parametrize("width", INTEGERS)
def test_arrays_convert_from_any_width(width: str) -> None:
    """D04: token types as u8 or i64, scores as f64 or i32."""
    stored = np.array([0, 1, 6, 100], width)
    ids = get_int_array({"k": stored}, "k")
    assert ids is not None
    assert ids.dtype == np.int64
    assert np.array_equal(ids, stored)
    scores = get_float_array({"k": stored}, "k")
    assert scores is not None
    assert scores.dtype == np.float32
    assert np.array_equal(scores, stored)


def test_arrays_of_floats_convert_to_float32() -> None:
    scores = get_float_array({"k": np.array([-1.5, 1e300, -0.25])}, "k")
    assert scores is not None
    assert scores.tolist() == [-1.5, float("inf"), -0.25]


@pytest.mark.parametrize(
    ("read", "stored"),
    [
        (get_int_array, ["a"]),
        (get_int_array, np.array([1.0])),
        (get_int_array, np.array([2**63], np.uint64)),
        (get_int_array, 3),
        (get_float_array, ["a"]),
        (get_float_array, np.array([True])),
        (get_float_array, 1.0),
        (get_strings, np.array([1])),
        (get_strings, "text"),
        (get_str, 3),
        (get_str, ["text"]),
        (get_bool, 1),
        (get_bool, "true"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(read: object, stored: object) -> None:
    """D04."""
    assert callable(read)
    with pytest.raises(ModelFileError, match="metadata key 'k' must be") as caught:
        read({"k": stored}, "k")
    assert caught.value.hint


def test_absent_keys_are_none() -> None:
    for read in (get_int, get_float, get_bool, get_str, get_strings, get_int_array, get_float_array):
        assert read({}, "k") is None
