"""Answers of Hugging Face transformers for tests/models, computed in float32 on a CPU.

    python tests/golden/make_model_golden.py [--check] [NAME ...]

Writes tests/golden/models/NAME.npz, all of them without NAME; with --check compares them with what is there
and fails when they differ. Needs torch, transformers and gguf (extra `golden`) and the files of the real
models. Weights are mapped to transformers by hand, so these answers share no code with pagoda beyond the
shapes and seeds in tests/models/tiny_checkpoints.py.

A tiny model's file holds `token_ids` and `logits` [tokens, vocab]. A real model's file holds
`text_token_ids` and `text_nll` (english_text.txt; entry i is -log p of token i + 1), `prompt_<n>`, and
`greedy_ids` and `greedy_gaps` [prompts, new tokens] (how far the best logit led the second).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch
import transformers
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.models.tiny_checkpoints import TINY_MODELS, TinyModel, token_ids, weights  # noqa: E402
from tests.models.tiny_hf import TINY_HF, TinyHF, hf_token_ids, hf_weights  # noqa: E402

GOLDEN = Path(__file__).parent / "models"
NUM_TINY_TOKENS = 72
NUM_TEXT_TOKENS = 1500
NUM_GREEDY_TOKENS = 64

REAL_MODELS = {
    "smollm2-135m": "smollm2-135m-instruct-q4_1.gguf",
    "qwen2.5-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "gemma3-270m": "gemma-3-270m-q4_k_m.gguf",
}
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7, 8, 9,",
    "def fibonacci(n):\n",
    CHAT.format("What is the capital of France?"),
    CHAT.format("Write a Python function that says whether a number is prime."),
)
NUM_LONG_PROMPT_TOKENS = 400  # one more prompt: the start of the text

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
GEMMA_NAMES = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def transformers_name(name: str, kind: str) -> str:
    """`blk.3.attn_q.bias` -> `model.layers.3.self_attn.q_proj.bias`."""
    stem, suffix = name.rsplit(".", 1)
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.{suffix}"
    names = LAYER_NAMES | (GEMMA_NAMES if kind == "Gemma3" else {})
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{names[part]}.{suffix}"


def build_model(
    kind: str, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]
) -> transformers.PreTrainedModel:
    """A transformers model of class `kind` with these weights; every weight has to find its place."""
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config"))
    model = getattr(transformers, f"{kind}ForCausalLM")(
        config_class(**config, attn_implementation="eager", dtype="float32")
    )
    state = {transformers_name(name, kind): torch.from_numpy(np.array(a)) for name, a in tensors.items()}
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


def hf_golden(model: TinyHF) -> dict[str, NDArray[Any]]:
    """transformers loads the folder as it would any other; every weight has to find its place."""
    ids = hf_token_ids(model)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(model.config)))
        arrays = {name: torch.from_numpy(a) for name, a in hf_weights(model).items()}
        safetensors.torch.save_file(arrays, Path(folder) / "model.safetensors", {"format": "pt"})
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32", attn_implementation="eager", output_loading_info=True
        )
    wrong = {key: names for key, names in info.items() if names}
    assert not wrong, f"{model.name}: {wrong}"
    with torch.inference_mode():
        logits = loaded.eval()(torch.tensor([ids])).logits[0].numpy()
    return {"token_ids": np.asarray(ids, np.int32), "logits": logits}


def real_golden(file: str) -> dict[str, NDArray[Any]]:
    reader = gguf.GGUFReader(models_folder() / file)
    model = load_real_model(reader)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models_folder(), gguf_file=file)

    def encode(text: str) -> list[int]:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return [tokenizer.bos_token_id, *ids] if "gemma" in file else ids  # which answers nothing without

    text = encode((Path(__file__).parent / "english_text.txt").read_text())[:NUM_TEXT_TOKENS]
    assert len(text) == NUM_TEXT_TOKENS, "the text is too short for this tokenizer"
    prompts = [*map(encode, PROMPTS), text[:NUM_LONG_PROMPT_TOKENS]]
    answers = [greedy_answer(model, prompt) for prompt in prompts]
    arrays: dict[str, NDArray[Any]] = {
        "text_token_ids": np.asarray(text, np.int32),
        "text_nll": text_nll(model, text),
        "greedy_ids": np.asarray([ids for ids, _ in answers], np.int32),
        "greedy_gaps": np.asarray([gaps for _, gaps in answers], np.float32),
    }
    return arrays | {f"prompt_{i}": np.asarray(p, np.int32) for i, p in enumerate(prompts)}


def models_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PAGODA_TEST_MODELS") or cache / "pagoda-test-models")


def load_real_model(reader: gguf.GGUFReader) -> transformers.PreTrainedModel:
    """The dequantised weights of a llama, qwen2 or gemma3 file in transformers, float32."""
    architecture = reader.fields["general.architecture"].contents()

    def get(key: str) -> Any:
        return reader.fields[f"{architecture}.{key}"].contents()

    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    num_heads, num_kv_heads = get("attention.head_count"), get("attention.head_count_kv")
    if architecture == "llama":
        for name, array in tensors.items():
            if "attn_q" in name or "attn_k" in name:
                tensors[name] = undo_row_order(array, num_heads if "attn_q" in name else num_kv_heads)
    if architecture == "gemma3":
        for name, array in tensors.items():
            if name.endswith("norm.weight"):
                tensors[name] = array - 1  # transformers computes x * (1 + weight)
    vocab_size, hidden_size = tensors["token_embd.weight"].shape
    config = {
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": {"rope_type": "default", "rope_theta": get("rope.freq_base")},
    }
    if architecture == "gemma3":
        config |= {
            "head_dim": get("attention.key_length"),
            "query_pre_attn_scalar": get("attention.key_length"),
            "sliding_window": get("attention.sliding_window"),
            "sliding_window_pattern": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": get("rope.freq_base")},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        }
    return build_model(
        {"llama": "Llama", "qwen2": "Qwen2", "gemma3": "Gemma3"}[architecture], config, tensors
    )


def undo_row_order(array: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama's GGUF files interleave the two halves of each head's rows; put them one after the other."""
    return array.reshape(num_heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def text_nll(model: transformers.PreTrainedModel, ids: list[int]) -> NDArray[np.float32]:
    with torch.inference_mode():
        logits = model(torch.tensor([ids[:-1]])).logits[0]
        return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").numpy()


def greedy_answer(model: transformers.PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The most likely next tokens, and how far each led the second best."""
    ids: list[int] = []
    gaps: list[float] = []
    inputs, cache = prompt, None
    with torch.inference_mode():
        for _ in range(NUM_GREEDY_TOKENS):
            out = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            best, second = torch.topk(out.logits[0, -1], 2).values.tolist()
            ids.append(int(out.logits[0, -1].argmax()))
            gaps.append(best - second)
            inputs, cache = ids[-1:], out.past_key_values
    return ids, gaps


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
    parser.add_argument("names", nargs="*", metavar="NAME", default=[*TINY_MODELS, *TINY_HF, *REAL_MODELS])
    args = parser.parse_args()
    GOLDEN.mkdir(exist_ok=True)
    ok = True
    for name in args.names:
        if name in REAL_MODELS:
            golden = real_golden(REAL_MODELS[name])
        else:
            golden = hf_golden(TINY_HF[name]) if name in TINY_HF else tiny_golden(TINY_MODELS[name])
        ok &= write_or_check(name, golden, check=args.check)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
