"""`ModelConfig` from the metadata of a GGUF file; one entry of `FAMILIES` an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.models.config import ModelConfig, RopeConfig
from pagoda.weights.dequantize import dequantize
from pagoda.weights.metadata import Metadata, get_bool, get_float, get_int, get_str
from pagoda.weights.tensor import Tensor

ROPE_FREQS = "rope_freqs.weight"  # divides the rotary frequencies; part of the configuration, not a weight

_MAX_HEAD_DIM = 4096
_MAX_POSITION = 1 << 30
_ROPE_SCALINGS = ("none", "linear")


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture's GGUF files do differently.

    `interleaved_rope`: rows of attn_q and attn_k are stored so that rotary dimension 2i pairs with 2i + 1.
    `window`: `attention.sliding_window` is honoured, for all layers; elsewhere it is refused.
    """

    interleaved_rope: bool = False
    window: bool = False


FAMILIES = {
    "llama": Family(interleaved_rope=True, window=True),
    "qwen2": Family(),
}

# Keys that would change the result and that no family here honours, with the value that changes nothing.
_NEUTRAL: dict[str, float] = {
    "expert_count": 0,
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
}


def family_of(metadata: Metadata) -> tuple[str, Family]:
    """`general.architecture` and its entry.

    Raises:
        UnsupportedError: the architecture is unknown here, or the file is no language model.
    """
    kind = get_str(metadata, "general.type")
    if kind not in (None, "model"):
        raise UnsupportedError(f"the file holds {kind!r:.80}, not a model (metadata key 'general.type')")
    architecture = get_str(metadata, "general.architecture")
    if architecture is None:
        raise ModelFileError("metadata key 'general.architecture' is missing", hint=_CONVERT_AGAIN)
    if architecture not in FAMILIES:
        raise UnsupportedError(
            f"architecture {architecture!r:.80} is not supported",
            hint=f"supported architectures: {', '.join(sorted(FAMILIES))}",
        )
    return architecture, FAMILIES[architecture]


def model_config_from_gguf(metadata: Metadata, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """The shape of the model that a file describes; sizes are checked against its tensors.

    Raises:
        ModelFileError: a key is missing, out of range, or does not fit the tensors.
        UnsupportedError: an architecture, rope scaling or variation that this build cannot honour.
    """
    architecture, family = family_of(metadata)
    keys = _Keys(metadata, architecture)
    keys.refuse_unhonoured()
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(
            "the model has no token embedding (tensor 'token_embd.weight' [vocab, width])",
            hint="the file may hold a vocabulary only; take the file with the weights",
        )
    vocab_size, width = embedding.shape
    hidden_size = keys.size("embedding_length")
    if width != hidden_size:
        raise ModelFileError(
            f"tensor 'token_embd.weight' has rows of {width} values, "
            f"metadata key '{architecture}.embedding_length' says {hidden_size}",
            hint=_CONVERT_AGAIN,
        )
    num_layers = keys.size("block_count")
    _check_num_layers(num_layers, tensors, architecture)
    num_heads, num_kv_heads, head_dim = _heads(keys, hidden_size)
    max_position = keys.size("context_length", _MAX_POSITION)
    rope = _rope(keys, head_dim, tensors.get(ROPE_FREQS))
    if family.interleaved_rope and rope.rotary_dim != head_dim:
        raise UnsupportedError(
            f"{architecture} with {rope.rotary_dim} rotary dimensions in heads of {head_dim} is not supported"
        )
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=keys.size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position=max_position,
        norm_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        ropes=(rope,) * num_layers,
        windows=(_window(keys, family, max_position),) * num_layers,
        tied_embeddings="output.weight" not in tensors,
        attention_scale=head_dim**-0.5,
    )


_CONVERT_AGAIN = "convert the model again with a current converter"


class _Keys:
    """Metadata of one architecture, whose keys begin with its name."""

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def integer(self, key: str) -> int | None:
        return get_int(self.metadata, self.name(key))

    def size(self, key: str, maximum: int = 1 << 24, default: int | None = None) -> int:
        """A count that must be there and lie within [1, maximum]."""
        value = self.integer(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(f"metadata key {self.name(key)!r} is missing", hint=_CONVERT_AGAIN)
        if not 1 <= value <= maximum:
            raise ModelFileError(
                f"metadata key {self.name(key)!r} must lie between 1 and {maximum}, it is {value}",
                hint=_CONVERT_AGAIN,
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = get_float(self.metadata, self.name(key))
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(f"metadata key {self.name(key)!r} is missing", hint=_CONVERT_AGAIN)
        if value <= 0:
            raise ModelFileError(
                f"metadata key {self.name(key)!r} must be positive, it is {value}", hint=_CONVERT_AGAIN
            )
        return value

    def refuse_unhonoured(self) -> None:
        for key, neutral in _NEUTRAL.items():
            read = get_bool if isinstance(neutral, bool) else get_float
            value = read(self.metadata, self.name(key))
            if value is not None and value != neutral:
                raise UnsupportedError(
                    f"{self.architecture} with metadata key {self.name(key)!r} = {value} is not supported",
                    hint=f"only {neutral} is",
                )


def _check_num_layers(num_layers: int, tensors: Mapping[str, Tensor], architecture: str) -> None:
    layers = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if layers != {str(i) for i in range(min(num_layers, len(layers) + 1))}:
        raise ModelFileError(
            f"metadata key '{architecture}.block_count' says {num_layers} layers, "
            f"the file has tensors of {len(layers)}",
            hint="fetch the file again, or convert the model again",
        )


def _heads(keys: _Keys, hidden_size: int) -> tuple[int, int, int]:
    """Numbers of query and KV heads, and the width of one."""
    num_heads = keys.size("attention.head_count")
    num_kv_heads = keys.size("attention.head_count_kv", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelFileError(
            f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly "
            f"(metadata key {keys.name('attention.head_count_kv')!r})",
            hint=_CONVERT_AGAIN,
        )
    if keys.integer("attention.key_length") is None and hidden_size % num_heads:
        raise ModelFileError(
            f"width {hidden_size} is not a multiple of {num_heads} attention heads, and metadata key "
            f"{keys.name('attention.key_length')!r} is missing",
            hint=_CONVERT_AGAIN,
        )
    head_dim = keys.size("attention.key_length", _MAX_HEAD_DIM, default=hidden_size // num_heads)
    if keys.size("attention.value_length", _MAX_HEAD_DIM, default=head_dim) != head_dim:
        raise UnsupportedError("heads whose values are wider or narrower than their keys are not supported")
    return num_heads, num_kv_heads, head_dim


def _window(keys: _Keys, family: Family, max_position: int) -> int | None:
    """Span of attention; a window that no sequence can outgrow is full attention."""
    window = keys.integer("attention.sliding_window")
    if window is None or window == 0 or window >= max_position:
        return None
    if window < 0:
        raise ModelFileError(
            f"metadata key {keys.name('attention.sliding_window')!r} must not be negative, it is {window}",
            hint=_CONVERT_AGAIN,
        )
    if not family.window or keys.name("attention.sliding_window_pattern") in keys.metadata:
        raise UnsupportedError(
            f"{keys.architecture} with a sliding window of {window} in some layers is not supported"
        )
    return window


def _rope(keys: _Keys, head_dim: int, factors: Tensor | None) -> RopeConfig:
    """Frequencies base^(-2i / rotary_dim), divided by a scaling factor and by the file's own factors.

    Rounded to float32 at the end, so that every backend sees the same numbers.
    """
    rotary_dim = keys.size("rope.dimension_count", head_dim, default=head_dim)
    if rotary_dim % 2:
        raise ModelFileError(
            f"metadata key {keys.name('rope.dimension_count')!r} must be even, it is {rotary_dim}",
            hint=_CONVERT_AGAIN,
        )
    base = keys.positive("rope.freq_base", default=10000.0)
    inv_freq = base ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    inv_freq /= _linear_scaling(keys)
    if factors is not None:
        inv_freq /= _rope_factors(factors, rotary_dim // 2)
    return RopeConfig(inv_freq=tuple(float(f) for f in inv_freq.astype(np.float32)))


def _linear_scaling(keys: _Keys) -> float:
    """A factor without a kind means linear; `rope.scale_linear` is its name in older files."""
    kind = get_str(keys.metadata, keys.name("rope.scaling.type")) or "linear"
    if kind not in _ROPE_SCALINGS:
        raise UnsupportedError(
            f"rope scaling {kind!r:.80} is not supported (metadata key {keys.name('rope.scaling.type')!r})",
            hint=f"supported rope scalings: {', '.join(_ROPE_SCALINGS)}",
        )
    if kind == "none":
        return 1.0
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if get_float(keys.metadata, keys.name(key)):
            return keys.positive(key)
    return 1.0


def _rope_factors(tensor: Tensor, num_frequencies: int) -> NDArray[np.float64]:
    if tensor.shape != (num_frequencies,):
        raise ModelFileError(
            f"tensor {tensor.name!r} has shape {list(tensor.shape)}, the model needs [{num_frequencies}]",
            hint=_CONVERT_AGAIN,
        )
    factors = dequantize(tensor).astype(np.float64)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelFileError(f"tensor {tensor.name!r} must hold positive finite numbers", hint=_CONVERT_AGAIN)
    return factors
