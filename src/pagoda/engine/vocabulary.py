"""`Vocabulary`: what a model file's metadata says about its tokens, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from typing import Any

import numpy as np

from pagoda.errors import ModelFileError

_PREFIX = "tokenizer.ggml."
_NO_TOKEN = (-1, 0xFFFFFFFF)

# Texts that end a turn or an answer in published models. Files often name only one of a model's several end
# tokens, and a model that is not stopped at the others goes on to open the user's turn.
_END_TEXTS = (
    "</s>",
    "<eos>",
    "<EOT>",
    "_<EOT>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|call|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|return|>",
    "<｜end▁of▁sentence｜>",
)


class TokenType(IntEnum):
    """GGUF's `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a model. Sequences are indexed by token id."""

    texts: Sequence[str]
    types: Sequence[int]  # TokenType values
    bos_token_id: int | None
    eos_token_id: int | None
    unknown_token_id: int | None
    end_token_ids: frozenset[int]  # every token that ends an answer, `eos_token_id` included
    control_ids: frozenset[int]  # tokens that are structure, not text
    user_defined_ids: Sequence[int]  # tokens matched whole in text before anything is merged

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Read `tokenizer.ggml.*`.

        Raises:
            ModelFileError: the tokens are missing, not text, or disagree in number or range with the rest.
        """
        texts = read_texts(metadata, "tokens")
        if not texts:
            raise ModelFileError("the model file holds no vocabulary (tokenizer.ggml.tokens)")
        types = read_numbers(metadata, "token_type", integers=True)
        if types is None:
            types = [int(TokenType.NORMAL)] * len(texts)
        require_length("token_type", types, len(texts))

        named = {
            name: read_token_id(metadata, name, len(texts))
            for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
        }
        return make_vocabulary(texts, types, named)


def make_vocabulary(
    texts: Sequence[str],
    types: Sequence[int],
    named: Mapping[str, int | None],
    end_token_ids: Iterable[int] = (),
) -> Vocabulary:
    """A vocabulary whose lengths and ids have been checked.

    `named` has the ids of "bos", "eos", "eot", "eom", "unknown" and "padding" as far as the model names them.
    All named ends, `end_token_ids` and the end tokens of published models that are in it end an answer.
    """
    end_ids = {index for name in ("eos", "eot", "eom") if (index := named.get(name)) is not None}
    end_ids |= {*end_token_ids, *_end_ids_by_text(texts, types)}
    control_ids = set(ids_of_type(types, TokenType.CONTROL, TokenType.UNKNOWN))
    # Old converters typed control tokens as ordinary ones. A named token spelled as a tag is not text.
    for index in {*named.values(), *end_ids}:
        if index is not None and _is_tag(texts[index]):
            control_ids.add(index)
    return Vocabulary(
        texts=texts,
        types=types,
        bos_token_id=named.get("bos"),
        eos_token_id=named.get("eos"),
        unknown_token_id=named.get("unknown"),
        end_token_ids=frozenset(end_ids),
        control_ids=frozenset(control_ids),
        user_defined_ids=[i for i in ids_of_type(types, TokenType.USER_DEFINED) if i not in control_ids],
    )


def read_texts(metadata: Mapping[str, Any], name: str) -> list[str] | None:
    """An array of text of `tokenizer.ggml`; None when the file has none."""
    values = _read_array(metadata, name)
    if values is not None and not all(isinstance(text, str) for text in values):
        raise ModelFileError(f"{_PREFIX}{name} holds something that is not text")
    return values


def read_numbers(metadata: Mapping[str, Any], name: str, *, integers: bool = False) -> list[Any] | None:
    """An array of finite numbers of `tokenizer.ggml`, of any width; None when the file has none."""
    values = metadata.get(_PREFIX + name)
    if isinstance(values, np.ndarray):
        fits = values.ndim == 1 and values.dtype.kind in ("iu" if integers else "iuf")
        fits = fits and bool(np.isfinite(values).all())
    else:
        allowed = (int,) if integers else (int, float)
        fits = all(type(v) in allowed and isfinite(v) for v in _read_array(metadata, name) or ())
    if not fits:
        raise ModelFileError(f"{_PREFIX}{name} must hold {'integers' if integers else 'finite numbers'}")
    return _read_array(metadata, name)


def read_flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """A truth value of `tokenizer.ggml`, perhaps as 0 or 1."""
    value = metadata.get(_PREFIX + name)
    if value is None:
        return default
    if not isinstance(value, (bool, int, np.integer)) or value not in (0, 1):
        raise ModelFileError(f"{_PREFIX}{name} is {value!r:.80}; it must be true or false")
    return bool(value)


def _read_array(metadata: Mapping[str, Any], name: str) -> list[Any] | None:
    """An array of `tokenizer.ggml`, list or numpy array, as a list; None when the file has none."""
    value = metadata.get(_PREFIX + name)
    if value is None:
        return None
    if isinstance(value, list):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ModelFileError(f"{_PREFIX}{name} is {type(value).__name__}; it must be an array")
    return list(value)


def read_token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    """The id under `tokenizer.ggml.<name>_token_id`; None when the file names none."""
    key = f"{_PREFIX}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ModelFileError(f"{key} is {value!r:.80}; it must be a token id")
    token_id = int(value)
    if token_id in _NO_TOKEN:
        return None
    if not 0 <= token_id < num_tokens:
        raise ModelFileError(f"{key} is {token_id}; the vocabulary has {num_tokens} tokens")
    return token_id


def require_length(name: str, values: Sequence[Any], num_tokens: int) -> None:
    if len(values) != num_tokens:
        raise ModelFileError(
            f"{_PREFIX}{name} has {len(values)} entries; the vocabulary has {num_tokens} tokens"
        )


def ids_of_type(types: Sequence[int], *wanted: TokenType) -> list[int]:
    """The ids of the tokens of these types, ascending."""
    numbers = frozenset(map(int, wanted))  # plain numbers: comparing enum members 262k times takes a while
    return [index for index, kind in enumerate(types) if kind in numbers]


def _end_ids_by_text(texts: Sequence[str], types: Sequence[int]) -> set[int]:
    wanted = set(_END_TEXTS)
    found = {text: index for index, text in enumerate(texts) if text in wanted}
    if "<|return|>" in found and "<|call|>" in found:
        # Harmony: <|end|> only ends one message of an answer that goes on.
        found.pop("<|end|>", None)
    # A plain tag, such as "</s>", may also be HTML that the model writes.
    return {
        index
        for text, index in found.items()
        if types[index] == TokenType.CONTROL or text.startswith(("<|", "<｜", "<end_of"))
    }


def _is_tag(text: str) -> bool:
    return len(text) > 2 and (text[0], text[-1]) in (("<", ">"), ("[", "]"))
