"""D09, D14: a model in several files loads whole from any of them, or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagoda.errors import ModelFileError, ModelNotFoundError
from pagoda.weights.checkpoint import load_checkpoint
from pagoda.weights.gguf import read_gguf
from tests.gguf_files import shard_path, split_parts, tiny_metadata, tiny_tensors, write_gguf, write_split
from tests.models.tiny_checkpoints import TINY_MODELS

MODEL = TINY_MODELS["llama-gqa"]
METADATA = tiny_metadata(MODEL)
TENSORS = tiny_tensors(MODEL)


@pytest.mark.parametrize("empty_first", [False, True])
@pytest.mark.parametrize("num_shards", [2, 3])
def test_any_shard_opens_the_whole_model(tmp_path: Path, num_shards: int, empty_first: bool) -> None:
    """D09: also when the first shard holds metadata only."""
    shards = write_split(tmp_path / "m.gguf", METADATA, TENSORS, num_shards, empty_first=empty_first)
    for shard in shards:
        with read_gguf(shard) as file:
            assert list(file.tensors) == list(TENSORS)
            assert all(np.array_equal(file.tensors[name].data, t.data) for name, t in TENSORS.items())
            assert METADATA.keys() <= file.metadata.keys()
            for name in TENSORS:
                file.release(name)
        load_checkpoint(shard).close()


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_shards_are_named(tmp_path: Path, missing: int) -> None:
    """D09, D14."""
    shards = write_split(tmp_path / "m.gguf", METADATA, TENSORS, 3)
    shards[missing].unlink()
    with pytest.raises(
        ModelFileError, match=rf"1 of the model's 3 files are missing: m-0000{missing + 1}-of"
    ):
        read_gguf(shards[(missing + 1) % 3])
    with pytest.raises(ModelNotFoundError):
        read_gguf(shards[missing])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty"), (b"version https://git-lfs.github.com/spec/v1\noid", "git-lfs"), (b"GGUF", "version")],
)
def test_a_broken_shard_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    """D14."""
    shards = write_split(tmp_path / "m.gguf", METADATA, TENSORS, 3)
    shards[1].write_bytes(content)
    with pytest.raises(ModelFileError, match=rf"{shards[1].name}: .*{message}"):
        read_gguf(shards[0])


@pytest.mark.parametrize(
    ("key", "value"), [("split.count", 4), ("split.count", 0), ("split.no", 2), ("split.no", 2**40)]
)
def test_shards_that_contradict_their_names_are_refused(tmp_path: Path, key: str, value: int) -> None:
    """D09: wrong counts, shards swapped."""
    for i, (keys, own) in enumerate(split_parts(METADATA, TENSORS, 3)):
        write_gguf(shard_path(tmp_path / "m.gguf", i, 3), keys | ({key: value} if i == 1 else {}), own)
    with pytest.raises(ModelFileError, match=r"the file says it is shard .*, its name says 2 of 3"):
        read_gguf(shard_path(tmp_path / "m.gguf", 0, 3))


def test_a_shard_under_another_name_is_refused(tmp_path: Path) -> None:
    """D14: alone it would be a model with most weights missing."""
    shards = write_split(tmp_path / "m.gguf", METADATA, TENSORS, 3)
    renamed = shards[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="the file says it is shard 1 of 3, its name says 1 of 1"):
        read_gguf(renamed)


def test_whole_files_named_like_shards_are_refused(tmp_path: Path) -> None:
    for i in range(2):
        write_gguf(shard_path(tmp_path / "m.gguf", i, 2), METADATA, TENSORS)
    with pytest.raises(ModelFileError, match="its name says 1 of 2"):
        read_gguf(shard_path(tmp_path / "m.gguf", 0, 2))


@pytest.mark.parametrize("keys", [{}, {"split.no": 0, "split.count": 1}])
def test_one_shard_of_one_is_a_whole_model(tmp_path: Path, keys: dict[str, int]) -> None:
    path = write_gguf(shard_path(tmp_path / "m.gguf", 0, 1), METADATA | keys, TENSORS)
    with read_gguf(path) as file:
        assert len(file.tensors) == len(TENSORS)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    parts = split_parts(METADATA, TENSORS, 2)
    name = next(iter(TENSORS))
    for i, (keys, own) in enumerate(parts):
        extra = {name: TENSORS[name]} if i == 1 else {}
        write_gguf(shard_path(tmp_path / "m.gguf", i, 2), keys, dict(own) | extra)
    with pytest.raises(ModelFileError, match=f"tensor '{name}' is in m-00001-of-00002.gguf as well"):
        read_gguf(shard_path(tmp_path / "m.gguf", 0, 2))


def test_every_declared_tensor_must_be_there(tmp_path: Path) -> None:
    """D06: all or an error."""
    for i, (keys, own) in enumerate(split_parts(METADATA, TENSORS, 2)):
        left = dict(list(own.items())[1:])
        write_gguf(shard_path(tmp_path / "m.gguf", i, 2), keys, left)
    message = f"should have {len(TENSORS)} tensors, its files hold {len(TENSORS) - 2}"
    with pytest.raises(ModelFileError, match=message):
        read_gguf(shard_path(tmp_path / "m.gguf", 0, 2))


@pytest.mark.parametrize("number", [0, 4])
def test_impossible_shard_numbers_are_refused(tmp_path: Path, number: int) -> None:
    path = write_gguf(tmp_path / f"m-{number:05}-of-00003.gguf", METADATA, TENSORS)
    with pytest.raises(ModelFileError, match=f"named as shard {number} of 3"):
        read_gguf(path)


@pytest.mark.parametrize(
    "name", ["m.gguf.part1of2", "m.gguf.part2of2", "m.gguf-split-a", "m.gguf.001", "m.gguf.part-aa"]
)
def test_pieces_cut_by_bytes_are_refused(tmp_path: Path, name: str) -> None:
    """D09: the first piece looks like a whole file that was cut short."""
    path = write_gguf(tmp_path / name, METADATA, TENSORS)
    with pytest.raises(ModelFileError, match="cut by bytes") as caught:
        read_gguf(path)
    assert "join" in (caught.value.hint or "")
