"""A model described from its metadata alone, as an object for JSON and as rows for people."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagoda.errors import ModelFileError, UnsupportedError

if TYPE_CHECKING:
    from pagoda.models.config import ModelConfig
    from pagoda.weights.checkpoint import Checkpoint
    from pagoda.weights.tensor import TensorOutline

_SHAPE = (
    *("architecture", "num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim"),
    *("vocab_size", "max_position", "tied_embeddings"),
)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "max_new_tokens")


def describe_model(path: Path) -> dict[str, Any]:
    """Everything that `pagoda info` says of a model. No weight is read.

    Raises:
        ModelFileError: the files are damaged.
        UnsupportedError: not even a list of tensors can be read.
    """
    from pagoda.weights.checkpoint import load_checkpoint

    try:
        checkpoint = load_checkpoint(path)
    except UnsupportedError as error:
        return _describe_unsupported(path, error)
    with checkpoint:
        config = checkpoint.config
        return {
            "model": _title(checkpoint),
            "path": str(path),
            "format": "gguf" if checkpoint.folder is None else "safetensors",
            "supported": True,
            "weight_bytes": checkpoint.num_bytes,
            "shape": _shape(config),
            "kv_cache": _kv_cache(config),
            "tensors": _tensors(checkpoint.outlines),
            "tokenizer": _tokenizer(checkpoint),
            "chat_template": _chat_template(checkpoint),
            "honoured": list(_honoured(checkpoint)),
            "not_honoured": list(_not_honoured(checkpoint)),
        }


def _describe_unsupported(path: Path, error: UnsupportedError) -> dict[str, Any]:
    from pagoda.weights.gguf import read_gguf
    from pagoda.weights.hf_folder import read_hf_folder
    from pagoda.weights.safetensors import read_safetensors
    from pagoda.weights.tensor import outlines_of

    with read_safetensors(path) if path.is_dir() else read_gguf(path) as file:
        metadata = read_hf_folder(path).config if path.is_dir() else file.metadata
        name = metadata.get("model_type" if path.is_dir() else "general.architecture")
        return {
            "model": path.stem,
            "path": str(path),
            "format": "safetensors" if path.is_dir() else "gguf",
            "supported": False,
            "reason": error.message.removeprefix(f"{path}: "),
            "hint": error.hint,
            "weight_bytes": file.num_bytes,
            "shape": {"architecture": str(name)},
            "tensors": _tensors(outlines_of(file.tensors)),
        }


def _title(checkpoint: Checkpoint) -> str:
    name = checkpoint.metadata.get("general.name")
    return str(name) if name else checkpoint.path.stem if checkpoint.folder is None else checkpoint.path.name


def _shape(config: ModelConfig) -> dict[str, Any]:
    shape = {name: getattr(config, name) for name in _SHAPE}
    if config.experts is not None:
        shape["experts"] = asdict(config.experts)
    return shape


def _kv_cache(config: ModelConfig) -> dict[str, Any]:
    from pagoda.core.cost import CPU_KV_DTYPE

    spec = config.kv_cache_spec(dtype=CPU_KV_DTYPE)
    groups = [
        {"num_layers": len(g.layers), "window": g.window, "bytes_per_token": int(spec.bytes_per_token(i))}
        for i, g in enumerate(spec.groups)
    ]
    return {
        "dtype": spec.dtype,
        "block_size": spec.block_size,
        "bytes_per_token": sum(int(spec.bytes_per_token(i)) for i in range(len(spec.groups))),
        "groups": groups,
        "sequence_bytes": spec.sequence_bytes(config.max_position),
    }


def _tensors(outlines: Mapping[str, TensorOutline]) -> list[dict[str, Any]]:
    """Numbers and bytes by type, the largest first."""
    sizes: dict[str, list[int]] = {}
    for outline in outlines.values():
        sizes.setdefault(outline.type.name, []).append(outline.num_bytes)
    found = [{"type": name, "count": len(of), "bytes": sum(of)} for name, of in sizes.items()]
    return sorted(found, key=lambda entry: -entry["bytes"])


def _tokenizer(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Its kind and where it is; the vocabulary is not read, which may take a second."""
    if checkpoint.folder is None:
        words = [str(checkpoint.metadata.get(f"tokenizer.ggml.{key}") or "") for key in ("model", "pre")]
        return {"kind": " ".join(word for word in words if word)} if any(words) else None
    from pagoda.weights.hf_folder import TOKENIZER_FILE

    try:
        raw = checkpoint.folder.read_tokenizer()
    except ModelFileError:
        return None
    found = re.search(rb'"model"\s*:\s*\{\s*"type"\s*:\s*"(\w+)"', raw)
    kind = found[1].decode() if found else "BPE"
    return {"kind": kind, "file": TOKENIZER_FILE, "bytes": len(raw)}


def _chat_template(checkpoint: Checkpoint) -> dict[str, Any] | None:
    from pagoda.engine.chat_template import ChatTemplate
    from pagoda.engine.template_features import template_features

    if checkpoint.folder is None:
        sources: Mapping[str, Any] = {
            key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": value
            for key, value in checkpoint.metadata.items()
            if key.startswith("tokenizer.chat_template") and isinstance(value, str)
        }
    else:
        sources = checkpoint.folder.chat_templates
    source = sources.get("default") or next(iter(sources.values()), None)
    if not source:
        return None
    described: dict[str, Any] = {"characters": len(source), "names": list(sources)}
    try:
        template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    except ModelFileError as error:
        return described | {"problem": error.message}
    features = asdict(template_features(template))
    if features["tools"] == "ignored" and "tool_use" in sources:
        features["tools"] = "shown"
    return described | features


def _honoured(checkpoint: Checkpoint) -> Iterator[str]:
    config = checkpoint.config
    for window in dict.fromkeys(w for w in config.windows if w is not None):
        num_layers = config.windows.count(window)
        yield f"sliding window of {window} tokens in {num_layers} of {config.num_layers} layers"
    if scaling := _rope_scaling(checkpoint):
        yield f"rope scaling {scaling}"
    for name, cap in (("attention scores", config.attention_softcap), ("logits", config.final_softcap)):
        if cap is not None:
            yield f"soft cap of {cap:g} on {name}"
    if config.experts is not None:
        yield f"{config.experts.num_active} of {config.experts.num_experts} experts a token"
    if checkpoint.folder is not None:
        quantization = checkpoint.folder.config.get("quantization_config")
        if isinstance(quantization, Mapping):
            yield f"weights packed by {quantization.get('quant_method')}, run as Q4_1"
        if ends := checkpoint.folder.end_token_ids():
            yield f"end tokens {', '.join(map(str, sorted(ends)))}, and those known by name"
    widened = {o.type.name for o in checkpoint.outlines.values()} & {"IQ4_NL", "IQ4_XS", "MXFP4"}
    if widened:
        yield f"{', '.join(sorted(widened))} held in 8 bits: exact, twice the memory"


def _rope_scaling(checkpoint: Checkpoint) -> str | None:
    if checkpoint.folder is None:
        kind = checkpoint.metadata.get(f"{checkpoint.config.architecture}.rope.scaling.type")
        return str(kind) if kind not in (None, "none") else None
    for key in ("rope_scaling", "rope_parameters"):
        parameters = checkpoint.folder.config.get(key)
        if isinstance(parameters, Mapping):
            kind = parameters.get("rope_type", parameters.get("type"))
            return str(kind) if kind not in (None, "default") else None
    return None


def _not_honoured(checkpoint: Checkpoint) -> Iterator[str]:
    from pagoda.models import build_program
    from pagoda.weights.checkpoint import require_all_read

    try:
        require_all_read(checkpoint, build_program(checkpoint.config))
    except ModelFileError as error:
        yield error.message
    if checkpoint.folder is not None:
        generation = checkpoint.folder.generation_config
        if chosen := [f"{key} {generation[key]!r}" for key in _SAMPLING if key in generation]:
            yield f"sampling of generation_config.json ({', '.join(chosen)}): requests choose their own"
        if "vision_config" in checkpoint.folder.config:
            yield "pictures: only the language model is read"


def model_rows(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The description as lines of a label and a text."""
    from pagoda.cli.info import format_memory

    yield "model", model["model"]
    yield "file", f"{model['path']} ({format_memory(model['weight_bytes'])} of weights)"
    if not model["supported"]:
        yield "architecture", model["shape"]["architecture"]
        yield "not supported", model["reason"]
    else:
        yield from _shape_rows(model["shape"])
        yield from _kv_rows(model["kv_cache"], model["shape"]["max_position"])
    for entry in model["tensors"]:
        yield f"tensors {entry['type']}", f"{entry['count']}, {format_memory(entry['bytes'])}"
    if model["supported"]:
        yield from _text_rows(model)
        for text in model["honoured"]:
            yield "honoured", text
        for text in model["not_honoured"]:
            yield "not honoured", text


def _shape_rows(shape: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    num_heads, num_kv_heads = shape["num_heads"], shape["num_kv_heads"]
    yield "architecture", shape["architecture"]
    sizes = f"hidden size {shape['hidden_size']}, feed-forward {shape['ffn_size']}"
    yield "layers", f"{shape['num_layers']}, {sizes}"
    kind = {num_heads: "MHA", 1: "MQA"}.get(num_kv_heads, "GQA")
    yield "heads", f"{num_heads} query, {num_kv_heads} key-value ({kind}), head dim {shape['head_dim']}"
    tied = "tied to the output head" if shape["tied_embeddings"] else "separate output head"
    yield "vocabulary", f"{shape['vocab_size']} tokens, embeddings {tied}"
    yield "context", f"{shape['max_position']} tokens"


def _kv_rows(kv_cache: Mapping[str, Any], max_position: int) -> Iterator[tuple[str, str]]:
    from pagoda.cli.info import format_memory

    for index, group in enumerate(kv_cache["groups"]):
        window = group["window"]
        span = "all tokens" if window is None else f"the latest {window} tokens"
        per_token = format_memory(group["bytes_per_token"])
        yield f"KV group {index}", f"{group['num_layers']} layers attend to {span}: {per_token} a token"
    yield "KV a token", format_memory(kv_cache["bytes_per_token"])
    sequence = format_memory(kv_cache["sequence_bytes"])
    blocks = f"{kv_cache['dtype']}, blocks of {kv_cache['block_size']}"
    yield "KV of a sequence", f"{sequence} at {max_position} tokens ({blocks})"


def _text_rows(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tokenizer, template = model["tokenizer"], model["chat_template"]
    yield "tokenizer", "none" if tokenizer is None else tokenizer["kind"]
    if template is None:
        yield "chat template", "none: a base model, which continues text"
    elif "system" not in template:
        yield "chat template", template["problem"]
    else:
        features = ", ".join(f"{name} {template[name]}" for name in ("system", "tools", "thinking"))
        yield "chat template", f"{template['characters']} characters: {features}"
        if template["problem"] is not None:
            yield "chat template", f"refuses a plain question: {template['problem']}"
