"""A tiny random model with a byte-level vocabulary and a chat template: loads at once, talks nonsense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.gguf_files import write_tiny_model
from tests.models.tiny_checkpoints import TINY_MODELS

CONTROL, NORMAL = 3, 1
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_chat_model(path: Path, *, template: str | None = TEMPLATE, max_position: int = 4096) -> Path:
    """One token a byte. The end token is not among what the model likes, so answers go on until a limit."""
    symbols = byte_symbols()
    tokens = [*symbols, "<|im_start|>", "<|im_end|>"]
    model = replace(TINY_MODELS["llama-gqa"], vocab_size=len(tokens), max_position=max_position)
    metadata: dict[str, object] = {
        "general.name": "Tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([NORMAL] * len(symbols) + [CONTROL] * 2, np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return write_tiny_model(path, model, metadata=metadata)


def byte_symbols() -> list[str]:
    """The bytes as byte-level vocabularies write them: printable ones as they are, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(0x100 + others.index(b)) for b in range(256)]
