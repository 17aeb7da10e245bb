"""Qwen3-MoE (Yang et al. 2025, arXiv 2505.09388): Qwen3 with routed experts."""

from __future__ import annotations

from dataclasses import replace

from pagoda.errors import UnsupportedError
from pagoda.models.architecture import HF_TENSORS, QK_NORM, Architecture
from pagoda.models.config import ExpertConfig, ModelConfig
from pagoda.models.experts import GGUF_EXPERTS, HF_EXPERTS, MAX_EXPERTS, gguf_experts, routed_experts
from pagoda.models.windows import after_first_layers
from pagoda.runtime.program import Program, ProgramBuilder
from pagoda.weights.settings import Settings


def build(config: ModelConfig) -> Program:
    """Pre-norm transformer: rotary attention with QK-norm, then the best experts of each token."""
    g = ProgramBuilder(config)
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim

    x = g.embed("token_embd.weight")
    for i in range(config.num_layers):
        blk = f"blk.{i}"
        h = g.rms_norm(x, f"{blk}.attn_norm.weight")
        q = g.linear(h, f"{blk}.attn_q.weight", q_width)
        k = g.linear(h, f"{blk}.attn_k.weight", kv_width)
        v = g.linear(h, f"{blk}.attn_v.weight", kv_width)
        q = g.rms_norm(q, f"{blk}.attn_q_norm.weight", head_dim=config.head_dim)
        k = g.rms_norm(k, f"{blk}.attn_k_norm.weight", head_dim=config.head_dim)
        a = g.attention(g.rope(q, layer=i), g.rope(k, layer=i), v, layer=i)
        x = g.linear(a, f"{blk}.attn_output.weight", config.hidden_size, residual=x)
        x = g.add(x, routed_experts(g, g.rms_norm(x, f"{blk}.ffn_norm.weight"), blk))

    x = g.rms_norm(x, "output_norm.weight")
    g.logits(x, "token_embd.weight" if config.tied_embeddings else "output.weight")
    return g.build()


def from_gguf(settings: Settings, config: ModelConfig) -> ModelConfig:
    return replace(config, experts=gguf_experts(settings, config))


def from_hf(settings: Settings, config: ModelConfig) -> ModelConfig:
    if settings.values.get("mlp_only_layers") or settings.size("decoder_sparse_step", default=1) != 1:
        raise UnsupportedError(
            "Qwen3-MoE with layers without experts is not supported "
            f"({settings.label('mlp_only_layers')}, {settings.label('decoder_sparse_step')})"
        )
    num_experts = settings.size(
        "num_experts" if settings.has("num_experts") else "num_local_experts", MAX_EXPERTS
    )
    experts = ExpertConfig(
        num_experts=num_experts,
        num_active=settings.size("num_experts_per_tok", num_experts),
        ffn_size=settings.size("moe_intermediate_size"),
        normalised=settings.flag("norm_topk_prob"),
    )
    return replace(config, experts=experts, windows=after_first_layers(settings, config))


ARCHITECTURE = Architecture(
    build=build,
    from_gguf=from_gguf,
    from_hf=from_hf,
    gguf_tensors=GGUF_EXPERTS,
    hf_tensors=HF_TENSORS | QK_NORM | HF_EXPERTS,
)
