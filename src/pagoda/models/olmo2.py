"""OLMo 2 (Walsh et al. 2025, arXiv 2501.00656): norms after each part, and over all query and key heads."""

from __future__ import annotations

from pagoda.models.architecture import HF_TENSORS, QK_NORM, Architecture
from pagoda.models.config import ModelConfig
from pagoda.runtime.program import Program, ProgramBuilder


def build(config: ModelConfig) -> Program:
    """Post-norm transformer: rotary attention with QK-norm over the whole width, SwiGLU feed-forward."""
    g = ProgramBuilder(config)
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim

    x = g.embed("token_embd.weight")
    for i in range(config.num_layers):
        blk = f"blk.{i}"
        q = g.rms_norm(g.linear(x, f"{blk}.attn_q.weight", q_width), f"{blk}.attn_q_norm.weight")
        k = g.rms_norm(g.linear(x, f"{blk}.attn_k.weight", kv_width), f"{blk}.attn_k_norm.weight")
        v = g.linear(x, f"{blk}.attn_v.weight", kv_width)
        a = g.attention(g.rope(q, layer=i), g.rope(k, layer=i), v, layer=i)
        h = g.linear(a, f"{blk}.attn_output.weight", config.hidden_size)
        x = g.add(x, g.rms_norm(h, f"{blk}.post_attention_norm.weight"))

        gate = g.linear(x, f"{blk}.ffn_gate.weight", config.ffn_size)
        up = g.linear(x, f"{blk}.ffn_up.weight", config.ffn_size)
        h = g.linear(g.gated(gate, up, "silu"), f"{blk}.ffn_down.weight", config.hidden_size)
        x = g.add(x, g.rms_norm(h, f"{blk}.post_ffw_norm.weight"))

    x = g.rms_norm(x, "output_norm.weight")
    g.logits(x, "token_embd.weight" if config.tied_embeddings else "output.weight")
    return g.build()


ARCHITECTURE = Architecture(
    build=build,
    hf_tensors=HF_TENSORS
    | QK_NORM
    | {
        "model.layers.{i}.post_attention_layernorm": "blk.{i}.post_attention_norm",
        "model.layers.{i}.post_feedforward_layernorm": "blk.{i}.post_ffw_norm",
    },
)
