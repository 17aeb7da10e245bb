"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's shape with biases on query, key and value."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config import ModelConfig
from pagoda.models.windows import after_first_layers
from pagoda.runtime.program import Program, ProgramBuilder


def build(config: ModelConfig) -> Program:
    """Pre-norm transformer: rotary attention with q, k, v biases, then a SwiGLU feed-forward."""
    g = ProgramBuilder(config)
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim

    x = g.embed("token_embd.weight", scale=config.embedding_scale)
    for i in range(config.num_layers):
        blk = f"blk.{i}"
        h = g.rms_norm(x, f"{blk}.attn_norm.weight")
        q = g.linear(h, f"{blk}.attn_q.weight", q_width, bias=f"{blk}.attn_q.bias")
        k = g.linear(h, f"{blk}.attn_k.weight", kv_width, bias=f"{blk}.attn_k.bias")
        v = g.linear(h, f"{blk}.attn_v.weight", kv_width, bias=f"{blk}.attn_v.bias")
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


ARCHITECTURE = Architecture(
    build=build,
    from_hf=lambda settings, config: replace(config, windows=after_first_layers(settings, config)),
)
