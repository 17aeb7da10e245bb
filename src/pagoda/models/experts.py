"""Routed experts in place of a feed-forward layer, and the keys and names that describe them."""

from __future__ import annotations

from pagoda.models.architecture import NameMap
from pagoda.models.config import ExpertConfig, ModelConfig
from pagoda.runtime.program import ProgramBuilder, Value
from pagoda.weights.settings import Settings

MAX_EXPERTS = 4096

GGUF_EXPERTS: NameMap = {
    "blk.{i}.ffn_gate_exps": "blk.{i}.ffn_gate.{e}",
    "blk.{i}.ffn_up_exps": "blk.{i}.ffn_up.{e}",
    "blk.{i}.ffn_down_exps": "blk.{i}.ffn_down.{e}",
}
HF_EXPERTS: NameMap = {
    "model.layers.{i}.mlp.gate": "blk.{i}.ffn_gate_inp",
    "model.layers.{i}.mlp.experts.{e}.gate_proj": "blk.{i}.ffn_gate.{e}",
    "model.layers.{i}.mlp.experts.{e}.up_proj": "blk.{i}.ffn_up.{e}",
    "model.layers.{i}.mlp.experts.{e}.down_proj": "blk.{i}.ffn_down.{e}",
    # All experts in one tensor.
    "model.layers.{i}.mlp.experts.gate_up_proj": ("blk.{i}.ffn_gate.{e}", "blk.{i}.ffn_up.{e}"),
    "model.layers.{i}.mlp.experts.down_proj": "blk.{i}.ffn_down.{e}",
}


def routed_experts(g: ProgramBuilder, x: Value, blk: str) -> Value:
    """What the active experts of each token make of x."""
    experts = g.config.experts
    assert experts is not None, "the model has no experts"
    router = g.linear(x, f"{blk}.ffn_gate_inp.weight", experts.num_experts)
    gates, ups, downs = (
        [f"{blk}.{stem}.{e}.weight" for e in range(experts.num_experts)]
        for stem in ("ffn_gate", "ffn_up", "ffn_down")
    )
    return g.experts(x, router, gates, ups, downs)


def gguf_experts(settings: Settings, config: ModelConfig) -> ExpertConfig:
    num_experts = settings.size("expert_count", MAX_EXPERTS)
    return ExpertConfig(
        num_experts=num_experts,
        num_active=settings.size("expert_used_count", num_experts),
        ffn_size=settings.size("expert_feed_forward_length", default=config.ffn_size),
        normalised=settings.flag("expert_weights_norm", True),
    )
