"""Whatever a model folder holds, opening it succeeds or raises a PagodaError, and costs little memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.errors import PagodaError
from pagoda.models import build_program
from pagoda.weights.checkpoint import load_checkpoint, require_all_read
from tests.models.tiny_checkpoints import TinyModel
from tests.safetensors_files import file_bytes, safetensors_bytes, write_folder
from tests.weights.test_hf_checkpoint import hf_arrays, hf_config
from tests.weights.test_packed_int4 import AWQ, GPTQ, awq_files, gptq_files, random_layer

MAX_BYTES = 8 << 20

SMALL = TinyModel(
    name="fuzz", architecture="qwen2", hidden_size=32, ffn_size=32, num_layers=1, num_heads=2, vocab_size=4
)
SEED = safetensors_bytes(hf_arrays(SMALL), {"format": "pt"})
CONFIG_KEYS = [*sorted(hf_config(SMALL)), "rope_scaling", "quantization_config", "sliding_window"]
PACKED = {
    "awq": awq_files(random_layer(32, 32, 32)[0]),
    "gptq": gptq_files(random_layer(32, 32, 32)[0], 32),
}
fuzz = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# Any JSON, with numbers that are dangerous as sizes.
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 300),
        st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 8, -(2**63), 1e400, -0.0, 0.5]),
        st.floats(allow_nan=True),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


def open_folder(folder: Path) -> None:
    """Open, compare with the program, read every tensor: all that may fail, failing on purpose only."""
    try:
        with load_checkpoint(folder) as checkpoint:
            require_all_read(checkpoint, build_program(checkpoint.config))
            for name, tensor in checkpoint.tensors.items():
                assert len(tensor.data) == tensor.type.num_bytes(int(np.prod(tensor.shape)))
                assert tensor.shape == checkpoint.outlines[name].shape
                tensor.data.sum()
    except PagodaError as e:
        assert e.message
        assert "\n" not in e.message
        assert len(e.message) < 2000


def open_cheaply(folder: Path) -> None:
    tracemalloc.start()
    try:
        open_folder(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_BYTES


@fuzz
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1, exclude_max=True),
            st.one_of(st.sampled_from([b"{", b"}", b"[", b'"', b"9", b"-"]), st.binary(max_size=4)),
            st.sampled_from(["replace", "insert", "delete"]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)  # fmt: skip
def test_mutated_files_open_or_are_refused(
    tmp_path: Path, changes: list[tuple[float, bytes, str]], cut: bool
) -> None:
    """D02, D03, D04, D05, D06: edits fall on the header, where they can do harm."""
    content, size = bytearray(SEED), 8 + int.from_bytes(SEED[:8], "little")
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
    folder = write_folder(tmp_path / "m", hf_config(SMALL), {})
    (folder / "model.safetensors").write_bytes(content)
    open_cheaply(folder)


@fuzz
@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), json_values, max_size=3),
    st.binary(max_size=64),
)
def test_any_header_opens_or_is_refused(tmp_path: Path, header: Any, data: bytes) -> None:
    folder = write_folder(tmp_path / "m", hf_config(SMALL), {})
    (folder / "model.safetensors").write_bytes(file_bytes(header, data))
    open_cheaply(folder)


@fuzz
@given(st.sampled_from(["dtype", "shape", "data_offsets"]), json_values, st.integers(0, 20))
def test_any_description_of_a_tensor_opens_or_is_refused(
    tmp_path: Path, field: str, value: Any, which: int
) -> None:
    size = int.from_bytes(SEED[:8], "little")
    header = json.loads(SEED[8 : 8 + size])
    header[sorted(header)[1 + which % (len(header) - 1)]][field] = value
    folder = write_folder(tmp_path / "m", hf_config(SMALL), {})
    (folder / "model.safetensors").write_bytes(file_bytes(header, SEED[8 + size :]))
    open_cheaply(folder)


@fuzz
@given(st.dictionaries(st.sampled_from(CONFIG_KEYS), json_values, min_size=1, max_size=3))
def test_any_configuration_opens_or_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """D07."""
    folder = write_folder(tmp_path / "m", hf_config(SMALL) | changes, hf_arrays(SMALL))
    open_cheaply(folder)


@fuzz
@given(json_values, st.sampled_from(["config.json", "generation_config.json", "tokenizer_config.json",
                                     "chat_template.json", "model.safetensors.index.json"]))  # fmt: skip
def test_any_json_in_any_file_opens_or_is_refused(tmp_path: Path, content: Any, name: str) -> None:
    folder = write_folder(tmp_path / "m", hf_config(SMALL), hf_arrays(SMALL), files={name: content})
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    else:
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    open_cheaply(folder)
    for path in folder.iterdir():
        path.unlink()


@fuzz
@given(st.sampled_from(["awq", "gptq"]), st.data())
def test_any_parts_of_packed_layers_open_or_are_refused(tmp_path: Path, method: str, data: Any) -> None:
    arrays = dict(PACKED[method])
    part = data.draw(st.sampled_from(sorted(arrays)))
    shape = data.draw(st.lists(st.integers(1, 40), max_size=3))
    dtype = data.draw(st.sampled_from(["int32", "int64", "float16", "float32", "uint8"]))
    if data.draw(st.booleans()):
        del arrays[part]
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            arrays[part] = np.resize(arrays[part], shape).astype(dtype)
    config = (AWQ if method == "awq" else GPTQ) | {
        "group_size": data.draw(st.sampled_from([32, 64, -1, 2**40]))
    }
    arrays = {n.replace("l.", "model.layers.0.mlp.up_proj."): a for n, a in arrays.items()}
    floats = {n: a for n, a in hf_arrays(SMALL).items() if "up_proj" not in n}
    open_cheaply(
        write_folder(tmp_path / "m", hf_config(SMALL) | {"quantization_config": config}, floats | arrays)
    )


@pytest.mark.slow
@pytest.mark.parametrize("value", [0x00, 0xFF, ord("{"), ord("9")])
def test_every_byte_of_the_header_may_change(tmp_path: Path, value: int) -> None:
    folder = write_folder(tmp_path / "m", hf_config(SMALL), {})
    for at in range(8 + int.from_bytes(SEED[:8], "little")):
        content = bytearray(SEED)
        content[at] = value if content[at] != value else value ^ 0x10
        (folder / "model.safetensors").write_bytes(content)
        open_folder(folder)
