"""Tiny random models whose weights anyone can make again from a seed, with numpy alone.

`tests/golden/make_model_golden.py` gives them to transformers and keeps the logits; tests give the same
weights to a backend. Rows of q and k are in transformers' order (dimension i pairs with i + head_dim / 2),
which is the order of `WeightSource`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagoda.models.config import ModelConfig, RopeConfig
from pagoda.weights.tensor import Tensor, TensorType


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """Shape of one tiny model; `rope_scaling` is transformers' dictionary of that name."""

    name: str
    architecture: str = "llama"
    hidden_size: int = 64
    ffn_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 61
    max_position: int = 256
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    window: int | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

TINY_MODELS = {
    model.name: model
    for model in (
        TinyModel(name="llama-gqa", tied_embeddings=True),
        TinyModel(name="llama-mha", num_kv_heads=4, head_dim=24),
        TinyModel(name="llama-mqa", num_heads=3, num_kv_heads=1, hidden_size=96, head_dim=40),
        TinyModel(name="llama3-rope", rope_scaling=LLAMA3_SCALING),
        TinyModel(name="llama-window", window=20),
        TinyModel(name="qwen2", architecture="qwen2", qkv_bias=True, tied_embeddings=True),
        TinyModel(name="qwen2-untied", architecture="qwen2", qkv_bias=True, num_heads=6, num_kv_heads=3),
    )
}


def model_config(model: TinyModel) -> ModelConfig:
    rope = RopeConfig(inv_freq=inv_freq(model))
    return ModelConfig(
        architecture=model.architecture,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_size=model.ffn_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        max_position=model.max_position,
        norm_eps=1e-5,
        ropes=(rope,) * model.num_layers,
        windows=(model.window,) * model.num_layers,
        tied_embeddings=model.tied_embeddings,
        attention_scale=model.head_dim**-0.5,
    )


def inv_freq(model: TinyModel) -> tuple[float, ...]:
    """theta^(-2i / head_dim), divided by `rope_factors`."""
    exponents = np.arange(0, model.head_dim, 2, dtype=np.float64) / model.head_dim
    return tuple((model.rope_theta**-exponents / rope_factors(model)).tolist())


def rope_factors(model: TinyModel) -> NDArray[np.float64]:
    """Llama 3's rule: long wavelengths slow down by `factor`, short ones stay, a ramp lies between."""
    num_pairs = model.head_dim // 2
    if not model.rope_scaling:
        return np.ones(num_pairs)
    s = model.rope_scaling
    wavelengths = 2 * math.pi * model.rope_theta ** (np.arange(num_pairs) / num_pairs)
    turns = s["original_max_position_embeddings"] / wavelengths
    ramp = np.clip((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"]), 0.0, 1.0)
    return np.asarray(1.0 / ((1 - ramp) / s["factor"] + ramp))


def weights(model: TinyModel) -> dict[str, NDArray[np.float32]]:
    """Every tensor of the model by its GGUF name, float32."""
    q_width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, ffn, vocab = model.hidden_size, model.ffn_size, model.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden)}
    for i in range(model.num_layers):
        blk = f"blk.{i}"
        shapes |= {
            f"{blk}.attn_norm.weight": (hidden,),
            f"{blk}.attn_q.weight": (q_width, hidden),
            f"{blk}.attn_k.weight": (kv_width, hidden),
            f"{blk}.attn_v.weight": (kv_width, hidden),
            f"{blk}.attn_output.weight": (hidden, q_width),
            f"{blk}.ffn_norm.weight": (hidden,),
            f"{blk}.ffn_gate.weight": (ffn, hidden),
            f"{blk}.ffn_up.weight": (ffn, hidden),
            f"{blk}.ffn_down.weight": (hidden, ffn),
        }
        if model.qkv_bias:
            shapes |= {
                f"{blk}.attn_q.bias": (q_width,),
                f"{blk}.attn_k.bias": (kv_width,),
                f"{blk}.attn_v.bias": (kv_width,),
            }
    shapes["output_norm.weight"] = (hidden,)
    if not model.tied_embeddings:
        shapes["output.weight"] = (vocab, hidden)
    return {name: _tensor(model.name, name, shape) for name, shape in shapes.items()}


def _tensor(model_name: str, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if name.endswith("norm.weight"):
        return 1 + 0.3 * uniform(f"{model_name}/{name}", shape)
    if name.endswith(".bias"):
        return 2 * uniform(f"{model_name}/{name}", shape)
    if name == "token_embd.weight":
        return uniform(f"{model_name}/{name}", shape)
    # q and k are large enough for attention to be far from flat.
    gain = 3.0 if "attn_q" in name or "attn_k" in name else 1.5
    return np.float32(gain / math.sqrt(shape[1])) * uniform(f"{model_name}/{name}", shape)


def uniform(key: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Uniform in [-1, 1). Raw Philox output is one stream in every numpy; distributions may change."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    raw = np.random.Philox(key=seed).random_raw(math.prod(shape))
    high_bits = (raw >> np.uint64(40)).astype(np.float32)
    return (high_bits / np.float32(1 << 23) - np.float32(1)).reshape(shape)


def token_ids(model: TinyModel, num_tokens: int) -> list[int]:
    """The tokens that the golden logits are for."""
    values = (uniform(f"{model.name}/tokens", (num_tokens,)) + 1) / 2
    return [int(v * model.vocab_size) for v in values]


@dataclass(frozen=True)
class ArrayWeights:
    """A `WeightSource` over float32 arrays in memory."""

    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[np.float32]]) -> ArrayWeights:
        return cls(
            {
                name: Tensor(
                    name, TensorType.F32, a.shape, np.ascontiguousarray(a).view(np.uint8).reshape(-1)
                )
                for name, a in arrays.items()
            }
        )

    def release(self, name: str) -> None:
        """Arrays stay where they are."""
