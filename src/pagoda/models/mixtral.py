"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Llama's shape with routed experts.

Its GGUF files call themselves llama, and `models/llama.py` hands them over.
"""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.architecture import HF_TENSORS, Architecture
from pagoda.models.config import ExpertConfig, ModelConfig
from pagoda.models.experts import GGUF_EXPERTS, MAX_EXPERTS, routed_experts
from pagoda.models.windows import all_layers
from pagoda.runtime.program import Program, ProgramBuilder
from pagoda.weights.settings import Settings


def build(config: ModelConfig) -> Program:
    """Pre-norm transformer: rotary attention, then the best experts of each token."""
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
        a = g.attention(g.rope(q, layer=i), g.rope(k, layer=i), v, layer=i)
        x = g.linear(a, f"{blk}.attn_output.weight", config.hidden_size, residual=x)
        x = g.add(x, routed_experts(g, g.rms_norm(x, f"{blk}.ffn_norm.weight"), blk))

    x = g.rms_norm(x, "output_norm.weight")
    g.logits(x, "token_embd.weight" if config.tied_embeddings else "output.weight")
    return g.build()


def from_hf(settings: Settings, config: ModelConfig) -> ModelConfig:
    num_experts = settings.size("num_local_experts", MAX_EXPERTS)
    experts = ExpertConfig(
        num_experts=num_experts,
        num_active=settings.size("num_experts_per_tok", num_experts),
        ffn_size=config.ffn_size,
    )
    return replace(config, experts=experts, windows=all_layers(settings, "sliding_window", config))


ARCHITECTURE = Architecture(
    build=build,
    from_hf=from_hf,
    gguf_tensors=GGUF_EXPERTS,
    hf_tensors=HF_TENSORS
    | {
        "model.layers.{i}.block_sparse_moe.gate": "blk.{i}.ffn_gate_inp",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w1": "blk.{i}.ffn_gate.{e}",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w3": "blk.{i}.ffn_up.{e}",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w2": "blk.{i}.ffn_down.{e}",
    },
    interleaved_rope=True,
    hf_defaults={"rope_theta": 1_000_000.0},
)
