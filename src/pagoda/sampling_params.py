"""`SamplingParams`: how the next token of a request is chosen and when the request stops."""

from __future__ import annotations

import json as jsonlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

from pagoda.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the text of an answer must be: one of the first five. Names follow vLLM's.

    `json` is a JSON schema, as an object or its text; it is kept as text. `json_object` asks for any JSON
    object. `regex` must match the whole answer. `grammar` is in Lark's notation, or in llama.cpp's GBNF.
    Between the tokens of JSON there is at most one space, or a line break with its indentation;
    `disable_any_whitespace` leaves none.

    Raises:
        RequestError: not exactly one constraint is given, or it has the wrong type.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        _require(
            len(given) == 1,
            "structured_outputs",
            ", ".join(given),
            "exactly one of json, regex, choice, grammar and json_object",
        )
        if self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", _json_text(self.json))
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, str), f"structured_outputs.{name}", value, "text")
        if self.choice is not None:
            is_list = isinstance(self.choice, list | tuple)
            _require(
                is_list and len(self.choice) > 0 and all(isinstance(c, str) and c for c in self.choice),
                "structured_outputs.choice",
                self.choice,
                "a list of one or more texts, none of them empty",
            )
            object.__setattr__(self, "choice", tuple(self.choice))


def _json_text(schema: Any) -> str:
    try:
        return jsonlib.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"the schema cannot be written as JSON: {error}", param="structured_outputs.json"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. Names, defaults and meaning follow vLLM's `SamplingParams`.

    The logits of a step go through, in this order: logit bias and token masks (`min_tokens`,
    `structured_outputs`), the
    three penalties, temperature, `min_p`, `top_k`, `top_p`. Temperature 0 is greedy and skips the rest.

    Raises:
        RequestError: a value is out of range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over unique prompt and output tokens
    presence_penalty: float = 0.0  # over output tokens
    frequency_penalty: float = 0.0  # over output tokens, times their count
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16  # None: up to max_model_len
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_token_ids: tuple[int, ...] = ()  # control tokens that `skip_special_tokens` leaves alone
    logprobs: int | None = None  # number of top log-probabilities a token; the chosen one is always there
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "shown_special_token_ids", tuple(self.shown_special_token_ids))
        _require(1 <= self.n <= 128, "n", self.n, "between 1 and 128")
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "between 0 and 100")
        _require(self.top_k >= -1, "top_k", self.top_k, "a positive count, or 0 or -1 for all tokens")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "between 0 and 1")
        _require(
            0.0 < self.repetition_penalty <= 100.0,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0 and at most 100",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, getattr(self, name), "between -2 and 2")
        _require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", self.max_tokens, "0 or more")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"at most max_tokens, which is {self.max_tokens}",
        )
        _require(all(self.stop), "stop", self.stop, "free of empty strings")
        _require(
            self.structured_outputs is None or not self.ignore_eos,
            "ignore_eos",
            self.ignore_eos,
            "false where the output is structured: its end is an end token",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"between 0 and {MAX_LOGPROBS}"
            )
        for token_id, bias in self.logit_bias.items():
            _require(
                _is_number(token_id, int) and token_id >= 0, "logit_bias", token_id, "a token id of 0 or more"
            )
            _require(
                _is_number(bias, int | float) and math.isfinite(bias) and -100.0 <= bias <= 100.0,
                "logit_bias",
                bias,
                "between -100 and 100",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _is_number(value: object, kind: type | UnionType) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _require(ok: bool, param: str, value: object, allowed: str) -> None:
    if not ok:
        raise RequestError(f"{param} is {value!r}; it must be {allowed}", param=param)
