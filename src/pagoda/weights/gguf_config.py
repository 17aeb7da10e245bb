"""`ModelConfig` from the metadata of a GGUF file; what an architecture's keys add is in `models/`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.models import find_architecture, rope
from pagoda.models.config import ModelConfig, RopeConfig
from pagoda.models.windows import window_size
from pagoda.weights.dequantize import dequantize
from pagoda.weights.metadata import Metadata, get_str
from pagoda.weights.settings import CONVERT_AGAIN, Settings
from pagoda.weights.tensor import Tensor

# Parts of the configuration, not weights: they divide the rotary frequencies.
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = (
    "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
)  # fmt: skip
ROPE_TENSORS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)

_MAX_HEAD_DIM = 4096
_MAX_POSITION = 1 << 30
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

# Keys that would change the result unless an architecture reads them, with the value that changes nothing.
_NEUTRAL: dict[str, object] = {
    "expert_count": 0,
    "expert_shared_count": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.scale": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "embedding_scale": 1,
    "residual_scale": 1,
    "logit_scale": 1,
    "attention.causal": True,
    "use_parallel_residual": False,
    "rope.scaling.yarn_log_multiplier": 0,
}


def architecture_name(metadata: Metadata) -> str:
    """`general.architecture`.

    Raises:
        UnsupportedError: the file is no language model.
    """
    kind = get_str(metadata, "general.type")
    if kind not in (None, "model"):
        raise UnsupportedError(f"the file holds {kind!r:.80}, not a model (metadata key 'general.type')")
    name = get_str(metadata, "general.architecture")
    if name is None:
        raise ModelFileError("metadata key 'general.architecture' is missing", hint=CONVERT_AGAIN)
    return name


def model_config_from_gguf(
    metadata: Metadata, tensors: Mapping[str, Tensor], max_model_len: int | None = None
) -> ModelConfig:
    """The shape of the model that a file describes; sizes are checked against its tensors.

    `max_model_len` is the longest sequence that will run, which some rope scalings depend on; None is the
    longest that the model can run.

    Raises:
        ModelFileError: a key is missing, out of range, or does not fit the tensors.
        UnsupportedError: an architecture, rope scaling or variation that this build cannot honour.
    """
    name = architecture_name(metadata)
    described = find_architecture(name)
    settings = Settings(metadata, prefix=f"{name}.")
    config = _shared_config(settings, tensors, name, max_model_len)
    if described.interleaved_rope and config.ropes[0].rotary_dim != config.head_dim:
        raise UnsupportedError(
            f"{name} with {config.ropes[0].rotary_dim} rotary dimensions in heads of {config.head_dim} "
            "is not supported"
        )
    config = described.from_gguf(settings, config)
    settings.refuse_unread(_NEUTRAL, name)
    pattern = "attention.sliding_window_pattern"
    if not settings.was_read("attention.sliding_window") or (
        settings.has(pattern) and not settings.was_read(pattern)
    ):
        window = window_size(settings, "attention.sliding_window", config.max_position)
        if window is not None:
            raise UnsupportedError(
                f"{name} with a sliding window of {window} in some layers is not supported"
            )
    return config


def _shared_config(
    settings: Settings, tensors: Mapping[str, Tensor], name: str, max_model_len: int | None
) -> ModelConfig:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(
            "the model has no token embedding (tensor 'token_embd.weight' [vocab, width])",
            hint="the file may hold a vocabulary only; take the file with the weights",
        )
    vocab_size, width = embedding.shape
    hidden_size = settings.size("embedding_length")
    if width != hidden_size:
        raise ModelFileError(
            f"tensor 'token_embd.weight' has rows of {width} values, "
            f"{settings.label('embedding_length')} says {hidden_size}",
            hint=CONVERT_AGAIN,
        )
    num_layers = settings.size("block_count")
    _check_num_layers(num_layers, tensors, settings)
    num_heads, num_kv_heads, head_dim = _heads(settings, hidden_size)
    max_position = settings.size("context_length", _MAX_POSITION)
    with rope.usable_frequencies(settings):
        shape = _rope(settings, head_dim, tensors, max_position, max_model_len)
    if settings.text("rope.scaling.type") == "yarn":
        trained = settings.size("rope.scaling.original_context_length", _MAX_POSITION, default=max_position)
        longest = int(trained * settings.positive("rope.scaling.factor", 1.0))
        max_position = min(max(max_position, longest), _MAX_POSITION)
    rms_eps, eps = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    return ModelConfig(
        architecture=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=settings.size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position=max_position,
        norm_eps=settings.positive(eps if settings.has(eps) and not settings.has(rms_eps) else rms_eps),
        ropes=(shape,) * num_layers,
        windows=(None,) * num_layers,
        tied_embeddings="output.weight" not in tensors,
        attention_scale=head_dim**-0.5,
    )


def _check_num_layers(num_layers: int, tensors: Mapping[str, Tensor], settings: Settings) -> None:
    layers = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if layers != {str(i) for i in range(min(num_layers, len(layers) + 1))}:
        raise ModelFileError(
            f"{settings.label('block_count')} says {num_layers} layers, "
            f"the file has tensors of {len(layers)}",
            hint="fetch the file again, or convert the model again",
        )


def _heads(settings: Settings, hidden_size: int) -> tuple[int, int, int]:
    """Numbers of query and KV heads, and the width of one."""
    num_heads = settings.size("attention.head_count")
    num_kv_heads = settings.size("attention.head_count_kv", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelFileError(
            f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly "
            f"({settings.label('attention.head_count_kv')})",
            hint=CONVERT_AGAIN,
        )
    if settings.integer("attention.key_length") is None and hidden_size % num_heads:
        raise ModelFileError(
            f"width {hidden_size} is not a multiple of {num_heads} attention heads, and "
            f"{settings.label('attention.key_length')} is missing",
            hint=CONVERT_AGAIN,
        )
    head_dim = settings.size("attention.key_length", _MAX_HEAD_DIM, default=hidden_size // num_heads)
    if settings.size("attention.value_length", _MAX_HEAD_DIM, default=head_dim) != head_dim:
        raise UnsupportedError("heads whose values are wider or narrower than their keys are not supported")
    return num_heads, num_kv_heads, head_dim


def _rope(
    settings: Settings, head_dim: int, tensors: Mapping[str, Tensor], max_position: int, length: int | None
) -> RopeConfig:
    """A factor without a kind means linear; `rope.scale_linear` is its name in older files."""
    rotary_dim = settings.size("rope.dimension_count", head_dim, default=head_dim)
    if rotary_dim % 2:
        raise ModelFileError(
            f"{settings.label('rope.dimension_count')} must be even, it is {rotary_dim}", hint=CONVERT_AGAIN
        )
    base = settings.positive("rope.freq_base", default=10000.0)
    kind = settings.text("rope.scaling.type")
    if kind is None:
        kind = "longrope" if ROPE_LONG in tensors else "linear"
    if kind not in _ROPE_SCALINGS:
        raise UnsupportedError(
            f"rope scaling {kind!r:.80} is not supported ({settings.label('rope.scaling.type')})",
            hint=f"supported rope scalings: {', '.join(_ROPE_SCALINGS)}",
        )
    trained = settings.size("rope.scaling.original_context_length", _MAX_POSITION, default=max_position)
    attention_factor = settings.positive("rope.scaling.attn_factor", 1.0)
    if kind == "longrope":
        short, long = (_rope_factors(tensors, name, rotary_dim // 2) for name in (ROPE_SHORT, ROPE_LONG))
        return rope.longrope(
            base, rotary_dim, short=short.tolist(), long=long.tolist(), trained=trained,
            length=length or max_position, factor=1.0, attention_factor=attention_factor,
        )  # fmt: skip
    factor = 1.0
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if kind != "none" and factor == 1.0 and settings.number(key):
            factor = settings.positive(key)
    if kind == "yarn":
        scaled = rope.yarn(
            base, rotary_dim, factor=factor, trained=trained,
            beta_fast=settings.positive("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=settings.positive("rope.scaling.yarn_beta_slow", 1.0),
        )  # fmt: skip
        return RopeConfig(
            inv_freq=scaled.inv_freq, attention_factor=scaled.attention_factor * attention_factor
        )
    factors = _rope_factors(tensors, ROPE_FREQS, rotary_dim // 2) if ROPE_FREQS in tensors else 1.0
    return rope.default(base, rotary_dim, factor=factor, factors=factors)


def _rope_factors(tensors: Mapping[str, Tensor], name: str, num_frequencies: int) -> NDArray[np.float64]:
    tensor = tensors.get(name)
    if tensor is None:
        raise ModelFileError(f"the model has no tensor {name!r}", hint=CONVERT_AGAIN)
    if tensor.shape != (num_frequencies,):
        raise ModelFileError(
            f"tensor {name!r} has shape {list(tensor.shape)}, the model needs [{num_frequencies}]",
            hint=CONVERT_AGAIN,
        )
    factors = dequantize(tensor).astype(np.float64)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelFileError(f"tensor {name!r} must hold positive finite numbers", hint=CONVERT_AGAIN)
    return factors
