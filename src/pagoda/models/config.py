"""`ModelConfig`: the shape of a model, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    ropes: tuple[RopeConfig, ...]  # one a layer
    windows: tuple[int | None, ...]  # one a layer; None attends to everything
    tied_embeddings: bool
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    extra: dict[str, float] = field(default_factory=dict)  # multipliers of single architectures

    def kv_cache_spec(self, *, block_size: int = 16, dtype: str = "i16") -> KVCacheSpec:
        """Layers grouped by attention span, in order of first appearance."""
        spans: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            spans.setdefault(window, []).append(layer)
        groups = tuple(
            LayerGroup(tuple(layers), self.num_kv_heads, self.head_dim, window)
            for window, layers in spans.items()
        )
        return KVCacheSpec(groups, block_size, dtype)
