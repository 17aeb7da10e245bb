"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, multi-head attention, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.architecture import Architecture, NameMap
from pagoda.models.config import ModelConfig
from pagoda.runtime.program import Program, ProgramBuilder, Value
from pagoda.weights.settings import Settings


def build(config: ModelConfig) -> Program:
    """Pre-norm transformer: attention over all heads, then a feed-forward with GELU."""
    g = ProgramBuilder(config)
    width = config.num_heads * config.head_dim

    def norm(x: Value, name: str) -> Value:
        return g.layer_norm(x, f"{name}.weight", f"{name}.bias")

    def linear(x: Value, name: str, num_outputs: int, residual: Value | None = None) -> Value:
        return g.linear(x, f"{name}.weight", num_outputs, bias=f"{name}.bias", residual=residual)

    x = g.add_position(g.embed("token_embd.weight"), "position_embd.weight")
    for i in range(config.num_layers):
        blk = f"blk.{i}"
        h = norm(x, f"{blk}.attn_norm")
        q, k, v = (linear(h, f"{blk}.{name}", width) for name in ("attn_q", "attn_k", "attn_v"))
        x = linear(g.attention(q, k, v, layer=i), f"{blk}.attn_output", config.hidden_size, residual=x)

        h = linear(norm(x, f"{blk}.ffn_norm"), f"{blk}.ffn_up", config.ffn_size)
        x = linear(g.activation(h, "gelu_tanh"), f"{blk}.ffn_down", config.hidden_size, residual=x)

    g.logits(norm(x, "output_norm"), "token_embd.weight" if config.tied_embeddings else "output.weight")
    return g.build()


QKV = ("blk.{i}.attn_q", "blk.{i}.attn_k", "blk.{i}.attn_v")
HF_LAYER: NameMap = {
    "ln_1": "blk.{i}.attn_norm",
    "attn.c_attn": QKV,
    "attn.c_proj": "blk.{i}.attn_output",
    "ln_2": "blk.{i}.ffn_norm",
    "mlp.c_fc": "blk.{i}.ffn_up",
    "mlp.c_proj": "blk.{i}.ffn_down",
}
HF_OTHER = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
# Files have "transformer." before each name, or not.
HF_TENSORS: NameMap = {
    "lm_head": "output",
    **{f"{prefix}h.{{i}}.{k}": v for k, v in HF_LAYER.items() for prefix in ("", "transformer.")},
    **{f"{prefix}{k}": v for k, v in HF_OTHER.items() for prefix in ("", "transformer.")},
}


def without_rope(settings: Settings, config: ModelConfig) -> ModelConfig:
    return replace(config, ropes=())


def from_hf(settings: Settings, config: ModelConfig) -> ModelConfig:
    settings.require("activation_function", "gelu_new", "gelu_pytorch_tanh")
    return without_rope(settings, config)


ARCHITECTURE = Architecture(
    build=build,
    from_gguf=without_rope,
    from_hf=from_hf,
    gguf_tensors={"blk.{i}.attn_qkv": QKV},
    hf_tensors=HF_TENSORS,
    hf_transposed=tuple(name for name in HF_TENSORS if ".c_" in name),
)
