"""Tensors of files under the names and in the order of rows that programs use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.models import build_program
from pagoda.weights.checkpoint import require_all_read
from pagoda.weights.dequantize import dequantize
from pagoda.weights.program_tensors import ProgramTensors, hf_tensors
from pagoda.weights.tensor import Tensor, TensorType
from tests.gguf_files import encode
from tests.models.load_tiny_hf import config_of
from tests.models.tiny_checkpoints import ArrayWeights
from tests.models.tiny_hf import TINY_HF, hf_weights


def stored(name: str) -> dict[str, Tensor]:
    return dict(ArrayWeights.of(hf_weights(TINY_HF[name])).tensors)


def read(name: str, tensors: dict[str, Tensor]) -> ProgramTensors:
    return hf_tensors(tensors, config_of(TINY_HF[name]))


def check(name: str, tensors: dict[str, Tensor]) -> None:
    require_all_read(ArrayWeights(read(name, tensors)), build_program(config_of(TINY_HF[name])))


@pytest.mark.parametrize("name", TINY_HF)
def test_every_tensor_of_a_folder_is_read_with_its_shape(name: str) -> None:
    """A39: nothing is left out, and shapes are known before a tensor is made."""
    tensors = read(name, stored(name))
    expected = build_program(config_of(TINY_HF[name])).weight_shapes()
    assert {key: outline.shape for key, outline in tensors.outlines.items()} == expected
    assert {key: tensors[key].shape for key in tensors} == expected
    assert {tensors.stored_name(key) for key in tensors} == set(hf_weights(TINY_HF[name]))
    check(name, stored(name))


def test_tensors_that_nothing_reads_are_named_as_the_file_names_them() -> None:
    extra = stored("hf-olmo2")
    extra["model.layers.1.self_attn.q_proj.bias"] = extra["model.norm.weight"]
    extra["model.layers.0.mlp.secret.weight"] = extra["model.norm.weight"]
    with pytest.raises(ModelFileError, match=r"does not read: .*mlp\.secret") as caught:
        check("hf-olmo2", extra)
    assert "blk.1.attn_q.bias" in caught.value.message


def test_missing_tensors_are_named() -> None:
    tensors = stored("hf-phi3")
    del tensors["model.layers.1.self_attn.qkv_proj.weight"]
    with pytest.raises(ModelFileError, match=r"missing tensors: blk\.1\.attn_q\.weight"):
        check("hf-phi3", tensors)


def test_buffers_of_older_files_and_a_tied_head_are_left_out() -> None:
    tensors = stored("hf-gemma3")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"]
    tensors["vision_tower.encoder.layers.0.mlp.fc1.weight"] = tensors["model.norm.weight"]
    check("hf-gemma3", tensors)
    tensors = stored("hf-gpt2")
    tensors |= {f"h.0.attn.{name}": tensors["transformer.ln_f.weight"] for name in ("bias", "masked_bias")}
    check("hf-gpt2", tensors)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_one_that_also_sees_has_a_prefix(prefix: str) -> None:
    renamed = {name.replace("model.", prefix, 1): t for name, t in stored("hf-gemma3").items()}
    check("hf-gemma3", renamed)


def test_fused_rows_are_cut_whatever_their_type() -> None:
    tensors = stored("hf-phi3")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    tensors[name] = encode(name, TensorType.Q8_0, dequantize(tensors[name]))
    whole = dequantize(tensors[name])
    cut = read("hf-phi3", tensors)
    parts = [cut[f"blk.0.attn_{p}.weight"] for p in "qkv"]
    assert [p.type for p in parts] == [TensorType.Q8_0] * 3
    np.testing.assert_array_equal(np.concatenate([dequantize(p) for p in parts]), whole)


def test_fused_rows_that_do_not_fit_are_an_error() -> None:
    tensors = stored("hf-phi3")
    name = "model.layers.0.mlp.gate_up_proj.weight"
    tensors[name] = replace(tensors[name], shape=(190, 64), data=tensors[name].data[: 190 * 64 * 4])
    with pytest.raises(ModelFileError, match="has 190 rows, the model needs 192"):
        read("hf-phi3", tensors)


def test_experts_in_one_tensor_are_those_in_many() -> None:
    """Both ways of files of Hugging Face: an expert a tensor, or all of them stacked, gate upon up."""
    arrays = hf_weights(TINY_HF["hf-qwen3moe"])
    stacked = {name: a for name, a in arrays.items() if ".experts." not in name}
    for i in range(2):
        prefix = f"model.layers.{i}.mlp.experts"
        gates, ups, downs = (
            np.stack([arrays[f"{prefix}.{e}.{part}_proj.weight"] for e in range(6)])
            for part in ("gate", "up", "down")
        )
        stacked[f"{prefix}.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
        stacked[f"{prefix}.down_proj"] = downs
    many = read("hf-qwen3moe", stored("hf-qwen3moe"))
    one = read("hf-qwen3moe", dict(ArrayWeights.of(stacked).tensors))
    assert set(one) == set(many)
    for name in many:
        np.testing.assert_array_equal(dequantize(one[name]), dequantize(many[name]))


def test_quantised_matrices_are_not_transposed() -> None:
    tensors = stored("hf-gpt2")
    name = "transformer.h.0.mlp.c_fc.weight"
    tensors[name] = encode(name, TensorType.Q8_0, dequantize(tensors[name]))
    with pytest.raises(UnsupportedError, match=r"c_fc\.weight' is stored inputs by outputs"):
        read("hf-gpt2", tensors)["blk.0.ffn_up.weight"]
