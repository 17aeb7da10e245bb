"""The shape of a model from its config.json: what is honoured, what is refused and by which key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.models import ARCHITECTURES
from pagoda.models.config import ModelConfig
from pagoda.weights.hf_config import model_config_from_hf
from tests.models.tiny_hf import TINY_HF, config

HEAD = ("lm_head.weight",)


def read(model_type: str, max_model_len: int | None = None, **changes: Any) -> ModelConfig:
    return model_config_from_hf(config(model_type, **changes), HEAD, max_model_len)


def without(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k != key}


@pytest.mark.parametrize(
    "key",
    ["model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps"],
)
def test_required_keys_are_named_when_missing(key: str) -> None:
    with pytest.raises(ModelFileError, match=rf"config\.json: metadata key '{key}' is missing"):
        model_config_from_hf(without(config("llama"), key), HEAD)
    with pytest.raises(ModelFileError, match=rf"'{key}' is missing"):
        model_config_from_hf(config("llama") | {key: None}, HEAD)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 2**40, 2.0, True, "2", [2]])
def test_counts_that_are_no_counts_are_refused_by_key(key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=rf"'{key}'"):
        read("llama", **{key: value})


def test_unknown_model_types_are_refused_with_those_known() -> None:
    with pytest.raises(UnsupportedError, match="'mamba' is not supported") as caught:
        read("mamba")
    assert all(name in (caught.value.hint or "") for names in ARCHITECTURES.values() for name in names)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"num_local_experts": 8}),
        ("qwen2", {"attn_logit_softcapping": 30.0}),
        ("olmo2", {"clip_qkv": 8.0}),
        ("olmo2", {"sliding_window": 20}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [0]}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 2}),
        ("gpt2", {"activation_function": "relu", "layer_norm_epsilon": 1e-5}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "layer_norm_epsilon": 1e-5}),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}),
    ],
)
def test_what_would_change_the_answer_is_refused(model_type: str, changes: dict[str, Any]) -> None:
    key = list(changes)[-1] if model_type != "gpt2" else next(iter(changes))
    with pytest.raises(UnsupportedError, match=rf"{key}|layers of type"):
        read(model_type, **changes)


def test_values_that_change_nothing_pass() -> None:
    neutral = {
        "attention_bias": False,
        "hidden_act": "silu",
        "mlp_bias": False,
        "attn_logit_softcapping": None,
    }
    assert read("llama", **neutral) == read("llama")


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "max_window_layers": 1}, (None, None, None)),
        ({"max_window_layers": 0}, (None, None, None)),
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 40, 40)),
        ({"use_sliding_window": True, "max_window_layers": 3}, (None, None, None)),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, (None, None, None)),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 256}, (None, None, None)),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention", *["full_attention"] * 2]},
            (40, None, None),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_windows_that_another_key_switches_off(
    model_type: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    """A23."""
    values = {"sliding_window": 40, "num_hidden_layers": 3} | changes
    assert read(model_type, **values).windows == windows


def test_gemma_windows_all_but_every_sixth_layer_unless_told() -> None:
    windows = read("gemma3_text", num_hidden_layers=13, sliding_window=20).windows
    assert [i for i, window in enumerate(windows) if window is None] == [5, 11]
    assert read("gemma2", num_hidden_layers=4, sliding_window=20).windows == (20, None, 20, None)
    listed = ["full_attention", "sliding_attention"]
    assert read("gemma3_text", sliding_window=20, layer_types=listed).windows == (None, 20)


def test_rope_parameters_of_newer_files_are_those_of_older_ones() -> None:
    """Flat, or by the type of the layer."""
    old = config("llama", rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=5000.0)
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    new_llama = without(without(old, "rope_scaling"), "rope_theta") | {"rope_parameters": new}
    assert model_config_from_hf(new_llama, HEAD) == model_config_from_hf(old, HEAD)

    old = dict(TINY_HF["hf-gemma3"].config)
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": old.pop("rope_theta")},
        "sliding_attention": {"rope_type": "default", "rope_theta": old.pop("rope_local_base_freq")},
    }
    old.pop("rope_scaling")
    new_gemma = old | {"rope_parameters": nested}
    assert model_config_from_hf(new_gemma, ()) == model_config_from_hf(TINY_HF["hf-gemma3"].config, ())


@pytest.mark.parametrize("kind", ["mrope", "proportional", "su2", ""])
def test_unknown_rope_kinds_are_refused_with_those_known(kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 2.0}
    if not kind:  # no kind is the default one
        assert read("llama", rope_scaling=scaling).ropes == read("llama").ropes
        return
    with pytest.raises(UnsupportedError, match=f"rope scaling '{kind}' is not supported") as caught:
        read("llama", rope_scaling=scaling)
    assert "longrope" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 8}, "short_factor"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": ["a"] * 8}, "short_factor"),
        (
            {"rope_type": "longrope", "long_factor": [1.0] * 7, "short_factor": [1.0] * 7},
            "8 positive factors",
        ),
        ("linear", "rope_scaling"),
    ],
)
def test_rope_keys_that_are_missing_or_wrong_are_named(scaling: object, key: str) -> None:
    with pytest.raises(ModelFileError, match=key):
        read("llama", rope_scaling=scaling)


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope_theta": 1.0}, {"rope_type": "yarn", "factor": 2.0}),
        ({"head_dim": 2}, {"rope_type": "dynamic", "factor": 2.0}),
        ({"max_position_embeddings": 2}, {"rope_type": "dynamic", "factor": 1e300}),
        ({"rope_theta": 1e-300}, {"rope_type": "linear", "factor": 1e-300}),
        (
            {"original_max_position_embeddings": 1},
            {"rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
        ),
    ],
)
def test_rope_numbers_that_lead_nowhere_are_refused(
    changes: dict[str, Any], scaling: dict[str, object]
) -> None:
    with pytest.raises(ModelFileError, match="no rotary frequencies"):
        read("llama", 1 << 20, rope_scaling=scaling, **changes)


def test_more_layers_than_the_folder_has_tensors_of_are_refused() -> None:
    names = ["lm_head.weight", *(f"model.layers.{i}.input_layernorm.weight" for i in range(2))]
    assert model_config_from_hf(config("llama"), names).num_layers == 2
    with pytest.raises(ModelFileError, match="says 3 layers, the folder has tensors of 2"):
        model_config_from_hf(config("llama", num_hidden_layers=3), names)


def test_dynamic_scaling_grows_with_the_length_from_one_at_the_trained_length() -> None:
    """A37: a factor of 1 where the model was trained, and slower turns for every longer sequence."""

    def slowest_turn(max_model_len: int) -> float:
        scaled = read("llama", max_model_len, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
        return scaled.ropes[0].inv_freq[-1]

    plain = read("llama").ropes[0].inv_freq[-1]
    assert slowest_turn(100) == slowest_turn(256) == plain
    slowdown = [plain / slowest_turn(256 * n) for n in (1, 2, 3, 4)]
    assert slowdown == sorted(set(slowdown))
    # (factor * length / trained - factor + 1) ^ (dim / (dim - 2)), to the power of the last dimension
    expected = [(4 * n - 3) ** (16 / 14 * 14 / 16) for n in (1, 2, 3, 4)]
    np.testing.assert_allclose(slowdown, expected, rtol=1e-5)


def test_longest_sequences_of_scaled_models() -> None:
    """Dynamic and yarn go past what was trained; other kinds say the whole length already."""
    assert read("llama", rope_scaling={"rope_type": "dynamic", "factor": 4.0}).max_position == 1024
    assert read("llama", rope_scaling={"rope_type": "linear", "factor": 4.0}).max_position == 256
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert read("llama", rope_scaling=yarn).max_position == 1024
    assert read("llama", rope_scaling=yarn, max_position_embeddings=1024).max_position == 1024


def test_longrope_has_one_set_of_factors_for_all_lengths_of_an_engine() -> None:
    """A49: chosen once, by the longest sequence that will run."""
    phi3 = TINY_HF["hf-phi3"].config
    short, long = (model_config_from_hf(phi3, HEAD, length).ropes[0] for length in (32, 33))
    assert short.inv_freq[0] == pytest.approx(1.0) and long.inv_freq[0] == pytest.approx(1 / 1.5)
    assert model_config_from_hf(phi3, HEAD).ropes[0] == long
    assert short.attention_factor == long.attention_factor > 1
    assert (
        model_config_from_hf(phi3, HEAD, 32).rope_digest()
        != model_config_from_hf(phi3, HEAD, 33).rope_digest()
    )


def test_a_model_that_also_sees_is_read_as_its_language_model() -> None:
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "sliding_window": 512}
    nested = model_config_from_hf({"model_type": "gemma3", "text_config": text}, ())
    assert (nested.num_heads, nested.num_kv_heads, nested.head_dim, nested.vocab_size) == (8, 4, 256, 262208)
    assert nested.windows == (512,) * 5 + (None,)
    assert nested.tied_embeddings


def test_heads_are_tied_where_the_file_has_none_or_the_configuration_says_so() -> None:
    assert not read("llama").tied_embeddings
    assert read("llama", tie_word_embeddings=True).tied_embeddings
    assert model_config_from_hf(config("llama"), ()).tied_embeddings
