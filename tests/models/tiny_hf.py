"""Tiny random models as folders of Hugging Face hold them: config.json, and weights from a seed.

`tests/golden/make_model_golden.py` writes such a folder, lets transformers load it, and keeps the logits;
tests read the same dictionaries. Shapes and names are written down here, not taken from what is tested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.models.tiny_checkpoints import uniform

Shapes = dict[str, tuple[int, ...]]
HIDDEN, FFN, VOCAB, NUM_TOKENS = 64, 96, 61, 72


@dataclass(frozen=True, kw_only=True)
class TinyHF:
    """`config` is config.json; `layer` shapes the tensors of a layer by what follows `model.layers.<i>.`."""

    name: str
    config: Mapping[str, Any]
    layer: Shapes
    num_tokens: int = NUM_TOKENS  # of the golden logits; the longest sequence too

    @property
    def num_layers(self) -> int:
        return int(self.config.get("num_hidden_layers") or self.config["n_layer"])


def config(model_type: str, **changes: Any) -> dict[str, Any]:
    shared = {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return shared | changes


def attention(heads: int = 4, kv_heads: int = 2, head_dim: int = 16, **norms: int) -> Shapes:
    """Projections, and `norms` by the width that each has."""
    return {
        "self_attn.q_proj.weight": (heads * head_dim, HIDDEN),
        "self_attn.k_proj.weight": (kv_heads * head_dim, HIDDEN),
        "self_attn.v_proj.weight": (kv_heads * head_dim, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, heads * head_dim),
        **{f"self_attn.{name}.weight": (width,) for name, width in norms.items()},
    }


def norms(*names: str) -> Shapes:
    return {f"{name}.weight": (HIDDEN,) for name in names}


PRE_NORMS = norms("input_layernorm", "post_attention_layernorm")
POST_NORMS = norms("post_attention_layernorm", "post_feedforward_layernorm")
GEMMA_NORMS = PRE_NORMS | norms("pre_feedforward_layernorm", "post_feedforward_layernorm")
MLP: Shapes = {
    "mlp.gate_proj.weight": (FFN, HIDDEN),
    "mlp.up_proj.weight": (FFN, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, FFN),
}
LLAMA = PRE_NORMS | attention() | MLP
QKV_BIAS: Shapes = {
    "self_attn.q_proj.bias": (64,),
    "self_attn.k_proj.bias": (32,),
    "self_attn.v_proj.bias": (32,),
}
GPT2: Shapes = {
    "ln_1.weight": (HIDDEN,),
    "ln_1.bias": (HIDDEN,),
    "attn.c_attn.weight": (HIDDEN, 3 * HIDDEN),
    "attn.c_attn.bias": (3 * HIDDEN,),
    "attn.c_proj.weight": (HIDDEN, HIDDEN),
    "attn.c_proj.bias": (HIDDEN,),
    "ln_2.weight": (HIDDEN,),
    "ln_2.bias": (HIDDEN,),
    "mlp.c_fc.weight": (HIDDEN, FFN),
    "mlp.c_fc.bias": (FFN,),
    "mlp.c_proj.weight": (FFN, HIDDEN),
    "mlp.c_proj.bias": (HIDDEN,),
}


def experts(num_experts: int, ffn: int, prefix: str, gate: str, up: str, down: str) -> Shapes:
    shapes: Shapes = {f"{prefix}.gate.weight": (num_experts, HIDDEN)}
    for e in range(num_experts):
        shapes |= {
            f"{prefix}.experts.{e}.{gate}.weight": (ffn, HIDDEN),
            f"{prefix}.experts.{e}.{up}.weight": (ffn, HIDDEN),
            f"{prefix}.experts.{e}.{down}.weight": (HIDDEN, ffn),
        }
    return shapes


PHI3_CONFIG = config(
    "phi3",
    partial_rotary_factor=0.75,
    original_max_position_embeddings=32,
    rope_scaling={
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
    },
)
PHI3 = PRE_NORMS | {
    "self_attn.qkv_proj.weight": (128, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, 64),
    "mlp.gate_up_proj.weight": (2 * FFN, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, FFN),
}


def llama_with_rope(name: str, max_position: int = 256, **scaling: Any) -> TinyHF:
    changed = config("llama", rope_scaling=scaling, max_position_embeddings=max_position)
    return TinyHF(name=name, config=changed, layer=LLAMA)


TINY_HF = {
    model.name: model
    for model in (
        TinyHF(
            name="hf-gemma3",
            config=config(
                "gemma3_text", num_hidden_layers=4, num_key_value_heads=1, head_dim=24, sliding_window=20,
                sliding_window_pattern=3, query_pre_attn_scalar=20, rope_theta=100000.0,
                rope_local_base_freq=5000.0, rope_scaling={"rope_type": "linear", "factor": 4.0},
                tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh",
            ),
            layer=GEMMA_NORMS | attention(4, 1, 24, q_norm=24, k_norm=24) | MLP,
        ),
        TinyHF(
            name="hf-gemma2",
            config=config(
                "gemma2", num_hidden_layers=3, head_dim=24, sliding_window=20, query_pre_attn_scalar=10,
                attn_logit_softcapping=5.0, final_logit_softcapping=3.0, tie_word_embeddings=True,
                hidden_activation="gelu_pytorch_tanh",
            ),
            layer=GEMMA_NORMS | attention(4, 2, 24) | MLP,
        ),
        TinyHF(
            name="hf-qwen3",
            config=config("qwen3", head_dim=24),
            layer=PRE_NORMS | attention(4, 2, 24, q_norm=24, k_norm=24) | MLP,
        ),
        TinyHF(
            name="hf-qwen2-window",
            config=config(
                "qwen2", num_hidden_layers=3, sliding_window=20, use_sliding_window=True, max_window_layers=1
            ),
            layer=LLAMA | QKV_BIAS,
        ),
        TinyHF(
            name="hf-qwen3moe",
            config=config(
                "qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
                norm_topk_prob=True,
            ),
            layer=PRE_NORMS
            | attention(q_norm=16, k_norm=16)
            | experts(6, 32, "mlp", "gate_proj", "up_proj", "down_proj"),
        ),
        TinyHF(
            name="hf-qwen3moe-all",
            config=config(
                "qwen3_moe", num_experts=5, num_experts_per_tok=3, moe_intermediate_size=32,
                norm_topk_prob=False,
            ),
            layer=PRE_NORMS
            | attention(q_norm=16, k_norm=16)
            | experts(5, 32, "mlp", "gate_proj", "up_proj", "down_proj"),
        ),
        TinyHF(
            name="hf-mixtral",
            config=config("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=20),
            layer=PRE_NORMS | attention() | experts(4, FFN, "block_sparse_moe", "w1", "w3", "w2"),
        ),
        TinyHF(name="hf-mistral", config=config("mistral", sliding_window=20), layer=LLAMA),
        TinyHF(name="hf-phi3", config=PHI3_CONFIG, layer=PHI3),
        TinyHF(name="hf-phi3-short", config=PHI3_CONFIG, layer=PHI3, num_tokens=32),
        TinyHF(
            name="hf-phi3-window",
            config=config("phi3", sliding_window=20, tie_word_embeddings=True),
            layer=PHI3,
        ),
        TinyHF(
            name="hf-granite",
            config=config(
                "granite", embedding_multiplier=3.0, residual_multiplier=0.3, attention_multiplier=0.4,
                logits_scaling=2.0,
            ),
            layer=LLAMA,
        ),
        TinyHF(
            name="hf-olmo2",
            config=config("olmo2"),
            layer=POST_NORMS | attention(q_norm=64, k_norm=32) | MLP,
        ),
        TinyHF(
            name="hf-gpt2",
            config={
                "model_type": "gpt2", "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_inner": FFN,
                "n_positions": 80, "vocab_size": VOCAB, "layer_norm_epsilon": 1e-5,
                "activation_function": "gelu_new", "bos_token_id": 1, "eos_token_id": 2,
            },
            layer=GPT2,
        ),
        llama_with_rope("hf-rope-linear", rope_type="linear", factor=4.0),
        llama_with_rope("hf-rope-dynamic", 32, rope_type="dynamic", factor=2.0),
        llama_with_rope("hf-rope-yarn", 32, rope_type="yarn", factor=4.0),
        llama_with_rope(
            "hf-rope-llama3", rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    )
}  # fmt: skip


def shapes(model: TinyHF) -> Shapes:
    if model.config["model_type"] == "gpt2":
        layer, others = "transformer.h", {
            "transformer.wte.weight": (VOCAB, HIDDEN),
            "transformer.wpe.weight": (int(model.config["n_positions"]), HIDDEN),
            "transformer.ln_f.weight": (HIDDEN,),
            "transformer.ln_f.bias": (HIDDEN,),
        }  # fmt: skip
    else:
        layer, others = "model.layers", {
            "model.embed_tokens.weight": (VOCAB, HIDDEN),
            "model.norm.weight": (HIDDEN,),
        }  # fmt: skip
        if not model.config["tie_word_embeddings"]:
            others["lm_head.weight"] = (VOCAB, HIDDEN)
    layers = {f"{layer}.{i}.{name}": s for i in range(model.num_layers) for name, s in model.layer.items()}
    return others | layers


def hf_weights(model: TinyHF) -> dict[str, NDArray[np.float32]]:
    """Every tensor by its name in the folder, float32."""
    return {name: _tensor(model, name, shape) for name, shape in shapes(model).items()}


def _tensor(model: TinyHF, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values = uniform(f"{model.config['model_type']}/{name}", shape)
    if name.endswith(".bias"):
        return np.float32(0.5) * values
    if len(shape) == 1:  # norms; Gemma's are around 0
        return np.float32(0.3) * values + np.float32("gemma" not in model.name)
    if "embed_tokens" in name or "wte" in name or "wpe" in name:
        # Gemma multiplies them by 8, which would drown what the layers add.
        return values * np.float32(0.25 if "gemma" in model.name else 1.0)
    # q and k are large enough for attention to be far from flat, and routers for experts to differ.
    strong = ("q_proj", "k_proj", "qkv_proj", "c_attn", ".gate.")
    gain = 3.0 if any(part in name for part in strong) else 1.5
    return np.float32(gain / math.sqrt(HIDDEN)) * values


def hf_token_ids(model: TinyHF) -> list[int]:
    values = (uniform(f"{model.name}/tokens", (model.num_tokens,)) + 1) / 2
    return [int(v * VOCAB) for v in values]
