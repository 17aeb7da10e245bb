"""Phi-3 and Phi-4-mini (Abdin et al. 2024, arXiv 2404.14219): fused projections, partial rotary."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.architecture import HF_TENSORS, Architecture
from pagoda.models.config import ModelConfig
from pagoda.models.llama import build
from pagoda.models.windows import all_layers
from pagoda.weights.settings import Settings


def with_window(settings: Settings, config: ModelConfig, key: str) -> ModelConfig:
    return replace(config, windows=all_layers(settings, key, config))


QKV = ("blk.{i}.attn_q", "blk.{i}.attn_k", "blk.{i}.attn_v")
GATE_UP = ("blk.{i}.ffn_gate", "blk.{i}.ffn_up")

ARCHITECTURE = Architecture(
    build=build,
    from_gguf=lambda settings, config: with_window(settings, config, "attention.sliding_window"),
    from_hf=lambda settings, config: with_window(settings, config, "sliding_window"),
    gguf_tensors={"blk.{i}.attn_qkv": QKV, "blk.{i}.ffn_up": GATE_UP},
    hf_tensors=HF_TENSORS
    | {
        "model.layers.{i}.self_attn.qkv_proj": QKV,
        "model.layers.{i}.mlp.gate_up_proj": GATE_UP,
    },
)
