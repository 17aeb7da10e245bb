"""Tools of a chat: what the body says about them, how the model is held to it, and the reply's calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagoda.engine.structured_output import checked_schema
from pagoda.engine.tokenizer import Tokenizer
from pagoda.engine.tool_format import (
    MAX_PARALLEL_CALLS,
    TOOL_FORMATS,
    Tool,
    ToolFormat,
    detect_tool_format,
    tool_call_grammar,
)
from pagoda.engine.tool_parser import ReplyDelta, ToolCallDelta, ToolCallParser
from pagoda.errors import RequestError
from pagoda.sampling_params import SamplingParams, StructuredOutputsParams
from pagoda.server.protocol import ChatCompletionBody

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may call in one chat."""

    form: ToolFormat
    tools: tuple[Tool, ...]
    callable_tools: tuple[Tool, ...]  # those that the choice allows
    is_required: bool
    max_calls: int | None
    marker_ids: tuple[int | None, int | None]  # the control tokens that opening and closing are

    def parser(self) -> ToolCallParser:
        return ToolCallParser(self.form, self.max_calls)

    def apply(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the markers visible, a call enforced where one must come, and strict tools
        where one may.

        Raises:
            RequestError: a structured output other than JSON is asked for, too, or a tool cannot be strict.
        """
        shown = tuple(token_id for token_id in self.marker_ids if token_id is not None)
        params = replace(params, shown_special_token_ids=shown)
        wanted = params.structured_outputs
        other = None
        if wanted is not None and not self.is_required:
            if wanted.json is None and not wanted.json_object:
                raise RequestError("structured_outputs other than json exclude tools", param="tools")
            assert wanted.json is None or isinstance(wanted.json, str)
            other = checked_schema(wanted.json or '{"type": "object"}')
        strict = next((tool for tool in self.callable_tools if tool.is_strict), None)
        allows_text = wanted is None and not self.is_required
        if allows_text and strict is None:
            return params
        if allows_text and self.form.is_bare:
            assert strict is not None
            raise RequestError(
                f"{strict.name!r} cannot be strict: this model writes calls as bare JSON, which is kept to a "
                "schema only where a call must come",
                param=f"tools[{self.tools.index(strict)}].function.strict",
                hint='set tool_choice to "required" or to the function, or leave strict out',
            )
        grammar = tool_call_grammar(
            self.form,
            self.callable_tools,
            max_calls=self.max_calls or (None if allows_text else MAX_PARALLEL_CALLS),
            opening_token_id=self.marker_ids[0],
            closing_token_id=self.marker_ids[1],
            other_schema=other,
            allows_text=allows_text,
        )
        return replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))


def tool_use(body: ChatCompletionBody, tokenizer: Tokenizer, forced_parser: str | None) -> ToolUse | None:
    """None when no tool may be called, in which case the template is not told of any.

    Raises:
        RequestError: tools or their choice are malformed, or the model's template knows no tools.
    """
    tools = _checked_tools(body.tools or [])
    is_required, named = _checked_choice(body.tool_choice, tools)
    if not tools or body.tool_choice == "none":
        return None
    if named is not None and len([t for t in tools if t.name == named]) == 0:
        raise RequestError(f"tool_choice names {named!r}, which is not among the tools", param="tool_choice")
    form = _tool_format(tokenizer, forced_parser)
    one_call = body.parallel_tool_calls is False or named is not None
    return ToolUse(
        form,
        tools,
        tuple(t for t in tools if named is None or t.name == named),
        is_required,
        1 if one_call else None,
        (_control_token(tokenizer, form.opening), _control_token(tokenizer, form.closing)),
    )


def _tool_format(tokenizer: Tokenizer, forced_parser: str | None) -> ToolFormat:
    template = tokenizer.tool_template
    if template is None or not template.supports_tools:
        raise RequestError("the model's chat template does not support tools", param="tools")
    if forced_parser is not None:
        return TOOL_FORMATS[forced_parser]
    form = detect_tool_format(template.source)
    if form is None:
        raise RequestError(
            "how this model writes tool calls cannot be told from its chat template",
            param="tools",
            hint=f"start the server with --tool-call-parser {' or '.join(TOOL_FORMATS)}",
        )
    return form


def _control_token(tokenizer: Tokenizer, text: str) -> int | None:
    token_ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    return token_ids[0] if len(token_ids) == 1 and tokenizer.is_special(token_ids[0]) else None


def _checked_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    checked: list[Tool] = []
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        function = tool.get("function")
        if tool.get("type") != "function":
            raise RequestError(f'{where}.type must be "function"', param=f"{where}.type")
        if not isinstance(function, Mapping):
            raise RequestError(f"{where}.function must be an object", param=f"{where}.function")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(
                f"{where}.function.name is {name!r}; it must have 1 to 64 letters, digits, _, - or .",
                param=f"{where}.function.name",
            )
        if any(name == other.name for other in checked):
            raise RequestError(f"there are two tools named {name!r}", param=f"{where}.function.name")
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise RequestError(
                f"{where}.function.strict must be true or false", param=f"{where}.function.strict"
            )
        schema = _checked_parameters(parameters, f"{where}.function.parameters")
        checked.append(Tool(name, schema, bool(strict)))
    return tuple(checked)


def _checked_parameters(parameters: Any, where: str) -> dict[str, Any]:
    """A schema of the arguments; with none given, there are none."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where} must be a JSON schema", param=where)
    try:
        text = json.dumps(parameters)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is nested too deeply: {error}", param=where) from None
    return {"type": "object", **checked_schema(text, where)}


def _checked_choice(choice: str | dict[str, Any] | None, tools: Sequence[Tool]) -> tuple[bool, str | None]:
    """Whether a tool must be called, and which one if that is said, too."""
    if choice in (None, "auto", "none"):
        return False, None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise RequestError(
                'tool_choice must be "none", "auto", "required", or '
                '{"type": "function", "function": {"name": ...}}',
                param="tool_choice",
            )
    elif choice == "required":
        name = None
    else:
        raise RequestError(
            f'tool_choice is {choice!r}; it must be "none", "auto", "required" or name a function',
            param="tool_choice",
        )
    if not tools:
        raise RequestError("tool_choice needs tools", param="tool_choice")
    return True, name


class ToolReplies:
    """The replies of one call, by choice."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._parsers: dict[int, ToolCallParser] = {}

    def read(self, index: int, text: str, finished: bool) -> ReplyDelta:
        """What `text`, the next of choice `index`, adds."""
        if index not in self._parsers:
            self._parsers[index] = self._use.parser()
        parser = self._parsers[index]
        if not finished:
            return parser.push(text)
        delta, last = parser.push(text), parser.finish()
        return _joined(delta, last)

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        parser = self._parsers[index]
        has_called = parser.num_calls > 0 and not parser.is_inside_call
        return "tool_calls" if reason == "stop" and has_called else reason


def _joined(first: ReplyDelta, last: ReplyDelta) -> ReplyDelta:
    return ReplyDelta(first.content + last.content, first.tool_calls + last.tool_calls)


def message_fields(delta: ReplyDelta, prefix: str = "") -> dict[str, Any]:
    """Fields of a whole message. `content` is null where there are calls and nothing is said."""
    content = prefix + delta.content
    if not delta.tool_calls:
        return {"content": content}
    calls = [
        {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in delta.tool_calls
    ]
    return {"content": content or None, "tool_calls": calls}


def chunk_fields(delta: ReplyDelta) -> dict[str, Any]:
    """Fields of a streamed delta; empty when there is no news."""
    fields: dict[str, Any] = {"content": delta.content} if delta.content else {}
    calls = [_call_chunk(call) for call in delta.tool_calls]
    return {**fields, "tool_calls": calls} if calls else fields


def _call_chunk(call: ToolCallDelta) -> dict[str, Any]:
    if call.call_id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}
