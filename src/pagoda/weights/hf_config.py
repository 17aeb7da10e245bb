"""`ModelConfig` from a Hugging Face config.json; what an architecture's keys add is in `models/`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.models import architecture_of_model_type, find_architecture, rope
from pagoda.models.config import ModelConfig
from pagoda.models.windows import window_size
from pagoda.weights.settings import Settings

FILE = "config.json"

_MAX_LAYERS = 4096
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")

# Keys that would change the result unless an architecture reads them, with the value that changes nothing.
_NEUTRAL: dict[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "qkv_bias": False,
    "mlp_bias": False,
    "clip_qkv": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "attention_multiplier": 0,
    "num_local_experts": 0,
    "num_experts": 0,
    "use_parallel_residual": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "use_bidirectional_attention": False,
}


def model_config_from_hf(
    config: Mapping[str, object], tensor_names: Collection[str], max_model_len: int | None = None
) -> ModelConfig:
    """The shape of the model that a folder of Hugging Face describes.

    Args:
        config: what its config.json holds.
        tensor_names: names of all its tensors, which say whether the head is a tensor of its own.
        max_model_len: the longest sequence that will run, which some rope scalings depend on; None is the
            longest that the model can run.

    Raises:
        ModelFileError: a key is missing or out of range.
        UnsupportedError: a model type, rope scaling or variation that this build cannot honour.
    """
    settings = Settings(config, file=FILE)
    model_type = settings.text("model_type")
    if model_type is None:
        raise settings.missing("model_type")
    name = architecture_of_model_type(model_type)
    described = find_architecture(name)
    nested = settings.part("text_config")  # the language model of one that also sees
    values = config if nested is None else nested.values
    settings = Settings(
        {**described.hf_defaults, **values}, file=settings.file if nested is None else nested.file
    )
    shared = _shared_config(settings, name, tensor_names, max_model_len)
    result = described.from_hf(settings, shared)
    settings.refuse_unread(_NEUTRAL, name)
    if not settings.was_read("sliding_window"):
        window = window_size(settings, "sliding_window", result.max_position)
        if window is not None:
            raise UnsupportedError(
                f"{name} with {settings.label('sliding_window')} = {window} is not supported"
            )
    return result


def _shared_config(
    settings: Settings, name: str, tensor_names: Collection[str], max_model_len: int | None
) -> ModelConfig:
    s = settings
    hidden_size = s.size(_known(s, "hidden_size", "n_embd"))
    num_layers = s.size(_known(s, "num_hidden_layers", "n_layer"), _MAX_LAYERS)
    _check_num_layers(num_layers, tensor_names, s)
    num_heads = s.size(_known(s, "num_attention_heads", "n_head"))
    num_kv_heads = s.size("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelFileError(
            f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly "
            f"({s.label('num_key_value_heads')})"
        )
    if not s.has("head_dim") and hidden_size % num_heads:
        raise ModelFileError(
            f"width {hidden_size} is not a multiple of {num_heads} attention heads, and "
            f"{s.label('head_dim')} is missing"
        )
    head_dim = s.size("head_dim", 4096, default=hidden_size // num_heads)
    trained = s.size(_known(s, "max_position_embeddings", "n_positions"), 1 << 30)
    parameters = s.part("rope_parameters") if s.has("rope_parameters") else s.part("rope_scaling")
    layer_types = parameters is not None and "full_attention" in parameters.values
    if parameters is not None and layer_types:
        parameters = parameters.part("full_attention")
    base = s.positive("rope_theta", 10000.0)
    shape = rope.from_hf(
        s, parameters, head_dim=head_dim, max_position=trained, length=max_model_len, base=base
    )
    eps = "layer_norm_epsilon" if s.has("layer_norm_epsilon") else "rms_norm_eps"
    head = any(n == "lm_head.weight" or n.endswith(".lm_head.weight") for n in tensor_names)
    return ModelConfig(
        architecture=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=s.size(_known(s, "intermediate_size", "n_inner"), default=4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=s.size("vocab_size"),
        max_position=rope.max_position_of_hf(parameters, trained),
        norm_eps=s.positive(eps),
        ropes=(shape,) * num_layers,
        windows=(None,) * num_layers,
        tied_embeddings=s.flag("tie_word_embeddings") or not head,
        attention_scale=head_dim**-0.5,
    )


def _check_num_layers(num_layers: int, tensor_names: Collection[str], settings: Settings) -> None:
    layers = {match.group(1) for name in tensor_names if (match := _LAYER.search(name))}
    if layers and num_layers > len(layers):
        raise ModelFileError(
            f"{settings.label('num_hidden_layers')} says {num_layers} layers, "
            f"the folder has tensors of {len(layers)}",
            hint="fetch the model again",
        )


def _known(settings: Settings, *keys: str) -> str:
    """The first of the names of a key that the file uses."""
    return next((key for key in keys if settings.has(key)), keys[0])
