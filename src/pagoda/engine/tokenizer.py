"""`Tokenizer`: text to token ids and back, built from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from pagoda.engine.added_tokens import AddedTokens
from pagoda.engine.byte_level import ByteLevelEncoder
from pagoda.engine.chat_messages import map_strings, normalize_messages, plain_data
from pagoda.engine.chat_template import ChatTemplate
from pagoda.engine.detokenizer import IncrementalDetokenizer
from pagoda.engine.pretokenizers import find_pre_tokenizer
from pagoda.engine.spm import SPACE_SYMBOL, SpmEncoder
from pagoda.engine.token_bytes import TokenBytes, parse_byte_token
from pagoda.engine.vocabulary import (
    TokenType,
    Vocabulary,
    ids_of_type,
    read_flag,
    read_numbers,
    read_texts,
    require_length,
)
from pagoda.errors import ModelFileError, RequestError, UnsupportedError

# Breaks up what looks like a control token in user text until a template is rendered. See `encode_chat`.
_UNTRUSTED_MARKS = tuple(map(chr, range(0xFDD0, 0xFDE0)))  # noncharacters: no interchanged text holds them


class TextEncoder(Protocol):
    """Encodes text that holds no token to be matched whole."""

    def encode(self, text: str, *, is_start: bool = True) -> list[int]:
        """`is_start`: whether the text is what a prompt begins with."""


class Tokenizer:
    """Token ids of one model. Immutable, and safe to use from several threads.

    `tokenizer_of` (`engine/hf_tokenizer.py`) makes one for any model.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: TextEncoder,
        token_bytes: TokenBytes,
        whole_tokens: tuple[AddedTokens, AddedTokens],
        *,
        add_bos: bool,
        add_eos: bool,
        has_space_prefix: bool,
        chat_templates: Mapping[str, str],
    ) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._token_bytes = token_bytes
        self._text_tokens, self._all_tokens = whole_tokens  # without and with control tokens
        self._add_bos = add_bos and vocabulary.bos_token_id is not None
        self._add_eos = add_eos and vocabulary.eos_token_id is not None
        self._chat_templates = dict(chat_templates)
        self._control_tokens = AddedTokens({vocabulary.texts[i]: i for i in vocabulary.control_ids})
        self.has_space_prefix = has_space_prefix
        self.vocab_size = len(vocabulary.texts)
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.end_token_ids

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from GGUF metadata; arrays may be lists or numpy arrays.

        Raises:
            ModelFileError: the metadata contradicts itself.
            UnsupportedError: a kind of vocabulary, or a pre-tokenizer, that is not implemented.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
            if kind is None:
                raise ModelFileError("the model file names no tokenizer (tokenizer.ggml.model)")
            raise UnsupportedError(
                f"the tokenizer {kind!r:.80} (tokenizer.ggml.model) is not supported",
                hint="supported: gpt2 (byte-level BPE) and llama (SentencePiece BPE)",
            )
        vocabulary = Vocabulary.from_gguf(metadata)
        build = _build_byte_level if kind == "gpt2" else _build_spm
        return build(vocabulary, metadata)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            text: Any text; lone surrogates count as U+FFFD.
            add_special_tokens: Whether to add the BOS and EOS tokens that the model asks for.
            parse_special: Whether a control token's text stands for the token; otherwise it is ordinary text.
        """
        tokens = self._all_tokens if parse_special else self._text_tokens
        token_ids = self._encode_parts(tokens.split(_without_surrogates(text)))
        if add_special_tokens and self._add_bos and self.bos_token_id is not None:
            token_ids.insert(0, self.bos_token_id)
        if add_special_tokens and self._add_eos and self._vocabulary.eos_token_id is not None:
            token_ids.append(self._vocabulary.eos_token_id)
        return token_ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text. A control token has the bytes of its name.

        An id past the vocabulary has none: the logits of some models are padded past it.
        """
        return self._token_bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether the token is structure rather than text."""
        return token_id in self._vocabulary.control_ids

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template; None if the file has none.

        Raises:
            ModelFileError: it is not valid Jinja.
        """
        return self._named_template("default")

    @cached_property
    def tool_template(self) -> ChatTemplate | None:
        """The template for chats with tools, which some files keep apart."""
        return self._named_template("tool_use") or self.chat_template

    def _named_template(self, name: str) -> ChatTemplate | None:
        source = self._chat_templates.get(name)
        if not source:
            return None
        vocabulary = self._vocabulary
        return ChatTemplate(
            source,
            bos_token="" if vocabulary.bos_token_id is None else vocabulary.texts[vocabulary.bos_token_id],
            eos_token="" if vocabulary.eos_token_id is None else vocabulary.texts[vocabulary.eos_token_id],
        )

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another chat template."""
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__)
        for name in ("chat_template", "tool_template"):
            changed.__dict__.pop(name, None)
        changed._chat_templates = {"default": source}
        return changed

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat: the template rendered, its control tokens as such, with BOS exactly once.

        What looks like a control token in the messages, tools or template arguments stays text. Before
        rendering, an untrusted mark is put inside each look-alike; the rendered text is cut at the control
        tokens that are still whole, which only the template can have written; the marks are then removed.
        Trimming and splitting in the template does not matter to this, and the text is encoded as if the
        mark had never been there.

        Raises:
            RequestError: the model has no template, or the template refuses the messages.
        """
        template = self.tool_template if tools else self.chat_template
        if template is None:
            raise RequestError(
                "the model has no chat template",
                param="messages",
                hint="pass one with --chat-template, or use completions with a plain prompt",
            )
        chat: dict[str, Any] = {
            "messages": normalize_messages(messages),
            "tools": plain_data(list(tools)) if tools else None,
            "template_kwargs": plain_data(dict(template_kwargs or {})),
        }
        mark = _unused_mark(chat)
        marked = map_strings(chat, lambda text: self._control_tokens.mark(_without_surrogates(text), mark))
        text = template.render(
            marked["messages"],
            tools=marked["tools"],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **marked["template_kwargs"],
        )
        parts = self._control_tokens.split(text, untrusted_mark=mark)
        token_ids = self._encode_parts(
            piece
            for part in parts
            for piece in (
                [part] if isinstance(part, int) else self._text_tokens.split(part.replace(mark, ""))
            )
        )
        if self._add_bos and self.bos_token_id is not None and token_ids[:1] != [self.bos_token_id]:
            token_ids.insert(0, self.bos_token_id)
        return token_ids

    def _encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        token_ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                token_ids.append(part)
            else:
                token_ids += self._encoder.encode(part, is_start=not token_ids)
        return token_ids


def _build_byte_level(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    merges = read_texts(metadata, "merges")
    if merges is None:
        raise ModelFileError(
            "the model file holds no merges for its byte-level vocabulary (tokenizer.ggml.merges)"
        )
    pre_tokenizer = find_pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    token_ids = dict(zip(vocabulary.texts, range(len(vocabulary.texts)), strict=True))
    encoder = ByteLevelEncoder(token_ids, merges, pre_tokenizer)
    text_tokens = {vocabulary.texts[index]: index for index in vocabulary.user_defined_ids}
    control_tokens = {vocabulary.texts[index]: index for index in vocabulary.control_ids}
    return Tokenizer(
        vocabulary,
        encoder,
        TokenBytes(vocabulary, byte_level=True),
        (AddedTokens(text_tokens), AddedTokens({**text_tokens, **control_tokens})),
        add_bos=read_flag(metadata, "add_bos_token", pre_tokenizer.add_bos),
        add_eos=read_flag(metadata, "add_eos_token", False),
        has_space_prefix=False,
        chat_templates=_read_chat_templates(metadata),
    )


def _build_spm(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    scores = read_numbers(metadata, "scores")
    if scores is None:
        raise ModelFileError("the model file holds no scores for its vocabulary (tokenizer.ggml.scores)")
    require_length("scores", scores, len(vocabulary.texts))
    texts, types = vocabulary.texts, vocabulary.types
    byte_ids = {}
    for index in ids_of_type(types, TokenType.BYTE):
        byte = parse_byte_token(texts[index])
        if byte is not None:
            byte_ids[byte] = index
    normal_ids = ids_of_type(types, TokenType.NORMAL, TokenType.UNDEFINED)
    pieces = {texts[index]: index for index in normal_ids if index not in vocabulary.control_ids}
    # Matched inside the encoder, once spaces have become symbols, so that runs of spaces are found.
    user_defined = AddedTokens({texts[i].replace(" ", SPACE_SYMBOL): i for i in vocabulary.user_defined_ids})
    space_prefix = read_flag(metadata, "add_space_prefix", True)
    encoder = SpmEncoder(
        pieces,
        scores,
        byte_ids,
        user_defined,
        unknown_id=vocabulary.unknown_token_id,
        space_prefix=space_prefix,
    )
    return Tokenizer(
        vocabulary,
        encoder,
        TokenBytes(vocabulary, byte_level=False),
        (AddedTokens({}), AddedTokens({texts[index]: index for index in vocabulary.control_ids})),
        add_bos=read_flag(metadata, "add_bos_token", True),
        add_eos=read_flag(metadata, "add_eos_token", False),
        has_space_prefix=space_prefix,
        chat_templates=_read_chat_templates(metadata),
    )


def _read_chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. The unnamed one is "default"; a file's only template is, whatever its name."""
    prefix = "tokenizer.chat_template"
    if not isinstance(metadata.get(prefix, ""), str):
        raise ModelFileError(f"{prefix} is {metadata[prefix]!r:.80}; it must be text")
    templates = {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str) and value.strip()
    }
    if len(templates) == 1:
        templates = {"default": next(iter(templates.values()))}
    return templates


def _unused_mark(chat: object) -> str:
    found: set[str] = set()

    def collect(text: str) -> str:
        found.update(mark for mark in _UNTRUSTED_MARKS if mark in text)
        return text

    map_strings(chat, collect)
    for mark in _UNTRUSTED_MARKS:
        if mark not in found:
            return mark
    raise RequestError(
        "the messages hold every one of U+FDD0 to U+FDDF, which are not characters", param="messages"
    )


def _without_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates, which no UTF-8 can hold, made U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
