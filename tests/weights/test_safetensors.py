"""Weights of Hugging Face folders are read as written, or refused by one clear error."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda.errors import ModelFileError
from pagoda.weights.dequantize import dequantize
from pagoda.weights.safetensors import read_safetensors
from pagoda.weights.tensor import TensorType
from tests.safetensors_files import bf16, file_bytes, safetensors_bytes, write_folder, write_shards

MAX_BYTES = 4 << 20  # of memory that refusing a small file may take
RNG = np.random.default_rng(0)
ARRAYS = {f"t{i}.weight": RNG.standard_normal((3, 4), np.float32) for i in range(7)}


def describe(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def two(begin: int, end: int, data: bytes = bytes(16)) -> bytes:
    return file_bytes(describe() | {"b": {"dtype": "F32", "shape": [2], "data_offsets": [begin, end]}}, data)


# Name of the case -> bytes of the file, and what the message says.
DAMAGED = {
    # D02: lengths that the file cannot hold.
    "header 2**63": (struct.pack("<Q", 2**63) + b"{}", "the header would need 9223372036854775808 bytes"),
    "header one too long": (struct.pack("<Q", 3) + b"{}", "the header would need 3 bytes"),
    "five bytes": (b"\x10\0\0\0\0", "the file has 5 bytes"),
    "shape beyond the file": (file_bytes(describe(shape=[2**40], offsets=[0, 2**42])), "ends at byte"),
    "shape that wraps": (file_bytes(describe(shape=[2**32, 2**32]), bytes(8)), "needs 73786976294838206464"),
    "negative shape": (file_bytes(describe(shape=[-2]), bytes(8)), r"has the shape \[-2\]"),
    "shape 2**64": (file_bytes(describe(shape=[2**64]), bytes(8)), "has the shape"),
    "nine dimensions": (file_bytes(describe(shape=[1] * 8 + [2]), bytes(8)), "has the shape"),
    "nested too deeply": (file_bytes(b'{"a":' * 100_000), "nested too deeply|not JSON"),
    # D03: zero dimensions, and names that are empty, doubled or no text.
    "dimension 0": (file_bytes(describe(shape=[0], offsets=[0, 0])), "dimension of zero"),
    "empty name": (file_bytes({"": describe()["a"]}, bytes(8)), "has the name ''"),
    "name with NUL": (file_bytes({"a\0": describe()["a"]}, bytes(8)), r"has the name 'a\\x00'"),
    "long name": (file_bytes({"a" * 5000: describe()["a"]}, bytes(8)), "has the name 'aaa"),
    "name twice": (
        file_bytes(b'{"a":' + json.dumps(describe()["a"]).encode() + b',"a":{}}', bytes(8)),
        "names 'a' twice",
    ),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), "not UTF-8"),
    # D04: types.
    "boolean in the shape": (file_bytes(describe(shape=[True, 2]), bytes(8)), "has the shape"),
    "float in the shape": (file_bytes(describe(shape=[2.0]), bytes(8)), "has the shape"),
    "shape is text": (file_bytes(describe(shape="2"), bytes(8)), "has the shape '2'"),
    "dtype is a number": (file_bytes(describe(dtype=1), bytes(8)), "unknown dtype 1"),
    "dtype unknown": (file_bytes(describe(dtype="Q4_0"), bytes(8)), "unknown dtype 'Q4_0'"),
    "dtype missing": (file_bytes({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "dtype None"),
    "three offsets": (file_bytes(describe(offsets=[0, 4, 8]), bytes(8)), "has the data offsets"),
    "tensor is a list": (file_bytes({"a": [1]}), "is not described by a JSON object"),
    "header is a list": (file_bytes([1]), "no JSON object"),
    "header is no JSON": (file_bytes(b"{abc}"), "not JSON"),
    "metadata of numbers": (file_bytes({"__metadata__": {"a": 1}}), "'__metadata__' must map text to text"),
    # D06: ranges that wrap, overlap, or leave bytes to nobody.
    "offsets backwards": (file_bytes(describe(offsets=[8, 0]), bytes(8)), r"data offsets \[8, 0\]"),
    "fewer bytes than the shape": (file_bytes(describe(offsets=[0, 4]), bytes(8)), "needs 8 bytes"),
    "offset 2**64-8": (file_bytes(describe(offsets=[2**64 - 8, 2**64]), bytes(8)), "has the data offsets"),
    "beyond the end": (two(8, 16, bytes(12)), "'b' ends at byte"),
    "overlapping": (two(4, 12), "'a' and tensor 'b' overlap"),
    "the same bytes": (two(0, 8), "overlap"),
    "a gap": (two(12, 20, bytes(20)), "no tensor has the 4 bytes before 'b'"),
    "bytes at the end": (two(8, 16, bytes(17)), "goes on for 1 bytes"),
    # D14: files that are something else.
    "empty": (b"", "the file is empty"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs"),
    "GGUF": (b"GGUF" + bytes(60), "GGUF file"),
    "PyTorch": (b"PK\x03\x04" + bytes(60), "PyTorch"),
    "pickle": (b"\x80\x02}q\x00" + bytes(60), "PyTorch"),
    "web page": (b"<!DOCTYPE html><html></html>", "web page"),
    "zeros": (bytes(64), "begins with zeros"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    """D02, D03, D04, D06, D14."""
    content, message = DAMAGED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=message) as caught:
            read_safetensors(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.message.startswith(f"{path}: ")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    assert peak < MAX_BYTES


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """D05: cut anywhere, a file is refused when it is opened and not when a tensor is first read."""
    content = safetensors_bytes(ARRAYS)
    for size in (*range(300), len(content) // 2, len(content) - 1):
        (tmp_path / "model.safetensors").write_bytes(content[:size])
        with pytest.raises(ModelFileError):
            read_safetensors(tmp_path)


def test_a_file_that_shrinks_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    """D05."""
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(ARRAYS))
    with read_safetensors(tmp_path) as file:
        file.check_size()
        with (tmp_path / "model.safetensors").open("r+b") as stored:
            stored.truncate(100)
        with pytest.raises(ModelFileError, match=r"had \d+ bytes when it was opened and now has 100"):
            file.check_size()


def test_floats_of_each_width_come_back_as_written(tmp_path: Path) -> None:
    values = RNG.standard_normal((5, 7), np.float32)
    arrays = {"f32": values, "f16": values.astype(np.float16), "bf16": bf16(values)}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(arrays, {"format": "pt"}))
    with read_safetensors(tmp_path) as file:
        assert [t.type for t in file.tensors.values()] == [TensorType.F32, TensorType.F16, TensorType.BF16]
        assert file.metadata == {"format": "pt"}
        assert np.array_equal(dequantize(file.tensors["f32"]), values)
        assert np.array_equal(dequantize(file.tensors["f16"]), values.astype(np.float16))
        np.testing.assert_allclose(dequantize(file.tensors["bf16"]), values, rtol=2.0**-7)
        file.release("f32")
        assert np.array_equal(dequantize(file.tensors["f32"]), values)
        assert file.num_bytes == sum(a.nbytes for a in arrays.values())


def test_arrays_that_are_no_weights_are_kept_apart(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.ones(2)}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(arrays))
    with read_safetensors(tmp_path) as file:
        assert file.tensors == {}
        assert {name: a.dtype for name, a in file.arrays.items()} == {"a": "I32", "b": "F64"}
        assert file.arrays["a"].data.view("<i4").tolist() == list(range(6))


@pytest.mark.parametrize("num_shards", [2, 3])
def test_shards_are_one_model(tmp_path: Path, num_shards: int) -> None:
    """D09, D14."""
    write_shards(tmp_path, ARRAYS, num_shards)
    with read_safetensors(tmp_path) as file:
        assert file.tensors.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert np.array_equal(dequantize(file.tensors[name]), array)


def change_index(folder: Path, **changes: str | None) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, file in changes.items():
        if file is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = file
    path.write_text(json.dumps(index))


SECOND = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / SECOND).unlink(), f"1 of the model's 3 files are missing: {SECOND}"),
        (lambda f: (f / SECOND).rename(f / "other.safetensors"), f"missing: {SECOND}"),
        (lambda f: (f / SECOND).write_bytes(b""), f"{SECOND}: the file is empty"),
        (lambda f: (f / SECOND).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "git-lfs"),
        (lambda f: change_index(f, **{"x.weight": SECOND}), f"in no file: x.weight .should be in {SECOND}"),
        (lambda f: change_index(f, **{"t1.weight": None}), "does not name tensors .*: t1.weight"),
        (
            lambda f: change_index(f, **{"t0.weight": SECOND}),
            f"'t0.weight' is in model-00001-of-00003.safetensors, .* says {SECOND}",
        ),
        (lambda f: change_index(f, **{"t0.weight": "../secret.safetensors"}), "no .safetensors file of this"),
        (lambda f: change_index(f, **{"t0.weight": "/etc/passwd"}), "no .safetensors file of this"),
        (lambda f: change_index(f, **{"t0.weight": "weights.bin"}), "no .safetensors file of this"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "'weight_map' must be an object"),
        (lambda f: (f / "model.safetensors.index.json").write_text("["), "not JSON"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[" * 100_000), "nested|not JSON"),
    ],
)  # fmt: skip
def test_an_index_and_its_shards_must_agree(tmp_path: Path, break_it: Any, message: str) -> None:
    """D14: a shard that is missing, renamed, empty or a pointer; tensors that only one side knows."""
    write_shards(tmp_path, ARRAYS, 3)
    break_it(tmp_path)
    with pytest.raises(ModelFileError, match=message):
        read_safetensors(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, ARRAYS, 2)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(safetensors_bytes(ARRAYS))
    with pytest.raises(ModelFileError, match=r"tensor 't0\.weight' is in model-00001-of-00002"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pth"])
def test_pickled_weights_are_never_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(ModelFileError, match=f"the weights are pickled .{name}.") as caught:
        read_safetensors(tmp_path)
    assert "safetensors" in (caught.value.hint or "")


def test_a_folder_without_weights_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"neither model\.safetensors nor"):
        read_safetensors(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"it has consolidated\.safetensors"):
        read_safetensors(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelFileError, match="an adapter"):
        read_safetensors(tmp_path)


def test_digests_tell_models_apart(tmp_path: Path) -> None:
    digests = set()
    for i, arrays in enumerate((ARRAYS, ARRAYS | {"t3.weight": ARRAYS["t4.weight"]})):
        for copy in range(2):
            folder = write_folder(tmp_path / f"{i}-{copy}", {}, arrays)
            with read_safetensors(folder) as file:
                digests.add(file.digest())
    assert len(digests) == 2
