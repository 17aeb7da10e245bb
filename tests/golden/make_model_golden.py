"""Answers of Hugging Face transformers for tests/models, computed in float32 on a CPU.

    python tests/golden/make_model_golden.py [--check] [--real] [--models DIR]

Writes tests/golden/models/*.npz; with --check compares them with what is there and fails when they differ.
Needs torch, transformers and gguf (extra `golden`). Weights are mapped to transformers by hand, so these
answers share no code with pagoda beyond the shapes and seeds in tests/models/tiny_checkpoints.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.models.tiny_checkpoints import TINY_MODELS, TinyModel, token_ids, weights  # noqa: E402

GOLDEN = Path(__file__).parent / "models"
NUM_TINY_TOKENS = 72

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def transformers_name(name: str) -> str:
    """`blk.3.attn_q.bias` -> `model.layers.3.self_attn.q_proj.bias`."""
    stem, kind = name.rsplit(".", 1)
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def build_model(
    kind: str, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]
) -> transformers.PreTrainedModel:
    """A transformers model of class `kind` with these weights; every weight has to find its place."""
    config_class = getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(
        config_class(**config, attn_implementation="eager", dtype="float32")
    )
    state = {transformers_name(name): torch.from_numpy(np.array(a)) for name, a in tensors.items()}
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.float().eval()


def tiny_golden(model: TinyModel) -> dict[str, NDArray[Any]]:
    config = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": model.tied_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta, **model.rope_scaling},
    }
    kind = {"llama": "Llama", "qwen2": "Qwen2"}[model.architecture]
    if model.window is not None:  # Mistral is Llama with a window
        kind, config["sliding_window"] = "Mistral", model.window
    reference = build_model(kind, config, weights(model))
    ids = token_ids(model, NUM_TINY_TOKENS)
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0].numpy()
    return {"token_ids": np.asarray(ids, np.int32), "logits": logits}


def write_or_check(name: str, arrays: Mapping[str, NDArray[Any]], *, check: bool) -> bool:
    """Write `name`.npz, or say whether it already holds these arrays (integers exactly, floats to 2e-4)."""
    path = GOLDEN / f"{name}.npz"
    if not check:
        np.savez_compressed(path, **arrays)
        print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size} bytes")
        return True
    with np.load(path) as stored:
        same = sorted(stored.files) == sorted(arrays) and all(
            stored[k].shape == a.shape
            and np.allclose(stored[k], a, rtol=0, atol=2e-4 if a.dtype.kind == "f" else 0)
            for k, a in arrays.items()
        )
    print(f"{'same' if same else 'DIFFERENT'}: {path.relative_to(ROOT)}")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the stored files instead of writing"
    )
    args = parser.parse_args()
    GOLDEN.mkdir(exist_ok=True)
    ok = True
    for name, model in TINY_MODELS.items():
        ok &= write_or_check(name, tiny_golden(model), check=args.check)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
