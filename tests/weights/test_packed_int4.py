"""AWQ and GPTQ layers, packed here by each format's own rules, come back as integers times scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.weights.dequantize import dequantize
from pagoda.weights.packed_int4 import packed_int4_from_config, with_packed_layers
from pagoda.weights.safetensors import read_safetensors
from pagoda.weights.tensor import Tensor, TensorType, outlines_of
from tests.safetensors_files import write_folder

Arrays = dict[str, NDArray[Any]]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}


def random_layer(inputs: int, outputs: int, group_size: int, seed: int = 0) -> tuple[Arrays, Any]:
    """Integers [inputs, outputs], zero points and scales [groups, outputs]; and their weights."""
    rng = np.random.default_rng(seed)
    groups = inputs // group_size
    q = rng.integers(0, 16, (inputs, outputs))
    z = rng.integers(1, 16, (groups, outputs))
    s = rng.uniform(0.001, 0.02, (groups, outputs)).astype(np.float16)
    repeat = np.arange(inputs) // group_size
    weight = (q - z[repeat]) * s[repeat].astype(np.float64)
    return {"q": q, "z": z, "s": s}, weight.T


def pack(values: NDArray[Any], order: tuple[int, ...]) -> NDArray[np.int32]:
    """Eight columns to an int32: nibble i holds column `order[i]`, as both formats' packers write it."""
    packed = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for column in range(packed.shape[1]):
        for i, place in enumerate(order):
            packed[:, column] |= values[:, 8 * column + place].astype(np.uint32) << np.uint32(4 * i)
    return packed.view(np.int32)


def awq_files(layer: Arrays, name: str = "l") -> Arrays:
    """qweight [inputs, outputs / 8] and qzeros [groups, outputs / 8] in AWQ's order of columns."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{name}.qweight": pack(layer["q"], order),
        f"{name}.qzeros": pack(layer["z"], order),
        f"{name}.scales": layer["s"],
    }


def gptq_files(layer: Arrays, group_size: int, *, version: int = 1, name: str = "l") -> Arrays:
    """qweight [inputs / 8, outputs]; the first version stores zero points less one."""
    in_order = tuple(range(8))
    inputs = len(layer["q"])
    return {
        f"{name}.qweight": np.ascontiguousarray(pack(layer["q"].T, in_order).T),
        f"{name}.qzeros": pack(layer["z"] - (version == 1), in_order),
        f"{name}.scales": layer["s"],
        f"{name}.g_idx": (np.arange(inputs) // group_size).astype(np.int32),
    }


def read_weight(folder: Path, quantization: dict[str, Any], arrays: Arrays) -> Tensor:
    write_folder(folder, {}, arrays)
    with read_safetensors(folder) as file:
        return with_packed_layers(file, {"quantization_config": quantization})["l.weight"]


def require_close(tensor: Tensor, expected: NDArray[np.float64], scales: NDArray[np.float16]) -> None:
    """Only the minimum, zero point times scale, is rounded: to half precision, 2^-11 of itself."""
    assert tensor.type is TensorType.Q4_1
    assert tensor.shape == expected.shape
    error = np.abs(dequantize(tensor) - expected)
    assert error.max() <= 15 * scales.max() * 2.0**-11 * 1.01
    assert error.max() < scales.min() / 2  # no integer is off


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_awq_weights_are_those_that_were_packed(tmp_path: Path, group_size: int) -> None:
    layer, expected = random_layer(384, 48, 384 if group_size == -1 else group_size)
    layer["s"] = np.full_like(layer["s"], 0.01) if group_size == -1 else layer["s"]
    if group_size == -1:
        expected = ((layer["q"] - layer["z"]) * 0.01).T
    tensor = read_weight(tmp_path, AWQ | {"group_size": group_size}, awq_files(layer))
    require_close(tensor, expected, np.full(1, np.float16(0.01)) if group_size == -1 else layer["s"])


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_weights_are_those_that_were_packed(tmp_path: Path, group_size: int, version: int) -> None:
    layer, expected = random_layer(256, 40, group_size)
    config = GPTQ | {"group_size": group_size}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    tensor = read_weight(tmp_path, config, gptq_files(layer, group_size, version=version))
    require_close(tensor, expected, layer["s"])


def test_symmetric_gptq_is_exact(tmp_path: Path) -> None:
    """A zero point of 8 times any scale is a number that half precision has."""
    layer, _ = random_layer(128, 16, 128)
    layer["z"][:] = 8
    tensor = read_weight(tmp_path, GPTQ, gptq_files(layer, 128))
    expected = (layer["q"] - 8).T.astype(np.float32) * layer["s"].T.astype(np.float32)
    assert np.array_equal(dequantize(tensor), expected)


def test_layers_without_act_order_need_no_index(tmp_path: Path) -> None:
    layer, expected = random_layer(128, 16, 32)
    arrays = gptq_files(layer, 32)
    del arrays["l.g_idx"]
    require_close(read_weight(tmp_path, GPTQ | {"group_size": 32}, arrays), expected, layer["s"])


def test_activation_order_is_refused_where_it_matters(tmp_path: Path) -> None:
    """`desc_act` files whose inputs happen to be in order are read."""
    layer, expected = random_layer(128, 16, 32)
    arrays, config = gptq_files(layer, 32), GPTQ | {"group_size": 32, "desc_act": True}
    require_close(read_weight(tmp_path, config, arrays), expected, layer["s"])
    arrays["l.g_idx"] = np.random.default_rng(1).permutation(arrays["l.g_idx"])
    with pytest.raises(UnsupportedError, match="grouped out of order"):
        read_weight(tmp_path, config, arrays)


def test_layers_left_in_floats_stay_as_they_are(tmp_path: Path) -> None:
    layer, _ = random_layer(128, 16, 128)
    head = np.ones((4, 8), np.float16)
    write_folder(tmp_path, {}, awq_files(layer) | {"lm_head.weight": head, "l.bias": head[0]})
    with read_safetensors(tmp_path) as file:
        tensors = with_packed_layers(file, {"quantization_config": AWQ})
        assert list(tensors) == ["lm_head.weight", "l.bias", "l.weight"]
        assert tensors["lm_head.weight"].type is TensorType.F16
        outlines = outlines_of(tensors)
        assert {name: t.shape for name, t in tensors.items()} == {n: o.shape for n, o in outlines.items()}
        assert {name: t.type for name, t in tensors.items()} == {n: o.type for n, o in outlines.items()}


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qzeros", None, "'l.qzeros' must hold 32-bit integers in 2 dimensions, it is missing"),
        ("scales", None, "'l.scales' is missing"),
        ("qzeros", lambda a: a.astype(np.int64), r"it is I64 \[1, 2\]"),
        ("qweight", lambda a: a[0], r"it is I32 \[2\]"),
        ("qweight", lambda a: a[:96], "96 inputs are no whole number of groups of 128"),
        ("qzeros", lambda a: a[:, :1], r"'l.qzeros' has shape \[1, 1\], groups of 128 need \[1, 2\]"),
        ("scales", lambda a: a[:, :8], r"'l.scales' has shape \[1, 8\], groups of 128 need \[1, 16\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, part: str, change: Any, message: str) -> None:
    layer, _ = random_layer(128, 16, 128)
    arrays = awq_files(layer)
    array = arrays.pop(f"l.{part}")
    if change is not None:
        arrays[f"l.{part}"] = change(array)
    with pytest.raises(ModelFileError, match=message):
        read_weight(tmp_path, AWQ, arrays)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised with 'bitsandbytes'"),
        ({"quant_method": "fp8"}, "quantised with 'fp8'"),
        ({}, "quantised with None"),
        (AWQ | {"bits": 8}, "'bits' = 8"),
        (GPTQ | {"bits": True}, "'bits' = True"),
        (GPTQ | {"group_size": 16}, "'group_size' = 16"),
        (GPTQ | {"group_size": 0}, "'group_size' = 0"),
        (GPTQ | {"group_size": "128"}, "'group_size' = '128'"),
        (AWQ | {"version": "gemv"}, "'version' = 'gemv'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'checkpoint_format' = 'marlin'"),
    ],
)
def test_what_cannot_be_unpacked_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        packed_int4_from_config({"quantization_config": config})


def test_a_configuration_that_is_no_object_is_refused() -> None:
    with pytest.raises(ModelFileError, match="'quantization_config' must be an object"):
        packed_int4_from_config({"quantization_config": [1]})
    assert packed_int4_from_config({}) is None


@pytest.mark.parametrize("dtype", ["int32", "float64", "uint8"])
def test_weights_of_other_types_are_refused_by_name(tmp_path: Path, dtype: str) -> None:
    write_folder(tmp_path, {}, {"model.norm.weight": np.ones(4, dtype)})
    with read_safetensors(tmp_path) as file, pytest.raises(UnsupportedError, match=r"model\.norm\.weight"):
        with_packed_layers(file, {})


def test_masks_of_old_files_are_no_weights(tmp_path: Path) -> None:
    arrays = {"h.0.attn.bias": np.ones((1, 4), np.bool_), "w": np.ones(2, np.float32)}
    write_folder(tmp_path, {}, arrays)
    with read_safetensors(tmp_path) as file:
        assert list(with_packed_layers(file, {})) == ["w"]
