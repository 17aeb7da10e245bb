"""Chat messages as clients send them, made into the one form that templates read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagoda.errors import RequestError

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
# Names that a message's reasoning goes by. Templates read the first or the second.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ToolArguments(dict[str, Any]):
    """The arguments of a tool call: a mapping for templates that want one, its JSON where they want text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Plain copies of `messages` with string contents and parsed tool arguments. Idempotent.

    Fields that are null, and empty `tool_calls`, are left out, as if never sent. A content of several text
    parts is their texts with a newline between; a missing one is the empty string.

    Raises:
        RequestError: no messages, or one that is no object, has no role, a content part that is not text, or
            tool arguments that are not a JSON object; `param` says where.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of objects with a role and a content", param="messages")
    if not messages:
        raise RequestError("messages is empty; a chat needs at least one message", param="messages")
    return [_normalize_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {type(message).__name__}; it must be an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is {role!r}; it must be a non-empty string", param=f"{where}.role")
    normalized = {str(key): plain_data(value) for key, value in message.items() if value is not None}
    normalized["content"] = _join_content(message.get("content"), f"{where}.content")
    tool_calls = normalized.pop("tool_calls", None)
    if tool_calls:
        normalized["tool_calls"] = _normalize_tool_calls(tool_calls, f"{where}.tool_calls")
    reasoning = next((normalized[name] for name in _REASONING_FIELDS if name in normalized), None)
    if reasoning is not None:
        normalized = {"thinking": reasoning, **normalized, "reasoning_content": reasoning}
    return normalized


def _join_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{where} must be a string or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif part_type in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif part_type in _TEXT_PARTS:
            raise RequestError(f"{where}[{index}].text must be a string", param=f"{where}[{index}].text")
        else:
            raise RequestError(
                f"{where}[{index}] has the type {part_type!r}; this model reads text parts only",
                param=f"{where}[{index}].type",
            )
    return "\n".join(texts)


def _normalize_tool_calls(tool_calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(tool_calls, list):
        raise RequestError(f"{where} must be a list", param=where)
    normalized = []
    for index, tool_call in enumerate(tool_calls):
        if not isinstance(tool_call, dict):
            raise RequestError(f"{where}[{index}] must be an object", param=f"{where}[{index}]")
        at = f"{where}[{index}]"
        if isinstance(tool_call.get("function"), dict):
            function = _with_parsed_arguments(tool_call["function"], f"{at}.function.arguments")
            normalized.append({**tool_call, "function": function})
        else:
            normalized.append(_with_parsed_arguments(tool_call, f"{at}.arguments"))
    return normalized


def _with_parsed_arguments(function: dict[str, Any], where: str) -> dict[str, Any]:
    if "arguments" not in function:
        return function
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is not valid JSON: {error}", param=where) from None
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} must be a JSON object", param=where)
    return {**function, "arguments": ToolArguments(arguments)}


def plain_data(value: Any) -> Any:
    """`value` rebuilt from the types of JSON, so that a template meets no object with methods of its own.

    Raises:
        RequestError: `value` holds something that JSON cannot.
    """
    if value is None or isinstance(value, bool):
        return value
    for plain_type in (str, int, float):
        if isinstance(value, plain_type):
            return value if type(value) is plain_type else plain_type(value)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    raise RequestError(
        f"a chat cannot hold a {type(value).__name__}; only what JSON can express", param="messages"
    )


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Plain data with every string in it changed, the keys of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    return value
