"""`TokenizerJSON`: what is read of a `tokenizer.json`, the format of the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagoda.engine.spm import SPACE_SYMBOL
from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.weights.hf_folder import TOKENIZER_FILE

_SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")


@dataclass(frozen=True, slots=True)
class AddedToken:
    id: int
    text: str
    is_special: bool
    strips_left: bool
    strips_right: bool


class TokenizerJSON:
    """The parts of tokenizer.json that are read here, each checked, less added tokens past `vocab_size`.

    Raises (all methods):
        ModelFileError: a part has another type than the format says.
        UnsupportedError: it is a kind of tokenizer that is not implemented.
    """

    def __init__(self, values: Mapping[str, Any], vocab_size: int) -> None:
        self.values = values
        kept = [entry for entry in self._added() if entry["id"] < vocab_size]
        self.is_unchanged = len(kept) == len(self._added())
        if not self.is_unchanged:
            self.values = {**values, "added_tokens": kept}
        model = values.get("model")
        if not isinstance(model, dict):
            raise wrong("'model' must be an object")
        self.model = model
        # Files of old versions name no type; only BPE has merges.
        self.kind = model.get("type", "BPE" if "merges" in model else None)
        if self.kind not in ("BPE", "Unigram"):
            raise UnsupportedError(
                f"the tokenizer model {self.kind!r:.80} ({TOKENIZER_FILE}) is not supported",
                hint="supported: BPE and Unigram",
            )

    def vocabulary(self) -> dict[int, str]:
        """Texts of the model's own tokens by id."""
        vocab = self.model.get("vocab")
        if self.kind == "Unigram":
            if not isinstance(vocab, list) or not all(
                isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) for entry in vocab
            ):
                raise wrong("'vocab' must be a list of pieces and scores")
            return {index: entry[0] for index, entry in enumerate(vocab)}
        if not isinstance(vocab, dict) or not all(type(index) is int for index in vocab.values()):
            raise wrong("'vocab' must map text to ids")
        return {index: text for text, index in vocab.items()}

    def added_tokens(self) -> Iterator[AddedToken]:
        for entry in self._added():
            if entry.get("single_word"):
                raise UnsupportedError(f"the added token {entry['content']!r:.80} matches whole words only")
            flags = (bool(entry.get(name)) for name in ("special", "lstrip", "rstrip"))
            yield AddedToken(entry["id"], entry["content"], *flags)

    def _added(self) -> list[dict[str, Any]]:
        entries = self.values.get("added_tokens") or []
        if not isinstance(entries, list):
            raise wrong("'added_tokens' must be a list")
        for entry in entries:
            fields = entry if isinstance(entry, dict) else {}
            text = fields.get("content")
            if type(fields.get("id")) is not int or not isinstance(text, str) or not text:
                raise wrong(f"an added token is {entry!r:.80}")
        return entries

    def parts(self, name: str) -> list[dict[str, Any]]:
        """The steps of "normalizer", "pre_tokenizer", "post_processor" or "decoder", in order."""
        found: list[dict[str, Any]] = []
        left: list[Any] = [self.values.get(name)]
        while left:
            part = left.pop(0)
            if not isinstance(part, dict):
                continue
            inner = next((v for k in _SEQUENCES if isinstance(v := part.get(k), list)), None)
            if part.get("type") == "Sequence" and inner is not None:
                left = inner + left
            else:
                found.append(part)
        return found

    def is_byte_level(self) -> bool:
        """Whether tokens are spelled in the alphabet of bytes; if not, `SPACE_SYMBOL` spells a space."""
        steps = [part.get("type") for name in ("pre_tokenizer", "decoder") for part in self.parts(name)]
        if "ByteLevel" in steps:
            return True
        if "Metaspace" in steps or any(
            SPACE_SYMBOL in (part.get("content"), part.get("prepend")) for part in self.parts("normalizer")
        ):
            return False
        raise UnsupportedError(
            f"{TOKENIZER_FILE} spells neither bytes nor spaces in a way that is known",
            hint="supported: ByteLevel, Metaspace and the normalizers of Llama",
        )

    def has_space_prefix(self) -> bool:
        """Whether a space is put before the text that is encoded."""
        if any(p.get("type") == "Prepend" for p in self.parts("normalizer")):
            return True
        for part in self.parts("pre_tokenizer"):
            if part.get("type") == "Metaspace" and _prepend_scheme(part) != "never":
                return True
            if part.get("type") == "ByteLevel" and part.get("add_prefix_space"):
                return True
        return False

    def special_template(self) -> tuple[list[str], list[str]]:
        """Texts of the special tokens that go before and after a text."""
        for part in self.parts("post_processor"):
            if part.get("type") == "TemplateProcessing":
                pieces = part.get("single")
                texts = [_special_text(piece) for piece in pieces] if isinstance(pieces, list) else []
                middle = texts.index(None) if None in texts else len(texts)
                before, after = texts[:middle], texts[middle + 1 :]
                return [t for t in before if t is not None], [t for t in after if t is not None]
            if part.get("type") in ("BertProcessing", "RobertaProcessing"):
                raise UnsupportedError(f"the post-processor {part['type']!r} is not one of language models")
        return [], []


def _special_text(piece: object) -> str | None:
    special = piece.get("SpecialToken") if isinstance(piece, dict) else None
    text = special.get("id") if isinstance(special, dict) else None
    return text if isinstance(text, str) else None


def _prepend_scheme(metaspace: Mapping[str, Any]) -> str:
    """Files of old versions say `add_prefix_space` instead."""
    return str(
        metaspace.get("prepend_scheme") or ("always" if metaspace.get("add_prefix_space") else "never")
    )


def wrong(message: str) -> ModelFileError:
    """The error of a tokenizer.json that is not as the format says."""
    return ModelFileError(f"{TOKENIZER_FILE}: {message}", hint="fetch the model's files again")
