"""The shape of a model from its metadata: what is honoured, what is refused and by which name."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.models import ARCHITECTURES
from pagoda.models.config import ExpertConfig, ModelConfig
from pagoda.weights.gguf_config import model_config_from_gguf
from pagoda.weights.tensor import Tensor, TensorType
from tests.gguf_files import encode, tiny_metadata, tiny_tensors
from tests.models.tiny_checkpoints import TINY_MODELS, model_config

LLAMA = TINY_MODELS["llama-gqa"]
METADATA = tiny_metadata(LLAMA)
TENSORS = tiny_tensors(LLAMA)


def config_with(
    changes: Mapping[str, object], tensors: Mapping[str, Tensor] = TENSORS, architecture: str = "llama"
) -> ModelConfig:
    """Keys are changed or, where the value is None, left out; llama's prefix is added where there is none."""
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in METADATA.items()}
    metadata["general.architecture"] = architecture
    for key, value in changes.items():
        metadata[key if key.startswith("general.") else f"{architecture}.{key}"] = value
    return model_config_from_gguf({k: v for k, v in metadata.items() if v is not None}, tensors)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tiny_models_have_the_shape_they_were_made_with(name: str) -> None:
    """A35 (llama 3 stores its rope scaling as a tensor) and D10 (no output.weight: tied) among them."""
    model = TINY_MODELS[name]
    config = model_config_from_gguf(tiny_metadata(model), tiny_tensors(model))
    expected = model_config(model)
    for field in ModelConfig.__dataclass_fields__:
        if field == "ropes":
            assert len(config.ropes) == model.num_layers
            for rope, wanted in zip(config.ropes, expected.ropes, strict=True):
                np.testing.assert_allclose(rope.inv_freq, wanted.inv_freq, rtol=1e-6)
        elif field == "norm_eps":
            assert config.norm_eps == pytest.approx(expected.norm_eps, rel=1e-6)
        else:
            assert getattr(config, field) == getattr(expected, field), field


@pytest.mark.parametrize("width", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"])
@pytest.mark.parametrize("as_array", [False, True])
def test_counts_may_have_any_integer_type_and_repeat_by_layer(width: str, as_array: bool) -> None:
    """D07."""
    keys = ("block_count", "attention.head_count", "attention.head_count_kv", "feed_forward_length")
    values = {key: np.full(2, METADATA[f"llama.{key}"], width) for key in keys}
    assert config_with(values if as_array else {k: v[0].item() for k, v in values.items()}) == config_with({})


@pytest.mark.parametrize(
    "key",
    [
        "block_count", "embedding_length", "feed_forward_length", "context_length", "attention.head_count",
        "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, 2**31, 2**63, 2.0, True, "2", ["2"]])
def test_counts_that_are_no_counts_are_refused_by_key(key: str, value: object) -> None:
    """D07."""
    with pytest.raises(ModelFileError, match=rf"'llama\.{key}'"):
        config_with({key: value})


def test_heads_that_differ_by_layer_are_refused() -> None:
    """D07."""
    with pytest.raises(UnsupportedError, match=r"'llama\.attention\.head_count_kv' differs by layer"):
        config_with({"attention.head_count_kv": np.array([2, 4])})


@pytest.mark.parametrize(
    "key",
    [
        "block_count", "embedding_length", "feed_forward_length", "context_length", "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)  # fmt: skip
def test_required_keys_are_named_when_missing(key: str) -> None:
    with pytest.raises(ModelFileError, match=rf"'llama\.{key}' is missing"):
        config_with({key: None})


def test_optional_keys_have_the_usual_defaults() -> None:
    config = config_with(
        {
            "attention.head_count_kv": None,
            "attention.key_length": None,
            "attention.value_length": None,
            "rope.freq_base": None,
            "rope.dimension_count": None,
        }
    )
    assert config.num_kv_heads == config.num_heads == 4
    assert config.head_dim == 64 // 4
    assert config.attention_scale == 1 / math.sqrt(16)
    assert config.ropes[0].inv_freq[1] == pytest.approx(10000 ** (-2 / 16))


def test_rows_of_the_embedding_say_how_large_the_vocabulary_is() -> None:
    assert config_with({"vocab_size": 99}).vocab_size == LLAMA.vocab_size


def test_an_output_projection_unties_the_embeddings() -> None:
    """D10: the head is the embedding, whatever its type, where the file has none."""
    assert config_with({}).tied_embeddings
    assert not config_with({}, TENSORS | {"output.weight": TENSORS["token_embd.weight"]}).tied_embeddings


def test_metadata_must_fit_the_tensors() -> None:
    with pytest.raises(ModelFileError, match=r"rows of 64 values, .*'llama\.embedding_length' says 128"):
        config_with({"embedding_length": 128})
    for num_layers in (1, 3, 2**24):
        with pytest.raises(ModelFileError, match=f"says {num_layers} layers, the file has tensors of 2"):
            config_with({"block_count": num_layers})
    with pytest.raises(ModelFileError, match="no token embedding"):
        config_with({}, {})
    with pytest.raises(ModelFileError, match="4 attention heads cannot share 3 KV heads"):
        config_with({"attention.head_count_kv": 3})
    with pytest.raises(ModelFileError, match="not a multiple of 3 attention heads"):
        config_with({"attention.head_count": 3, "attention.head_count_kv": 3, "attention.key_length": None})


def test_unknown_architectures_are_refused_with_those_supported() -> None:
    with pytest.raises(UnsupportedError, match="architecture 'mamba' is not supported") as caught:
        model_config_from_gguf({"general.architecture": "mamba"}, {})
    assert all(name in (caught.value.hint or "") for name in ARCHITECTURES)
    with pytest.raises(ModelFileError, match=r"'general\.architecture' is missing"):
        model_config_from_gguf({}, {})
    with pytest.raises(UnsupportedError, match="holds 'adapter', not a model"):
        config_with({"general.type": "adapter"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_shared_count", 1),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention.scale", 0.5),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.2),
        ("logit_scale", 8.0),
        ("attention.clamp_kqv", 8.0),
        ("attention.causal", False),
        ("attention.value_length", 8),
        ("rope.dimension_count", 8),
        ("rope.scaling.type", "dynamic"),
        ("rope.scaling.type", "something"),
    ],
)
def test_what_would_change_the_answer_is_refused(key: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=r"not supported"):
        config_with({key: value})


def test_values_that_change_nothing_pass() -> None:
    neutral = {"expert_count": 0, "logit_scale": 1.0, "attention.causal": True, "rope.scaling.type": "none"}
    assert config_with(neutral) == config_with({})


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
        {"rope.scaling.factor": 4},
    ],
)
def test_linear_scaling_divides_the_frequencies(keys: dict[str, object]) -> None:
    scaled, plain = config_with(keys).ropes[0], config_with({}).ropes[0]
    np.testing.assert_allclose(scaled.inv_freq, np.array(plain.inv_freq) / 4, rtol=1e-6)


def test_scaling_of_kind_none_ignores_the_factor() -> None:
    assert config_with({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}) == config_with({})


def test_rope_factors_divide_the_frequencies() -> None:
    """A35."""
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    tensors = TENSORS | {"rope_freqs.weight": encode("rope_freqs.weight", TensorType.F32, factors)}
    scaled, plain = config_with({}, tensors).ropes[0], config_with({}).ropes[0]
    np.testing.assert_allclose(scaled.inv_freq, np.array(plain.inv_freq) / factors, rtol=1e-6)


@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + [-1.0], [1.0] * 7 + [np.nan]])
def test_rope_factors_must_fit(factors: list[float]) -> None:
    tensors = TENSORS | {"rope_freqs.weight": encode("rope_freqs.weight", TensorType.F32, factors)}
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
        config_with({}, tensors)


@pytest.mark.parametrize(
    ("window", "expected"), [(None, None), (0, None), (20, 20), (256, None), (4096, None)]
)
def test_windows_shorter_than_the_context_are_kept(window: int | None, expected: int | None) -> None:
    assert config_with({"attention.sliding_window": window}).windows == (expected,) * 2


def test_windows_of_some_layers_are_refused() -> None:
    """A23: qwen2 windows some layers only, if at all, and its files do not say which."""
    with pytest.raises(UnsupportedError, match="sliding window of 20"):
        config_with({"attention.sliding_window": 20}, architecture="qwen2")
    pattern = {"attention.sliding_window": 20, "attention.sliding_window_pattern": np.array([True, False])}
    with pytest.raises(UnsupportedError, match="sliding window of 20"):
        config_with(pattern)
    assert config_with({"attention.sliding_window": 32768}, architecture="qwen2").windows == (None, None)
    with pytest.raises(ModelFileError, match="must not be negative"):
        config_with({"attention.sliding_window": -1})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "1e-5", True])
@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "rope.freq_base"])
def test_numbers_out_of_range_are_refused_by_key(key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=rf"'llama\.{key}'"):
        config_with({key: value})


def test_experts_of_an_architecture_that_has_none_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'qwen2\.expert_count' = 8"):
        config_with({"expert_count": 8}, architecture="qwen2")


def test_a_llama_with_experts_is_a_mixtral() -> None:
    config = config_with({"expert_count": 8, "expert_used_count": 2})
    assert (config.architecture, config.experts) == (
        "mixtral", ExpertConfig(num_experts=8, num_active=2, ffn_size=96)
    )  # fmt: skip
    for value in (0, 9):
        with pytest.raises(ModelFileError, match=r"'llama\.expert_used_count'"):
            config_with({"expert_count": 8, "expert_used_count": value})


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [(None, (20, 20)), (np.array([False, True]), (None, 20)), (2, (20, None)), (1, (None, None))],
)
def test_gemma_windows_the_layers_that_the_file_says(
    pattern: object, windows: tuple[int | None, ...]
) -> None:
    keys = {"attention.sliding_window": 20, "attention.sliding_window_pattern": pattern}
    config = config_with(keys, architecture="gemma3")
    assert config.windows == windows
    local = [rope.inv_freq == config_with({}).ropes[0].inv_freq for rope in config.ropes]
    assert local == [True, True]  # both bases are 10000 here
    config = config_with(keys | {"rope.freq_base": 1e6}, architecture="gemma3")
    local = [rope.inv_freq == config_with({}).ropes[0].inv_freq for rope in config.ropes]
    assert local == [window is not None for window in windows]


@pytest.mark.parametrize("pattern", [0, -1, np.array([True]), np.array(["a", "b"]), 2.5])
def test_patterns_that_do_not_fit_are_refused(pattern: object) -> None:
    keys = {"attention.sliding_window": 20, "attention.sliding_window_pattern": pattern}
    with pytest.raises(ModelFileError, match="sliding_window_pattern"):
        config_with(keys, architecture="gemma3")


def test_gemma_2_has_its_caps_where_the_file_has_none() -> None:
    """A38."""
    config = config_with({}, architecture="gemma2")
    assert (config.attention_softcap, config.final_softcap) == (50.0, 30.0)
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
    config = config_with(caps, architecture="gemma2")
    assert (config.attention_softcap, config.final_softcap) == (5.0, 3.0)


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_queries_by_the_width_of_a_head(architecture: str, num_layers: int) -> None:
    layers = {f"blk.{i}.attn_norm.weight": TENSORS["output_norm.weight"] for i in range(num_layers)}
    keys = {"block_count": num_layers, "attention.key_length": 32, "attention.value_length": 32}
    tensors = {"token_embd.weight": TENSORS["token_embd.weight"], **layers}
    config = config_with(keys | {"rope.dimension_count": 32}, tensors, architecture)
    assert config.attention_scale == 1 / math.sqrt(64 / 4)


def test_yarn_slows_low_frequencies_and_goes_past_the_trained_length() -> None:
    keys = {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256,
    }  # fmt: skip
    config, plain = config_with(keys), config_with({})
    assert config.max_position == 1024
    assert config.ropes[0].attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    slowdown = np.array(plain.ropes[0].inv_freq) / np.array(config.ropes[0].inv_freq)
    assert slowdown[0] == pytest.approx(1) and slowdown[-1] == pytest.approx(4)
    assert (np.diff(slowdown) >= -1e-6).all()


def test_longrope_needs_its_factors() -> None:
    with pytest.raises(ModelFileError, match=r"no tensor 'rope_factors_(short|long)\.weight'"):
        config_with({"rope.scaling.type": "longrope"})
