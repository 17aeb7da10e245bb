"""`HFEncoder`: the `tokenizers` package on a tokenizer.json, less the tokens that are matched whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pagoda.errors import ModelFileError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NEVER_IN_TEXT = "\ufdee"  # a noncharacter, to spell tokens that text must not become


class HFEncoder:
    """Encodes text that holds no token to be matched whole.

    Args:
        raw: The bytes of tokenizer.json, where `values` are all that they say; only saves time.
        values: tokenizer.json, parsed.
        control_texts: Texts of control tokens. No text becomes one, wherever the file lists it.
        file: Leads messages.

    Raises:
        ModelFileError: the package does not accept the file.
    """

    def __init__(
        self, raw: bytes | None, values: Mapping[str, Any], control_texts: Iterable[str], file: str
    ) -> None:
        model = _without_texts(values["model"], set(control_texts))
        if raw is None or model is not values["model"]:
            raw = _dump({**values, "model": model})
        self._at_start = _build(raw, file)
        # A space that goes before the first text only.
        later = _without_first_space(values)
        self._later = self._at_start if later is values else _build(_dump({**later, "model": model}), file)

    def encode(self, text: str, *, is_start: bool = True) -> list[int]:
        backend = self._at_start if is_start else self._later
        token_ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return token_ids


def _dump(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode()


def _build(raw: bytes, file: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_buffer(raw)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the package is no Exception
        message = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ModelFileError(
            f"{file}: the tokenizer cannot be built: {message}", hint="fetch the model's files again"
        ) from None
    backend.encode_special_tokens = True  # as text; those of the model have been matched before
    backend.no_truncation()
    backend.no_padding()
    return backend


def _without_texts(model: Mapping[str, Any], texts: set[str]) -> Mapping[str, Any]:
    """The model with some of its tokens spelled as no text is, where text could become them otherwise."""
    vocab = model.get("vocab")
    if isinstance(vocab, list) and any(entry[0] in texts for entry in vocab):
        renamed = [
            [f"{_NEVER_IN_TEXT}{i}", entry[1]] if entry[0] in texts else entry
            for i, entry in enumerate(vocab)
        ]
        return {**model, "vocab": renamed}
    if isinstance(vocab, dict) and model.get("ignore_merges") and not texts.isdisjoint(vocab):
        kept = model.get("unk_token")
        return {
            **model,
            "vocab": {
                f"{_NEVER_IN_TEXT}{index}" if text in texts and text != kept else text: index
                for text, index in vocab.items()
            },
        }
    return model


def _without_first_space(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """`values` with Metaspace steps that put a space before the first text putting none; or as they are."""

    def changed(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
            return {**part, "prepend_scheme": "never"}
        steps = part.get("pretokenizers")
        return {**part, "pretokenizers": [changed(p) for p in steps]} if isinstance(steps, list) else part

    pre_tokenizer = changed(values.get("pre_tokenizer"))
    return (
        values if pre_tokenizer == values.get("pre_tokenizer") else {**values, "pre_tokenizer": pre_tokenizer}
    )
