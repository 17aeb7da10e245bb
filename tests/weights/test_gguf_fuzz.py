"""Whatever bytes a model file has, opening it succeeds or raises one PagodaError, and costs little memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.errors import PagodaError
from pagoda.models import build_program
from pagoda.weights.checkpoint import load_checkpoint, require_all_read
from pagoda.weights.gguf_header import parse_header
from tests.gguf_files import gguf_bytes, random_tensor, tiny_metadata, tiny_tensors
from tests.models.tiny_checkpoints import TINY_MODELS, TinyModel

MAX_BYTES = 8 << 20

SMALL = TinyModel(name="fuzz", hidden_size=32, ffn_size=32, num_layers=1, num_heads=2, vocab_size=4)
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "c", "d" * 300],
    "tokenizer.ggml.scores": np.zeros(4, np.float32),
    "tokenizer.ggml.token_type": np.ones(4, np.int32),
    "tokenizer.ggml.add_bos_token": True,
}
SEEDS = [
    gguf_bytes(tiny_metadata(SMALL) | TOKENIZER, tiny_tensors(SMALL)),
    gguf_bytes(
        tiny_metadata(TINY_MODELS["llama3-rope"]), tiny_tensors(TINY_MODELS["llama3-rope"]), version=2
    ),
]
INTERESTING = [
    *(bytes([b]) for b in (0, 1, 7, 8, 9, 13, 0x7F, 0x80, 0xFF)),
    *(
        n.to_bytes(8, "little")
        for n in (0, 1, 2**31, 2**32 - 1, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1)
    ),
    b"\xff" * 16,
]


def open_bytes(path: Path, content: bytes) -> None:
    """Open, compare with the program, read every tensor: all that may fail, failing on purpose only."""
    path.write_bytes(content)
    try:
        with load_checkpoint(path) as checkpoint:
            require_all_read(checkpoint, build_program(checkpoint.config))
            for tensor in checkpoint.tensors.values():
                assert len(tensor.data) == tensor.type.num_bytes(int(np.prod(tensor.shape)))
                tensor.data.sum()
    except PagodaError as e:
        assert e.message
        assert "\n" not in e.message
        assert len(e.message) < 2000


def header_bytes(content: bytes) -> int:
    return parse_header(content, "file").num_bytes


edits = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.one_of(st.sampled_from(INTERESTING), st.binary(min_size=1, max_size=9)),
        st.sampled_from(["replace", "insert", "delete"]),
    ),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.sampled_from(SEEDS), edits, st.booleans())
def test_mutated_files_open_or_are_refused(
    tmp_path: Path, seed: bytes, changes: list[tuple[float, bytes, str]], cut: bool
) -> None:
    """D02, D03, D05, D06: edits fall on the header, where they can do harm."""
    content, size = bytearray(seed), header_bytes(seed)
    for place, patch, kind in changes:
        at = int(place * size)
        if kind == "replace":
            content[at : at + len(patch)] = patch
        elif kind == "insert":
            content[at:at] = patch
        else:
            del content[at : at + len(patch)]
    if cut:
        del content[int(changes[0][0] * len(content)) :]
    tracemalloc.start()
    try:
        open_bytes(tmp_path / "m.gguf", bytes(content))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("value", [0x00, 0xFF])
def test_every_byte_of_the_header_may_change(tmp_path: Path, value: int) -> None:
    seed = SEEDS[0]
    for at in range(header_bytes(seed)):
        content = bytearray(seed)
        content[at] = value if content[at] != value else value ^ 0x10
        open_bytes(tmp_path / "m.gguf", bytes(content))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_bytes_after_the_magic_may_be_anything(tmp_path: Path, content: bytes) -> None:
    open_bytes(tmp_path / "m.gguf", b"GGUF" + content)
    open_bytes(tmp_path / "m.gguf", b"GGUF\3\0\0\0" + content)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(sorted(tiny_metadata(SMALL))),
        st.one_of(
            st.integers(-(2**63), 2**64 - 1),
            st.integers(-2, 300),
            st.floats(width=32),
            st.booleans(),
            st.text(max_size=5),
            st.lists(st.text(max_size=3), max_size=3),
            st.lists(st.integers(0, 2**32 - 1), max_size=4).map(lambda v: np.array(v, np.uint32)),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_metadata_of_any_type_and_value_opens_or_is_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    """D07."""
    tensors = {
        name: random_tensor(name, t.type, t.shape, np.random.default_rng(0))
        for name, t in tiny_tensors(SMALL).items()
    }
    open_bytes(tmp_path / "m.gguf", gguf_bytes(tiny_metadata(SMALL) | changes, tensors))
