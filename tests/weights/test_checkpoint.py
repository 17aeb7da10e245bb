"""A checkpoint gives tensors in the order the program uses, all of them, or says what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagoda.backends.reference import ReferenceBackend
from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.models import build_program
from pagoda.weights.checkpoint import Checkpoint, load_checkpoint, require_all_read
from pagoda.weights.dequantize import dequantize
from pagoda.weights.tensor import Tensor, TensorType
from tests.gguf_files import (
    ENCODABLE,
    encode,
    tiny_metadata,
    tiny_tensors,
    write_gguf,
    write_split,
    write_tiny_model,
)
from tests.models.run_program import PagedModel, run_chunked
from tests.models.tiny_checkpoints import TINY_MODELS, token_ids, weights
from tests.real_models import QWEN2_5_CODER, SMOLLM2, real_model


@pytest.mark.parametrize("name", TINY_MODELS)
def test_rows_are_those_of_the_checkpoint_the_file_was_made_from(tmp_path: Path, name: str) -> None:
    """D16: q and k are in rotary order, with fewer KV heads than heads too; rope factors are no weight."""
    model = TINY_MODELS[name]
    with load_checkpoint(write_tiny_model(tmp_path / "m.gguf", model)) as checkpoint:
        arrays = weights(model)
        assert checkpoint.tensors.keys() == arrays.keys()
        for weight, array in arrays.items():
            assert np.array_equal(dequantize(checkpoint.tensors[weight]), array)
        require_all_read(checkpoint, build_program(checkpoint.config))


@pytest.mark.parametrize("tensor_type", ENCODABLE, ids=lambda t: t.name)
def test_quantised_rows_are_reordered_as_they_are(tmp_path: Path, tensor_type: TensorType) -> None:
    """D16: the bytes of a row stay together."""
    model = TINY_MODELS["llama-gqa"]
    path = write_tiny_model(tmp_path / "m.gguf", model, tensor_type=tensor_type)
    with load_checkpoint(path) as checkpoint:
        for weight, array in weights(model).items():
            if array.ndim == 2:
                expected = encode(weight, tensor_type, array)
                assert np.array_equal(checkpoint.tensors[weight].data, expected.data), weight
                assert checkpoint.tensors[weight].shape == expected.shape


def test_biases_of_q_and_k_are_reordered_with_their_rows(tmp_path: Path) -> None:
    """D16."""
    model = replace(TINY_MODELS["llama-gqa"], qkv_bias=True)
    with load_checkpoint(write_tiny_model(tmp_path / "m.gguf", model)) as checkpoint:
        for stem in ("attn_q", "attn_k", "attn_v"):
            name = f"blk.1.{stem}.bias"
            assert np.array_equal(dequantize(checkpoint.tensors[name]), weights(model)[name])


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_from_a_file_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """A35, D10, D16, end to end."""
    with np.load(Path(__file__).parents[1] / "golden" / "models" / f"{name}.npz") as stored:
        golden = stored["logits"]
    with load_checkpoint(write_tiny_model(tmp_path / "m.gguf", TINY_MODELS[name])) as checkpoint:
        paged = PagedModel.compile(
            ReferenceBackend(), build_program(checkpoint.config), checkpoint, num_tokens=600, kv_dtype="f32"
        )
        (logits,) = run_chunked(paged, [token_ids(TINY_MODELS[name], len(golden))])
    np.testing.assert_allclose(logits, golden, rtol=0, atol=2e-4)


def checkpoint_of(tmp_path: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    return load_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_metadata(TINY_MODELS["qwen2"]), tensors))


def test_tensors_that_nothing_reads_are_an_error(tmp_path: Path) -> None:
    """A39: a bias that the program leaves out would go unnoticed otherwise."""
    extra = encode("blk.1.attn_output.bias", TensorType.F32, np.ones(64))
    checkpoint = checkpoint_of(tmp_path, tiny_tensors(TINY_MODELS["qwen2"]) | {extra.name: extra})
    with pytest.raises(ModelFileError, match=r"qwen2 does not read: blk\.1\.attn_output\.bias"):
        require_all_read(checkpoint, build_program(checkpoint.config))


def test_missing_tensors_are_an_error(tmp_path: Path) -> None:
    """A39, D14."""
    tensors = tiny_tensors(TINY_MODELS["qwen2"])
    del tensors["blk.0.attn_k.bias"], tensors["output_norm.weight"]
    checkpoint = checkpoint_of(tmp_path, tensors)
    with pytest.raises(ModelFileError, match=r"missing tensors: blk\.0\.attn_k\.bias, output_norm\.weight"):
        require_all_read(checkpoint, build_program(checkpoint.config))


def test_tensors_of_another_shape_are_an_error(tmp_path: Path) -> None:
    tensors = tiny_tensors(TINY_MODELS["qwen2"])
    wrong = encode("blk.0.ffn_up.weight", TensorType.F32, np.ones((95, 64)))
    checkpoint = checkpoint_of(tmp_path, tensors | {wrong.name: wrong})
    with pytest.raises(ModelFileError, match=r"has shape \[95, 64\], the model needs \[96, 64\]"):
        require_all_read(checkpoint, build_program(checkpoint.config))


def test_projections_whose_heads_do_not_fit_are_an_error(tmp_path: Path) -> None:
    metadata = tiny_metadata(TINY_MODELS["llama-gqa"]) | {"llama.attention.head_count_kv": 4}
    path = write_gguf(tmp_path / "m.gguf", metadata, tiny_tensors(TINY_MODELS["llama-gqa"]))
    with pytest.raises(ModelFileError, match=r"'blk\.0\.attn_k\.weight' has 32 rows, 4 heads of 16 need 64"):
        load_checkpoint(path)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "mamba"})
    with pytest.raises(UnsupportedError, match=rf"^{path}: architecture 'mamba'") as caught:
        load_checkpoint(path)
    assert caught.value.hint


def test_names_are_those_of_the_program_for_split_models_too(tmp_path: Path) -> None:
    """D09."""
    model = TINY_MODELS["llama3-rope"]
    shards = write_split(tmp_path / "m.gguf", tiny_metadata(model), tiny_tensors(model), 3)
    with load_checkpoint(shards[1]) as checkpoint:
        require_all_read(checkpoint, build_program(checkpoint.config))
        for name in checkpoint.tensors:
            checkpoint.release(name)
            assert np.array_equal(dequantize(checkpoint.tensors[name]), weights(model)[name])


@pytest.mark.real_model
@pytest.mark.parametrize("name", [SMOLLM2, QWEN2_5_CODER])
def test_programs_read_every_tensor_of_the_real_models(name: str) -> None:
    """A39, D10: biases of Qwen2.5, the tied head of SmolLM2."""
    with load_checkpoint(real_model(name)) as checkpoint:
        program = build_program(checkpoint.config)
        require_all_read(checkpoint, program)
        assert program.weight_shapes().keys() == checkpoint.tensors.keys()
        assert checkpoint.num_bytes == sum(len(t.data) for t in checkpoint.tensors.values())
