"""`pagoda info`: what this machine offers, or what a model file holds."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pagoda.cli import terminal
from pagoda.cli.arguments import MODEL_HELP

if TYPE_CHECKING:
    from pagoda.core.cost import CPU_KV_DTYPE, KVCacheSpec
    from pagoda.models.config import ModelConfig
    from pagoda.weights.checkpoint import Checkpoint

NAME = "info"
DESCRIPTION = """Print what pagoda sees of this machine, or of a model from its metadata alone."""
EXAMPLES = """\
  pagoda info
  pagoda info smollm2-135m
  pagoda info ./model.gguf"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)


def execute(arguments: argparse.Namespace) -> int:
    for label, value in _machine_rows() if arguments.model is None else _model_rows(arguments.model):
        print(f"{label:<18}{terminal.printable(value)}")
    return 0


def _machine_rows() -> Iterator[tuple[str, str]]:
    import platform

    from pagoda import __version__, machine
    from pagoda.weights.cache import cache_folder

    quota = machine.cpu_quota()
    seen = f"{len(machine.affinity())} by affinity, {machine.num_physical_cores()} physical"
    yield "pagoda", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "instruction set", instruction_set()
    yield (
        "cores",
        f"{machine.num_usable_cores()} used: {seen}, quota {'none' if quota is None else f'{quota:g}'}",
    )
    yield "memory limit", format_memory(machine.memory_limit_bytes())
    yield "memory available", format_memory(machine.memory_available_bytes())
    yield "cache folder", str(cache_folder())


def instruction_set() -> str:
    try:
        native = importlib.import_module("pagoda._native")
    except ImportError as error:
        return f"none, the native module is not built: {error}"
    usable = list(native.isas())
    forced = os.environ.get("PAGODA_ISA")
    if forced and forced not in usable:
        return f"PAGODA_ISA={forced} is not usable here; usable: {', '.join(usable)}"
    return f"{forced or usable[0]} (usable: {', '.join(usable)})"


def _model_rows(name: str) -> Iterator[tuple[str, str]]:
    from pagoda.weights.catalog import resolve_model
    from pagoda.weights.checkpoint import load_checkpoint

    path = resolve_model(name, progress=True)
    with load_checkpoint(path) as checkpoint:
        title = checkpoint.metadata.get("general.name")
        yield "model", str(title or path.stem)
        yield "file", f"{path} ({format_memory(checkpoint.num_bytes)} of weights)"
        yield from _shape_rows(checkpoint.config)
        spec = checkpoint.config.kv_cache_spec(dtype=CPU_KV_DTYPE)
        yield from _kv_rows(spec, checkpoint.config.max_position)
        yield from _tensor_rows(checkpoint)
        yield from _text_rows(checkpoint.metadata)


def _shape_rows(config: ModelConfig) -> Iterator[tuple[str, str]]:
    yield "architecture", config.architecture
    yield "layers", f"{config.num_layers}, hidden size {config.hidden_size}, feed-forward {config.ffn_size}"
    kind = {config.num_heads: "MHA", 1: "MQA"}.get(config.num_kv_heads, "GQA")
    heads = f"{config.num_heads} query, {config.num_kv_heads} key-value ({kind}), head dim {config.head_dim}"
    yield "heads", heads
    tied = "tied to the output head" if config.tied_embeddings else "separate output head"
    yield "vocabulary", f"{config.vocab_size} tokens, embeddings {tied}"
    yield "context", f"{config.max_position} tokens"


def _kv_rows(spec: KVCacheSpec, max_position: int) -> Iterator[tuple[str, str]]:
    for index, group in enumerate(spec.groups):
        span = "all tokens" if group.window is None else f"the latest {group.window} tokens"
        per_token = format_memory(spec.bytes_per_token(index))
        yield f"KV group {index}", f"{len(group.layers)} layers attend to {span}: {per_token} a token"
    sequence = format_memory(spec.sequence_bytes(max_position))
    yield (
        "KV of a sequence",
        f"{sequence} at {max_position} tokens ({spec.dtype}, blocks of {spec.block_size})",
    )


def _tensor_rows(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    sizes: dict[str, list[int]] = {}
    for tensor in checkpoint.outlines.values():
        sizes.setdefault(tensor.type.name, []).append(tensor.num_bytes)
    for kind, of_kind in sorted(sizes.items(), key=lambda item: -sum(item[1])):
        yield f"tensors {kind}", f"{len(of_kind)}, {format_memory(sum(of_kind))}"


def _text_rows(metadata: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    words = [str(metadata.get(f"tokenizer.ggml.{key}") or "") for key in ("model", "pre")]
    yield "tokenizer", " ".join(word for word in words if word) or "none"
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        yield "chat template", "none: a base model, which continues text"
        return
    features = [word for word in ("system", "tools", "thinking") if word.rstrip("s") in template]
    yield "chat template", f"{len(template)} characters; names {', '.join(features) or 'no system or tools'}"


def format_memory(num_bytes: float) -> str:
    """In binary units, as memory limits are given: 1.5 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
