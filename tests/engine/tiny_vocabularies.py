"""GGUF metadata of vocabularies small enough to reason about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.engine.token_bytes import byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content.split('<|im_end|>')[-1] | trim }}<|im_end|>\n{% endfor %}"
)


def byte_level(
    *,
    merges: Sequence[str] = ("t h", "th e", "Ġ t", "Ġt h", "Ġth e", "i n", "in g", "Ġ Ġ"),
    control: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    user_defined: Sequence[str] = ("<tool_call>",),
    **more: Any,
) -> dict[str, Any]:
    """256 bytes, then one token a merge, then control and user-defined tokens."""
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
    kinds = [NORMAL] * len(tokens) + [CONTROL] * len(control) + [USER_DEFINED] * len(user_defined)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *control, *user_defined],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(merges),
        **_full_names(more),
    }


def spm(
    pieces: Mapping[str, float],
    *,
    byte_values: Sequence[int] = range(256),
    user_defined: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """`<unk>`, `<s>`, `</s>`, byte tokens, user-defined pieces, then `pieces` with their scores."""
    groups: list[tuple[int, list[str], list[float]]] = [
        (UNKNOWN, ["<unk>"], [0.0]),
        (CONTROL, ["<s>", "</s>"], [0.0, 0.0]),
        (BYTE, [f"<0x{value:02X}>" for value in byte_values], [0.0] * len(byte_values)),
        (USER_DEFINED, list(user_defined), [0.0] * len(user_defined)),
        (NORMAL, list(pieces), list(pieces.values())),
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for _, texts, _ in groups for text in texts],
        "tokenizer.ggml.token_type": [kind for kind, texts, _ in groups for _ in texts],
        "tokenizer.ggml.scores": [score for _, _, scores in groups for score in scores],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
        **_full_names(more),
    }


def _full_names(more: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template=...` and, for the rest, the part of the name after `tokenizer.ggml.`."""
    return {f"tokenizer.{'' if name == 'chat_template' else 'ggml.'}{name}": more[name] for name in more}
