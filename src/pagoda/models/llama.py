"""Llama (Touvron et al. 2023) and what shares its shape: Llama 2 and 3, Mistral, SmolLM, TinyLlama."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config import ModelConfig
from pagoda.models.experts import gguf_experts
from pagoda.models.windows import all_layers
from pagoda.runtime.program import Program, ProgramBuilder
from pagoda.weights.settings import Settings


def build(config: ModelConfig) -> Program:
    """Pre-norm transformer: rotary attention over shared KV heads, then a SwiGLU feed-forward."""
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
        x = g.linear(a, f"{blk}.attn_output.weight", config.hidden_size, residual=x)

        h = g.rms_norm(x, f"{blk}.ffn_norm.weight")
        gate = g.linear(h, f"{blk}.ffn_gate.weight", config.ffn_size)
        up = g.linear(h, f"{blk}.ffn_up.weight", config.ffn_size)
        h = g.gated(gate, up, "silu")
        x = g.linear(h, f"{blk}.ffn_down.weight", config.hidden_size, residual=x)

    x = g.rms_norm(x, "output_norm.weight")
    g.logits(x, "token_embd.weight" if config.tied_embeddings else "output.weight")
    return g.build()


def from_gguf(settings: Settings, config: ModelConfig) -> ModelConfig:
    """Mistral has a window in all layers; Mixtral calls itself llama too."""
    if settings.integer("expert_count"):
        config = replace(config, architecture="mixtral", experts=gguf_experts(settings, config))
    return replace(config, windows=all_layers(settings, "attention.sliding_window", config))


def from_hf(settings: Settings, config: ModelConfig) -> ModelConfig:
    return replace(config, windows=all_layers(settings, "sliding_window", config))


ARCHITECTURE = Architecture(build=build, from_gguf=from_gguf, from_hf=from_hf, interleaved_rope=True)
