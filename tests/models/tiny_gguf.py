"""The tiny models of `tiny_hf.py` as a converter writes them to GGUF: its names, keys and orders of rows."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagoda.weights.tensor import TensorType
from tests.gguf_files import encode, interleave_rows, write_gguf
from tests.models.tiny_hf import TinyHF, hf_weights

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
}
NAMES = {
    "embed_tokens": "token_embd",
    "wte": "token_embd",
    "wpe": "position_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "ln_f": "output_norm",
    "input_layernorm": "attn_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "qkv_proj": "attn_qkv",
    "c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "gate_up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "w1": "ffn_gate",
    "w3": "ffn_up",
    "w2": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}


def architecture_of(model: TinyHF) -> str:
    model_type = str(model.config["model_type"])
    return ARCHITECTURES.get(model_type, model_type)


def gguf_name(name: str, architecture: str) -> str:
    stem, kind = name.rsplit(".", 1)
    layer = re.search(r"\.(\d+)\.", stem)
    keys = [key for key in NAMES if stem.endswith(f".{key}") or stem == key]
    part = NAMES[max(keys, key=len)] if keys else ""
    if stem.endswith("post_attention_layernorm"):
        part = "post_attention_norm" if architecture in ("gemma2", "gemma3", "olmo2") else "ffn_norm"
    return f"blk.{layer.group(1)}.{part}.{kind}" if layer else f"{part}.{kind}"


def gguf_tensors_of(model: TinyHF) -> dict[str, NDArray[np.float32]]:
    architecture = architecture_of(model)
    tensors: dict[str, NDArray[np.float32]] = {}
    experts: dict[str, list[NDArray[np.float32]]] = {}
    for name, array in hf_weights(model).items():
        new = gguf_name(name, architecture)
        if ".c_" in name and array.ndim == 2:
            array = array.T
        if "gemma" in architecture and new.endswith("norm.weight"):
            array = array + np.float32(1)
        if architecture in ("llama", "granite"):
            for stem, key in (("attn_q.", "num_attention_heads"), ("attn_k.", "num_key_value_heads")):
                if stem in new:
                    array = interleave_rows(array, int(model.config[key]))
        if ".experts." in name:
            experts.setdefault(new.replace(".weight", "_exps.weight"), []).append(array)
        else:
            tensors[new] = np.ascontiguousarray(array)
    tensors |= {name: np.stack(arrays) for name, arrays in experts.items()}
    return tensors | rope_tensors(model)


def rope_tensors(model: TinyHF) -> dict[str, NDArray[np.float32]]:
    scaling = model.config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "longrope":
        return {
            f"rope_factors_{length}.weight": np.asarray(scaling[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    if kind != "llama3":
        return {}
    wavelengths = 2 * math.pi * 10000.0 ** (np.arange(8) / 8)
    turns = scaling["original_max_position_embeddings"] / wavelengths
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return {"rope_freqs.weight": (1 / ((1 - ramp) / scaling["factor"] + ramp)).astype(np.float32)}


def gguf_metadata_of(model: TinyHF) -> dict[str, object]:
    c = model.config
    if c["model_type"] == "gpt2":
        keys: dict[str, object] = {
            "context_length": c["n_positions"],
            "embedding_length": c["n_embd"],
            "block_count": c["n_layer"],
            "feed_forward_length": c["n_inner"],
            "attention.head_count": c["n_head"],
            "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
        }
    else:
        keys = {
            "context_length": c["max_position_embeddings"],
            "embedding_length": c["hidden_size"],
            "block_count": c["num_hidden_layers"],
            "feed_forward_length": c["intermediate_size"],
            "attention.head_count": c["num_attention_heads"],
            "attention.head_count_kv": c["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
            "attention.key_length": c["head_dim"],
            "attention.value_length": c["head_dim"],
            "rope.freq_base": c["rope_theta"],
            "rope.dimension_count": int(c["head_dim"] * c.get("partial_rotary_factor", 1)),
        }
    keys |= own_keys(model) | scaling_keys(model)
    architecture = architecture_of(model)
    return {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in keys.items()}


def own_keys(model: TinyHF) -> dict[str, object]:
    """Keys of single architectures, by the keys of config.json that they come from."""
    names = {
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope_local_base_freq": "rope.freq_base_swa",
        "sliding_window_pattern": "attention.sliding_window_pattern",
        "num_local_experts": "expert_count",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "norm_topk_prob": "expert_weights_norm",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {names[key]: value for key, value in model.config.items() if key in names}


def scaling_keys(model: TinyHF) -> dict[str, object]:
    c = model.config
    scaling = c.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "longrope":
        trained = c["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(c["max_position_embeddings"] / trained) / math.log(trained))
        return {"rope.scaling.original_context_length": trained, "rope.scaling.attn_factor": factor}
    if kind == "yarn":
        trained = c["max_position_embeddings"]
        return {
            "context_length": int(trained * scaling["factor"]),
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": trained,
        }
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": scaling["factor"]}
    return {}


# What GGUF has no key for: scales of queries, rope that depends on the length, Qwen2's windows.
NOT_IN_GGUF = ("hf-gemma2", "hf-gemma3", "hf-rope-dynamic", "hf-qwen2-window")


def write_tiny_gguf(folder: Path, model: TinyHF, tensor_type: TensorType = TensorType.F32) -> Path:
    """Matrices, stacked ones too, in `tensor_type`; vectors and routers in floats, as converters do."""
    tensors = {
        name: encode(name, tensor_type if a.ndim > 1 and "gate_inp" not in name else TensorType.F32, a)
        for name, a in gguf_tensors_of(model).items()
    }
    return write_gguf(folder / f"{model.name}.gguf", gguf_metadata_of(model), tensors)
