"""How a model writes tool calls: which form its template teaches, and the grammar of that form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.engine.structured_output import with_layout

MAX_PARALLEL_CALLS = 16  # of an answer that must call tools; with no bound it might never end


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Each call is a JSON object with a name and arguments, between `opening` and `closing`.

    With `is_bare` the object may also stand without `opening`, at the start of the reply.
    """

    name: str
    opening: str
    closing: str
    arguments_key: str
    separator: str  # between two calls
    is_bare: bool = False


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments", "\n")
LLAMA3_JSON = ToolFormat("llama3_json", "<|python_tag|>", "", "parameters", "; ", is_bare=True)
TOOL_FORMATS = {form.name: form for form in (HERMES, LLAMA3_JSON)}


def detect_tool_format(template: str) -> ToolFormat | None:
    """The form that a chat template teaches its model; None when it is neither."""
    if HERMES.opening in template:
        return HERMES
    if '"parameters"' in template and ("python_tag" in template or "ipython" in template):
        return LLAMA3_JSON
    return None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema of an object; `is_strict` says that
    arguments are to keep to it even where no call must come."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


def tool_call_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    *,
    max_calls: int | None,
    opening_token_id: int | None = None,
    closing_token_id: int | None = None,
    other_schema: dict[str, Any] | None = None,
    allows_text: bool = False,
) -> str:
    """Lark for an answer of 1 to `max_calls` (None: any number of) calls of `tools`, laid out as models are
    trained to.

    `opening_token_id` is the control token that `form.opening` is, None where it is text; the closing one
    likewise. With `other_schema` the answer may also be JSON of that schema. With `allows_text` it may be any
    text, in which what `form.opening` begins is a call; that needs a form whose calls all begin with it.
    """
    assert not (allows_text and form.is_bare)
    opening = _marker(form.opening, opening_token_id)
    closing = _marker(form.closing, closing_token_id)
    names = [f"tool_{number}" for number in range(len(tools))]
    # A bare call needs no marker, and models write it without.
    call = "tool" if form.is_bare else rf'{opening} "\n" tool "\n" {closing}'
    if allows_text:
        lines = [f"start: call{_up_to(max_calls)} TEXT", *_text_before(form.opening, opening_token_id)]
        call = rf'before "\n" tool "\n" {closing}'
    else:
        calls = "calls: call"
        if max_calls != 1:
            more = _up_to(None if max_calls is None else max_calls - 1)
            calls += f" ({json.dumps(form.separator)} call){more}"
        lines = ["start: calls" if other_schema is None else "start: calls | other", calls]
    lines = ["%llguidance {}", *lines, f"call: {call}", f"tool: {' | '.join(names)}"]
    for rule, tool in zip(names, tools, strict=True):
        head = f'{{"name": {json.dumps(tool.name)}, "{form.arguments_key}": '
        lines.append(f'{rule}: {json.dumps(head)} %json {_schema(tool.parameters)} "}}"')
    if other_schema is not None:
        lines.append(f"other: %json {_schema(other_schema)}")
    return "\n".join(lines)


def _up_to(max_times: int | None) -> str:
    return "*" if max_times is None else f"{{0,{max_times}}}"


def _text_before(opening: str, token_id: int | None) -> list[str]:
    """Rules for any text, and for one that ends where `opening` first stands in it."""
    if token_id is None:
        # Lazy: it ends there even if it could go on.
        return [r"TEXT: /(.|\n)*/", f"before[lazy]: TEXT {json.dumps(opening)}"]
    # Spelled in ordinary tokens the marker would be read as one, too.
    text = rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{re.escape(opening)}(.|\n)*/"
    return [text, f"before: TEXT <[{token_id}]>"]


def _marker(text: str, token_id: int | None) -> str:
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps(with_layout(dict(schema)))
