"""Gemma 3 (Gemma Team 2025, arXiv 2503.19786): five windowed layers to a full one, each with its own rope."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models import rope
from pagoda.models.architecture import HF_TENSORS, QK_NORM, Architecture
from pagoda.models.config import ModelConfig, RopeConfig
from pagoda.models.gemma2 import HF_DEFAULTS, HF_NORMS, attention_scale, hf_changes, pattern
from pagoda.runtime.program import Program, ProgramBuilder
from pagoda.weights.settings import Settings


def build(config: ModelConfig) -> Program:
    """Norms before and after each part, QK-norm, GeGLU, and embeddings scaled by sqrt(width)."""
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
        q = g.rms_norm(q, f"{blk}.attn_q_norm.weight", head_dim=config.head_dim)
        k = g.rms_norm(k, f"{blk}.attn_k_norm.weight", head_dim=config.head_dim)
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


NUM_LAYERS_27B = 62
LOCAL_BASE = 10000.0


def from_gguf(settings: Settings, config: ModelConfig) -> ModelConfig:
    base = settings.positive("rope.freq_base_swa", LOCAL_BASE)
    windows = pattern(settings, config, 6)
    return replace(
        config,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=attention_scale(config, NUM_LAYERS_27B),
        final_softcap=settings.number("final_logit_softcapping") or None,
        windows=windows,
        ropes=ropes(config, rope.default(base, config.head_dim), windows),
    )


def from_hf(settings: Settings, config: ModelConfig) -> ModelConfig:
    config = hf_changes(settings, config, 6)
    base = settings.positive("rope_local_base_freq", LOCAL_BASE)
    both = settings.part("rope_parameters")
    local = None if both is None else both.part("sliding_attention")
    own = rope.from_hf(
        settings, local, head_dim=config.head_dim, max_position=config.max_position,
        length=config.max_position, base=base,
    )  # fmt: skip
    return replace(config, ropes=ropes(config, own, config.windows))


def ropes(config: ModelConfig, local: RopeConfig, windows: tuple[int | None, ...]) -> tuple[RopeConfig, ...]:
    return tuple(
        full if window is None else local for full, window in zip(config.ropes, windows, strict=True)
    )


HF_NAMES = HF_TENSORS | QK_NORM | HF_NORMS
IN_VISION_MODEL = {
    **{f"language_model.{name}": target for name, target in HF_NAMES.items()},
    **{name.replace("model.", "model.language_model.", 1): target for name, target in HF_NAMES.items()},
}

ARCHITECTURE = Architecture(
    build=build,
    from_gguf=from_gguf,
    from_hf=from_hf,
    hf_tensors=HF_NAMES | IN_VISION_MODEL,
    hf_ignored=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
    hf_norm_offset=1.0,
    hf_defaults=HF_DEFAULTS
    | {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
    },
)
