"""A bad file gives one clear ModelFileError: no other exception, no crash, no allocation to speak of."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.weights.checkpoint import load_checkpoint
from pagoda.weights.gguf import read_gguf
from pagoda.weights.tensor import TensorType
from tests.gguf_files import (
    ARRAY,
    STRING,
    Raw,
    gguf_bytes,
    key_value,
    random_tensor,
    string,
    write_tiny_model,
)
from tests.models.tiny_checkpoints import TINY_MODELS

MAX_BYTES = 4 << 20  # of memory that refusing a file of a few hundred bytes may take

A = {"a.weight": np.arange(64, dtype=np.float32), "b.weight": np.arange(64, dtype=np.float32)}
HEAD = b"GGUF" + struct.pack("<I", 3)


def one_key(key: str | bytes, value: object) -> bytes:
    return HEAD + struct.pack("<QQ", 0, 1) + key_value(key, value)


def array_of(element_type: int, count: int, payload: bytes = b"") -> Raw:
    return Raw(ARRAY, struct.pack("<IQ", element_type, count) + payload)


def aligned(alignment: object) -> bytes:
    return gguf_bytes({"general.alignment": alignment}, A)


def with_one(field: str, value: object) -> bytes:
    return gguf_bytes({}, A, **{field: {"b.weight": value}})


# Name of the case -> bytes of the file, and what the message says.
DAMAGED = {
    # D02: counts, lengths and alignment that the file cannot hold.
    "keys 2**63": (gguf_bytes({}, num_keys=2**63), "9223372036854775808 metadata keys"),
    "keys 2**64-1": (gguf_bytes({}, num_keys=2**64 - 1), "metadata keys would need"),
    "one key too many": (gguf_bytes({"a": 1}, num_keys=2) + bytes(64), "metadata key 1 is empty"),
    "tensors 2**40": (gguf_bytes({}, num_tensors=2**40), "1099511627776 tensor descriptions"),
    "one tensor too many": (gguf_bytes({}, A, num_tensors=3), "tensor 2"),
    "string 2**60": (
        one_key("a", Raw(STRING, struct.pack("<Q", 2**60))),
        "'a' would need 1152921504606846976",
    ),
    "string 2**64-1": (one_key("a", Raw(STRING, struct.pack("<Q", 2**64 - 1))), "'a' would need"),
    "key name 2**60": (HEAD + struct.pack("<QQQ", 0, 1, 2**60) + bytes(64), "metadata key 0 would need"),
    "array of 2**30 strings": (one_key("a", array_of(STRING, 2**30)), "'a' has 1073741824 elements"),
    "array of 2**25 strings": (one_key("a", array_of(STRING, 2**25)), "33554432 strings of metadata key 'a'"),
    "array of 2**25 floats": (one_key("a", array_of(6, 2**25)), "33554432 values of metadata key 'a'"),
    "array of 2**64-1 bytes": (one_key("a", array_of(0, 2**64 - 1)), "'a' has 18446744073709551615 elements"),
    "strings that end early": (
        one_key("a", array_of(STRING, 3, string("one") + struct.pack("<QQ", 5, 9))),
        "string 2 of metadata key 'a' would need 8 bytes",
    ),
    "array of arrays": (one_key("a", array_of(ARRAY, 1, struct.pack("<IQ", 0, 0))), "array of arrays"),
    "alignment 0": (aligned(0), "'general.alignment' must be a power of two"),
    "alignment 3": (aligned(3), "'general.alignment' must be a power of two"),
    "alignment 4": (aligned(4), "at least 8"),
    "alignment 2**30": (
        gguf_bytes({"general.alignment": 2**30}, {"a.weight": A["a.weight"]}),
        "'a.weight' needs 256 bytes at offset 1073741824",
    ),
    "alignment negative": (aligned(-32), "'general.alignment' must be a power of two"),
    "alignment text": (aligned("32"), "'general.alignment' must be an integer"),
    # D03: zero dimensions, and names that are empty, doubled or no text.
    "dimension 0": (with_one("dimensions", [0]), "'b.weight' has a dimension of zero"),
    "inner dimension 0": (with_one("dimensions", [64, 0]), "'b.weight' has a dimension of zero"),
    "dimension -1": (with_one("dimensions", [2**64 - 1]), "'b.weight' needs"),
    "dimensions that wrap": (with_one("dimensions", [2**32, 2**32, 2]), "'b.weight' needs"),
    "no dimension": (with_one("dimensions", []), "'b.weight' has 0 dimensions"),
    "five dimensions": (with_one("dimensions", [2, 2, 2, 2, 4]), "'b.weight' has 5 dimensions"),
    "empty key": (one_key("", 1), "metadata key 0 is empty"),
    "empty tensor name": (gguf_bytes({}, {"": A["a.weight"]}), "tensor 0 is empty"),
    "key twice": (
        HEAD + struct.pack("<QQ", 0, 2) + key_value("a", 1) + key_value("a", 2),
        "metadata key 'a' appears twice",
    ),
    "key with NUL": (one_key("a\0b", 1), "control characters"),
    "key not UTF-8": (one_key(b"a\xff", 1), "not UTF-8"),
    "text not UTF-8": (one_key("a", Raw(STRING, string(b"\xc3"))), "'a' is not UTF-8"),
    "unknown value type": (one_key("a", Raw(13, bytes(8))), "'a' has the unknown value type 13"),
    "unknown element type": (one_key("a", array_of(77, 1, bytes(8))), "'a' has the unknown value type 77"),
    "boolean 2": (one_key("a", Raw(7, b"\2")), "'a' is boolean"),
    # D06: offsets that wrap, lie elsewhere, or share bytes.
    "offset 2**64-64": (with_one("offsets", 2**64 - 64), "'b.weight' needs 256 bytes at offset"),
    "offset unaligned": (with_one("offsets", 264), "'b.weight' lies at offset 264, not a multiple"),
    "offset overlapping": (with_one("offsets", 224), "'a.weight' and 'b.weight' overlap"),
    "offset the same": (with_one("offsets", 0), "overlap"),
    "offset beyond the end": (with_one("offsets", 512), "'b.weight' needs 256 bytes"),
    "unknown tensor type": (with_one("types", 999), "'b.weight' has the unknown type 999"),
    "removed tensor type": (with_one("types", 4), "'b.weight' has the unknown type 4"),
    "rows that are no whole blocks": (with_one("types", int(TensorType.Q4_K)), "'b.weight' has rows of 64"),
    # D13: byte order; and files that are something else.
    "big-endian": (gguf_bytes({"a": 1}, A, byte_order=">"), "big-endian"),
    "big-endian magic": (b"FUGG" + gguf_bytes({}, A, byte_order=">")[4:], "big-endian"),
    "version 1": (gguf_bytes({}, version=1), "version 1 is not supported"),
    "version 0": (gguf_bytes({}, version=0), "version 0 is not supported"),
    "version 4": (gguf_bytes({}, version=4), "version 4 is not supported"),
    "empty": (b"", "the file is empty"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "only the magic": (b"GGUF", "the version would need 4 bytes"),
    "zeros": (bytes(4096), "begins with zeros"),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n",
        "git-lfs pointer",
    ),
    "web page": (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
    "PyTorch": (b"PK\x03\x04" + bytes(100), "PyTorch"),
    "safetensors": (struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}}', "safetensors"),
    "before GGUF": (b"tjgg" + bytes(100), "before GGUF"),
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MAX_BYTES


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    """D02, D03, D06, D13: the message names the file and what is wrong in it; a hint says what to do."""
    content, message = DAMAGED[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    for read in (read_gguf, load_checkpoint):
        with pytest.raises(ModelFileError) as caught:
            read(path)
        assert str(path) in caught.value.message
        assert message in caught.value.message
        assert "\n" not in caught.value.message
        assert caught.value.hint


def test_a_tensor_name_may_not_appear_twice(tmp_path: Path) -> None:
    """D03."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({}, A).replace(b"b.weight", b"a.weight"))
    with pytest.raises(ModelFileError, match=r"tensor 'a\.weight' appears twice"):
        read_gguf(path)


def test_a_type_that_this_build_cannot_unpack_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(with_one("types", 10))
    with pytest.raises(UnsupportedError, match=r"'b\.weight' has type Q2_K") as caught:
        read_gguf(path)
    assert "Q4_K" in (caught.value.hint or "")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """D05: cut anywhere, a file is refused when it is opened and not when a tensor is first read."""
    rng = np.random.default_rng(0)
    whole = gguf_bytes(
        {"a": "text", "b": ["x", "y"], "c": np.arange(3)},
        {f"t{i}": random_tensor(f"t{i}", kind, (2, 256), rng) for i, kind in enumerate(TensorType)},
        alignment=32,
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    with read_gguf(path) as file:
        last = file.tensors[f"t{len(TensorType) - 1}"]
        end = len(whole) - (-len(last.data) % 32)
    header = whole.index(b"t10") + 64
    for size in [*range(1, header), *range(header, end, 97), end - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=r"would need|needs|empty|not a GGUF") as caught:
            read_gguf(path)
        assert caught.value.hint
    path.write_bytes(whole[:end])  # what follows the last tensor is padding
    read_gguf(path).close()


def test_a_truncated_tensor_is_named_with_needed_and_actual_size(tmp_path: Path) -> None:
    """D05."""
    whole = gguf_bytes({}, A)
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[:-1])
    message = rf"tensor 'b\.weight' needs 256 bytes at offset {len(whole) - 256}, up to {len(whole)}, "
    with pytest.raises(ModelFileError, match=message + f"the file has {len(whole) - 1}"):
        read_gguf(path)


def test_a_file_that_shrinks_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    """D05: touching pages that are gone would end the process by signal."""
    path = write_tiny_model(tmp_path / "m.gguf", TINY_MODELS["qwen2"])
    with load_checkpoint(path) as checkpoint:
        assert "output_norm.weight" in checkpoint.tensors
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
        with pytest.raises(ModelFileError, match="when it was opened and now has"):
            _ = checkpoint.tensors


def test_a_file_that_grows_keeps_what_it_had(tmp_path: Path) -> None:
    """D05."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({}, A))
    with read_gguf(path) as file:
        with path.open("ab") as more:
            more.write(bytes(5000))
        file.check_size()
        assert np.array_equal(file.tensors["b.weight"].data.view(np.float32), A["b.weight"])


def test_folders_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m.gguf"
    folder.mkdir()
    with pytest.raises(ModelFileError, match="this is a folder"):
        read_gguf(folder)
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_gguf("/dev/null")
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_gguf(tmp_path / ("x" * 300))
