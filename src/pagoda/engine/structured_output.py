"""Structured output: from `StructuredOutputsParams` to what a choice may say next, through `llguidance`."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cached_property
from threading import Lock
from typing import Any

from pagoda.engine.tokenizer import Tokenizer
from pagoda.errors import RequestError, UnsupportedError
from pagoda.sampling_params import StructuredOutputsParams

MAX_GRAMMAR_CHARACTERS = 512 * 1024
MAX_COMPILE_S = 10.0  # an answer is given by then; the library's own limits end nearly all work far sooner
MAX_KEPT_GRAMMARS = 64
# One line break with its indentation, or a space: room for every common layout, and no way to go on for ever.
WHITESPACE = r"(\n {0,40}| )?"
_PARAM = "structured_outputs"


class CompiledGrammar:
    """A grammar in its first state, shared by all choices that ask for it."""

    def __init__(self, matcher: Any, end_mask: bytes) -> None:
        self._matcher = matcher
        self._end_mask = end_mask

    def start(self) -> MatcherGrammar:
        """The grammar for one more choice."""
        return MatcherGrammar(self._matcher.deep_copy(), self._end_mask)


class MatcherGrammar:
    """`TokenGrammar` of one choice, over an `LLMatcher`. `end_mask` allows the end tokens only."""

    def __init__(self, matcher: Any, end_mask: bytes) -> None:
        self._matcher = matcher
        self._end_mask = end_mask
        self._mask: bytes | None = None  # of the state it is in

    @property
    def is_complete(self) -> bool:
        return self.allowed_mask() == self._end_mask

    @property
    def error(self) -> str | None:
        return first_line(self._matcher.get_error()) or None

    def allowed_mask(self) -> bytes:
        if self._mask is None:
            num_bytes = len(self._end_mask)
            mask = bytes(self._matcher.compute_bitmask())[:num_bytes]
            # After an error the library's own mask would let the request end as if all were well.
            self._mask = bytes(num_bytes) if self._matcher.is_error() else mask
        return self._mask

    def accept(self, token_id: int) -> bool:
        if self.is_complete:
            return False
        self._mask = None
        return bool(self._matcher.consume_token(token_id))


class GrammarCompiler:
    """Compiles grammars for the tokens of one model; safe to use from several threads.

    `vocab_size` is the number of logits, which may be more than the tokenizer's. The last grammars are kept.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._kept: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()
        self._lock = Lock()  # of `_kept`
        self._table_lock = Lock()

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """
        Raises:
            RequestError: the constraint is malformed, too large, uses what cannot be enforced, or nothing
                satisfies it.
            UnsupportedError: `llguidance` is not installed.
        """
        with self._lock:
            if params in self._kept:
                self._kept.move_to_end(params)
                return self._kept[params]
        with self._table_lock:
            table = self._token_table
        compiled = CompiledGrammar(_checked_matcher(params, table), self._end_mask)
        with self._lock:
            self._kept[params] = compiled
            if len(self._kept) > MAX_KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return compiled

    @cached_property
    def _end_mask(self) -> bytes:
        mask = bytearray((self._vocab_size + 31) // 32 * 4)
        for token_id in self._eos_token_ids:
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)

    @cached_property
    def _token_table(self) -> Any:
        """The library's view of the vocabulary; made once a model."""
        llguidance = import_llguidance()
        if not self._eos_token_ids:
            raise RequestError("the model has no end token, which structured output needs", param=_PARAM)
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_TokenTable(self._tokenizer, self._vocab_size, self._eos_token_ids)),
            n_vocab=self._vocab_size,
            eos_token=self._eos_token_ids,
        )


class _TokenTable:
    """A tokenizer in the shape that `llguidance.TokenizerWrapper` reads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [t for t in range(vocab_size) if tokenizer.is_special(t)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def import_llguidance() -> Any:
    """
    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError(
            "structured output needs the package llguidance", hint="pip install llguidance"
        ) from None
    return llguidance


def _checked_matcher(params: StructuredOutputsParams, table: Any) -> Any:
    llguidance = import_llguidance()
    text = _guarded(lambda: _grammar_text(params), params)
    matcher = _guarded(lambda: llguidance.LLMatcher(table, text, log_level=0), params)
    if matcher.is_error():
        raise _refusal(params, matcher.get_error())
    # The first mask shows what compiling alone does not: whether any text satisfies the grammar.
    mask = _guarded(matcher.compute_bitmask, params)
    if matcher.is_error() or matcher.is_stopped() or not any(mask):
        raise _refusal(params, matcher.get_error() or "no text satisfies it")
    return matcher


def _guarded(work: Callable[[], Any], params: StructuredOutputsParams) -> Any:
    """The result of the library's `work`. Whatever goes wrong there is a fault of the grammar."""
    try:
        return work()
    except (RequestError, UnsupportedError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is no Exception
        raise _refusal(params, str(error) or type(error).__name__) from None


def _grammar_text(params: StructuredOutputsParams) -> str:
    """The constraint in the library's own notation."""
    llguidance = import_llguidance()
    assert params.json is None or isinstance(params.json, str), "kept as text"
    source = params.json or params.regex or params.grammar or ""
    num_characters = len(source) + sum(map(len, params.choice or ()))
    if num_characters > MAX_GRAMMAR_CHARACTERS:
        raise _refusal(params, f"it has {num_characters} characters; at most {MAX_GRAMMAR_CHARACTERS} may be")
    if params.json is not None or params.json_object:
        schema = checked_schema(params.json if params.json is not None else '{"type": "object"}')
        text = json.dumps(with_layout(schema, params.disable_any_whitespace))
        return str(llguidance.LLMatcher.grammar_from_json_schema(text))
    if params.choice is not None:
        return str(llguidance.grammar_from("choice", json.dumps(list(params.choice))))
    if params.regex is not None:
        return str(llguidance.LLMatcher.grammar_from_regex(params.regex))
    assert params.grammar is not None
    is_lark = params.grammar.startswith("%llguidance")
    return str(llguidance.grammar_from("lark" if is_lark else "grammar", params.grammar))


def checked_schema(text: str, param: str = f"{_PARAM}.json") -> dict[str, Any]:
    """A JSON schema as an object; `true` is the schema that allows everything.

    Raises:
        RequestError: it is no JSON, no schema, or carries the library's own options.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema is not valid JSON: {error}", param=param) from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise RequestError(f"the schema is {type(schema).__name__}; it must be an object", param=param)
    if "x-guidance" in schema:
        raise RequestError("the schema has x-guidance, which is not supported", param=param)
    return schema


def with_layout(schema: dict[str, Any], compact: bool = False) -> dict[str, Any]:
    """The schema with how its JSON is laid out, and with nothing left to approximation."""
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False, "whitespace_flexible": not compact}
    if not compact:
        options["whitespace_pattern"] = WHITESPACE
    return {**schema, "x-guidance": options}


def _refusal(params: StructuredOutputsParams, reason: str) -> RequestError:
    kinds = ("json", "regex", "choice", "grammar")
    kind = next((name for name in kinds if getattr(params, name) is not None), "json_object")
    what = {"json": "JSON schema", "json_object": "JSON schema"}.get(kind, kind)
    return RequestError(f"the {what} cannot be used: {first_line(reason)}", param=f"{_PARAM}.{kind}")


def first_line(message: str) -> str:
    """What a client is told: the message up to the library's internal state, in one line."""
    return " ".join(message.split("<state>")[0].split())[:400]
