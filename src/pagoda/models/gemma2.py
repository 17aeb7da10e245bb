"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): every second layer windowed, scores and logits capped."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.architecture import HF_TENSORS, Architecture, NameMap
from pagoda.models.config import ModelConfig
from pagoda.models.windows import Windows, all_but_every, by_layer_types, window_size
from pagoda.runtime.program import Program, ProgramBuilder
from pagoda.weights.settings import Settings


def build(config: ModelConfig) -> Program:
    """Norms before and after each part, GeGLU, and embeddings scaled by sqrt(width)."""
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
        x = g.add(x, g.rms_norm(h, f"{blk}.post_attention_norm.weight"))

        h = g.rms_norm(x, f"{blk}.ffn_norm.weight")
        gate = g.linear(h, f"{blk}.ffn_gate.weight", config.ffn_size)
        up = g.linear(h, f"{blk}.ffn_up.weight", config.ffn_size)
        h = g.linear(g.gated(gate, up, "gelu_tanh"), f"{blk}.ffn_down.weight", config.hidden_size)
        x = g.add(x, g.rms_norm(h, f"{blk}.post_ffw_norm.weight"))

    x = g.rms_norm(x, "output_norm.weight")
    g.logits(x, "token_embd.weight" if config.tied_embeddings else "output.weight")
    return g.build()


NUM_LAYERS_27B = 46
HF_DEFAULTS = {"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 4096}
HF_NORMS: NameMap = {
    "model.layers.{i}.post_attention_layernorm": "blk.{i}.post_attention_norm",
    "model.layers.{i}.pre_feedforward_layernorm": "blk.{i}.ffn_norm",
    "model.layers.{i}.post_feedforward_layernorm": "blk.{i}.post_ffw_norm",
}


def from_gguf(settings: Settings, config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=attention_scale(config, NUM_LAYERS_27B),
        attention_softcap=settings.positive("attn_logit_softcapping", 50.0),
        final_softcap=settings.positive("final_logit_softcapping", 30.0),
        windows=pattern(settings, config, 2),
    )


def attention_scale(config: ModelConfig, num_layers_27b: int) -> float:
    """GGUF has no key for it: the 27B models scale by the width a head has, all others by the head dim."""
    width = config.hidden_size / config.num_heads if config.num_layers == num_layers_27b else config.head_dim
    return float(width**-0.5)


def pattern(settings: Settings, config: ModelConfig, period: int) -> Windows:
    """One layer in `period` is full, unless the file says which."""
    window = window_size(settings, "attention.sliding_window", config.max_position)
    key = "attention.sliding_window_pattern"
    if isinstance(settings.values.get(settings.name(key)), int):
        return all_but_every(settings.size(key), window, config.num_layers)
    windowed = settings.flags(key, config.num_layers)
    if windowed is not None:
        return tuple(window if w else None for w in windowed)
    return all_but_every(period, window, config.num_layers)


def from_hf(settings: Settings, config: ModelConfig) -> ModelConfig:
    return hf_changes(settings, config, 2)


def hf_changes(settings: Settings, config: ModelConfig, period: int) -> ModelConfig:
    settings.require("hidden_activation", "gelu_pytorch_tanh")
    settings.require("hidden_act", "gelu_pytorch_tanh")
    window = window_size(settings, "sliding_window", config.max_position)
    period = settings.size("sliding_window_pattern", default=period)
    listed = by_layer_types(settings, window, config.num_layers)
    return replace(
        config,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=settings.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=settings.number("attn_logit_softcapping") or None,
        final_softcap=settings.number("final_logit_softcapping") or None,
        windows=listed or all_but_every(period, window, config.num_layers),
    )


ARCHITECTURE = Architecture(
    build=build,
    from_gguf=from_gguf,
    from_hf=from_hf,
    hf_tensors=HF_TENSORS | HF_NORMS,
    hf_norm_offset=1.0,
    hf_defaults=HF_DEFAULTS
    | {
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
