"""`ModelConfig`: the shape of a model, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from pagoda.core.cost import KVCacheSpec, LayerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021), rotating dimension i with i + rotary_dim / 2.

    `inv_freq` [rotary_dim / 2] already holds every scaling rule, so backends know no rope kinds.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0  # multiplies sin and cos (yarn, longrope)

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """Routed experts (Shazeer et al. 2017): each token goes through the best few of them."""

    num_experts: int
    num_active: int  # experts a token
    ffn_size: int
    normalised: bool = True  # weights of the active ones sum to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    ropes: tuple[RopeConfig, ...]  # one a layer; none where positions are learned
    windows: tuple[int | None, ...]  # one a layer; None attends to everything
    tied_embeddings: bool
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer adds to its input
    logits_scale: float = 1.0
    experts: ExpertConfig | None = None

    def rope_digest(self) -> str:
        """Differs where keys are rotated otherwise: the same file, read for other lengths."""
        return sha256(repr(self.ropes).encode()).hexdigest()[:16]

    def kv_cache_spec(self, *, block_size: int = 16, dtype: str = "f16") -> KVCacheSpec:
        """Layers grouped by attention span, in order of first appearance."""
        spans: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            spans.setdefault(window, []).append(layer)
        groups = tuple(
            LayerGroup(tuple(layers), self.num_kv_heads, self.head_dim, window)
            for window, layers in spans.items()
        )
        return KVCacheSpec(groups, block_size, dtype)
