"""Granite 3 (IBM 2024): Llama's shape with multipliers on embeddings, residuals, attention and logits."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config import ModelConfig
from pagoda.runtime.program import Program, ProgramBuilder
from pagoda.weights.settings import Settings


def build(config: ModelConfig) -> Program:
    """Pre-norm transformer whose layers add `residual_scale` times what they compute."""
    g = ProgramBuilder(config)
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim

    x = g.embed("token_embd.weight", scale=config.embedding_scale)
    for i in range(config.num_layers):
        blk = f"blk.{i}"
        h = g.rms_norm(x, f"{blk}.attn_norm.weight")
        q = g.linear(h, f"{blk}.attn_q.weight", q_width)
        k = g.linear(h, f"{blk}.attn_k.weight", kv_width)
        v = g.linear(h, f"{blk}.attn_v.weight", kv_width)
        a = g.attention(g.rope(q, layer=i), g.rope(k, layer=i), v, layer=i)
        h = g.linear(a, f"{blk}.attn_output.weight", config.hidden_size)
        x = g.add(x, g.scale(h, config.residual_scale))

        h = g.rms_norm(x, f"{blk}.ffn_norm.weight")
        gate = g.linear(h, f"{blk}.ffn_gate.weight", config.ffn_size)
        up = g.linear(h, f"{blk}.ffn_up.weight", config.ffn_size)
        h = g.linear(g.gated(gate, up, "silu"), f"{blk}.ffn_down.weight", config.hidden_size)
        x = g.add(x, g.scale(h, config.residual_scale))

    x = g.scale(g.rms_norm(x, "output_norm.weight"), config.logits_scale)
    g.logits(x, "token_embd.weight" if config.tied_embeddings else "output.weight")
    return g.build()


def from_gguf(settings: Settings, config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        embedding_scale=settings.positive("embedding_scale", 1.0),
        residual_scale=settings.positive("residual_scale", 1.0),
        attention_scale=settings.positive("attention.scale", config.attention_scale),
        logits_scale=1.0 / settings.positive("logit_scale", 1.0),
    )


def from_hf(settings: Settings, config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        embedding_scale=settings.positive("embedding_multiplier", 1.0),
        residual_scale=settings.positive("residual_multiplier", 1.0),
        attention_scale=settings.positive("attention_multiplier", 1.0),
        logits_scale=1.0 / settings.positive("logits_scaling", 1.0),
    )


ARCHITECTURE = Architecture(build=build, from_gguf=from_gguf, from_hf=from_hf, interleaved_rope=True)
