"""What a GGUF file holds is what comes out: metadata, tensors, every version, alignment and width."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.errors import ModelNotFoundError
from pagoda.weights.gguf import read_gguf
from pagoda.weights.gguf_header import parse_header
from pagoda.weights.gguf_reader import Reader, split_short_strings
from pagoda.weights.tensor import TensorType
from tests.gguf_files import gguf_bytes, random_tensor, string, tiny_metadata, tiny_tensors, write_gguf
from tests.models.tiny_checkpoints import TINY_MODELS
from tests.real_models import SMOLLM2, real_model

WIDTHS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64"]

texts = st.text(max_size=12)
scalars = st.one_of(
    st.booleans(),
    texts,
    st.integers(-(2**63), 2**64 - 1),
    st.floats(width=32, allow_nan=False),
    st.lists(texts, min_size=1, max_size=6),
)
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20).filter(
    lambda name: name != "general.alignment"
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(names, scalars, max_size=8), st.sampled_from([2, 3]))
def test_metadata_comes_back_as_written(metadata: dict[str, object], version: int) -> None:
    header = parse_header(gguf_bytes(metadata, version=version), "file")
    assert header.metadata == metadata


@pytest.mark.parametrize("width", WIDTHS)
def test_arrays_keep_the_type_of_the_file(tmp_path: Path, width: str) -> None:
    values = np.array([0, 1, 5, 100], width)
    with read_gguf(write_gguf(tmp_path / "m.gguf", {"key": values, "empty": values[:0]})) as file:
        read = file.metadata["key"]
        assert isinstance(read, np.ndarray)
        assert read.dtype == values.dtype
        assert np.array_equal(read, values)
        assert np.asarray(file.metadata["empty"]).size == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(list(TensorType)), st.integers(1, 3), st.integers(1, 3)),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([8, 32, 64, 4096]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
def test_tensors_come_back_as_written(
    tmp_path: Path, kinds: list[tuple[TensorType, int, int]], alignment: int
) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        f"t{i}": random_tensor(f"t{i}", kind, (rows, blocks * kind.block_elements), rng)
        for i, (kind, rows, blocks) in enumerate(kinds)
    }
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment}, tensors, alignment=alignment)
    with read_gguf(path) as file:
        assert list(file.tensors) == list(tensors)
        assert file.num_bytes == sum(len(t.data) for t in tensors.values())
        for name, tensor in tensors.items():
            read = file.tensors[name]
            assert (read.name, read.type, read.shape) == (name, tensor.type, tensor.shape)
            assert np.array_equal(read.data, tensor.data)
            file.release(name)
            assert np.array_equal(read.data, tensor.data)


def test_shapes_are_row_major_and_may_have_four_dimensions(tmp_path: Path) -> None:
    array = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    with read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"a": array})) as file:
        tensor = file.tensors["a"]
        assert tensor.shape == (2, 3, 4, 5)
        assert np.array_equal(tensor.data.view(np.float32).reshape(tensor.shape), array)


def test_tensors_cannot_be_written_to(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"a": np.ones(4, np.float32)}))
    with pytest.raises(ValueError, match="read-only"):
        file.tensors["a"].data[0] = 1


def test_a_tensor_that_is_still_held_outlives_close(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"a": np.arange(4, dtype=np.float32)}))
    tensor = file.tensors["a"]
    file.close()
    assert tensor.data.view(np.float32).tolist() == [0, 1, 2, 3]
    assert not file.tensors


def test_a_path_without_a_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of a mapping")
def test_released_tensors_leave_memory(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"a": np.ones(1 << 20, np.float32)})
    with read_gguf(path) as file:
        before = resident_kib(path)
        assert file.tensors["a"].data.view(np.float32).sum() == 1 << 20
        assert resident_kib(path) >= before + 4000
        file.release("a")
        assert resident_kib(path) <= before + 64


def resident_kib(path: Path) -> int:
    """Resident memory of the mappings of one file."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line[0].isupper():
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


# Strings of a vocabulary are split many at a time where they are regular.

pieces = st.one_of(
    st.text(max_size=10).map(str.encode),
    st.sampled_from([b"", b"\0", b"\0" * 8, b"\1" * 7, b"a" * 255, b"a" * 256, b"a" * 300, "é".encode()]),
    st.binary(max_size=4),
)


@settings(deadline=None)
@given(st.lists(pieces, max_size=30), st.binary(max_size=20), st.integers(0, 30))
def test_splitting_at_once_equals_reading_one_by_one(items: list[bytes], rest: bytes, limit: int) -> None:
    data = b"".join(string(item) for item in items) + rest
    strings, num_bytes = split_short_strings(data, limit)
    one_by_one = Reader(data, "file")
    assert strings == [one_by_one.string("piece") for _ in strings]
    assert num_bytes == one_by_one.position
    assert len(strings) <= limit


def test_regular_strings_are_split_at_once() -> None:
    items = [f"token{i}" for i in range(1000)]
    data = b"".join(string(item) for item in items)
    strings, _ = split_short_strings(data, 1000)
    assert strings == items[: len(strings)]
    assert len(strings) >= 999


@given(st.lists(st.text(max_size=400), max_size=8), st.integers(1, 2000))
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_long_arrays_mix_regular_and_irregular_strings(odd: list[str], spacing: int) -> None:
    items = [f"t{i}" for i in range(3000)]
    for i, text in enumerate(odd):
        items.insert(i * spacing, text)
    assert parse_header(gguf_bytes({"tokens": items}), "file").metadata["tokens"] == items


def test_a_vocabulary_of_262144_tokens_takes_well_under_a_second(tmp_path: Path) -> None:
    tokens = [f"▁token{i}" for i in range(262_144)]
    scores = np.arange(262_144, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", {"tokens": tokens, "scores": scores, "merges": tokens})
    start = time.process_time()
    with read_gguf(path) as file:
        assert time.process_time() - start < 1.0
        assert file.metadata["tokens"] == tokens


@pytest.mark.slow
@pytest.mark.real_model
def test_a_real_model_reads_as_the_gguf_package_reads_it() -> None:
    path = real_model(SMOLLM2)
    theirs = gguf.GGUFReader(path)
    with read_gguf(path) as file:
        assert [t.name for t in theirs.tensors] == list(file.tensors)
        for t in theirs.tensors:
            ours = file.tensors[t.name]
            assert ours.type == t.tensor_type
            assert ours.shape == tuple(int(d) for d in reversed(t.shape))
            assert np.array_equal(ours.data, t.data.view(np.uint8).reshape(-1))
        for key, field in theirs.fields.items():
            if not key.startswith("GGUF."):
                assert np.array_equal(np.asarray(file.metadata[key]), np.asarray(field.contents()))


def test_a_digest_names_the_content_of_a_model_wherever_it_lies(tmp_path: Path) -> None:
    """Cached keys and values are named after it, in every process and on every machine."""
    model = TINY_MODELS["llama-gqa"]
    metadata, tensors = tiny_metadata(model), tiny_tensors(model)
    digests = []
    for number in range(2):
        write_gguf(tmp_path / f"{number}.gguf", metadata, tensors)
        with read_gguf(tmp_path / f"{number}.gguf") as file:
            digests.append(file.digest())
            assert file.digest() == digests[0]  # twice from one file
    assert digests[0] == digests[1]
    seen = {digests[0]}
    for name in tensors:
        changed = dict(tensors)
        data = tensors[name].data.copy()
        data[-1] ^= 1
        changed[name] = replace(tensors[name], data=data)
        write_gguf(tmp_path / "changed.gguf", metadata, changed)
        with read_gguf(tmp_path / "changed.gguf") as file:
            seen.add(file.digest())
    write_gguf(tmp_path / "changed.gguf", metadata | {"llama.rope.freq_base": 123.0}, tensors)
    with read_gguf(tmp_path / "changed.gguf") as file:
        seen.add(file.digest())
    assert len(seen) == 1 + len(tensors) + 1
