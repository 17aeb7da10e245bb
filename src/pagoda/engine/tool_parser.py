"""`ToolCallParser`: a reply's text, as it comes, into what is said and the tools that are called."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from uuid import uuid4

from pagoda.engine.tool_format import ToolFormat

# What stands before the arguments where their name comes first, which is how models are trained to write.
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*',
    re.DOTALL,
)
_FIRST_KEY = re.compile(r'\s*\{\s*"(?:name|type|function|arguments|parameters)"\s*:')


@dataclass(slots=True)
class ToolCallDelta:
    """What is new about call `index`. `call_id` and `name` are there once, in the first delta."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ReplyDelta:
    """At most one entry a call."""

    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class _State(Enum):
    TEXT = "text"
    CALL = "call"
    AFTER_CALL = "after_call"


class ToolCallParser:
    """Takes a reply in pieces, cut anywhere; what it has returned never changes.

    All deltas together do not depend on how the reply is cut. Whatever turns out to be no call is content,
    tags included. White space between content and calls is left out where it would begin or end the content.

    Args:
        form: How calls are written.
        max_calls: Calls after these are left out; None is no limit.
    """

    def __init__(self, form: ToolFormat, max_calls: int | None = None) -> None:
        self.num_calls = 0  # begun
        self.is_inside_call = False  # one has begun and not ended
        self._form = form
        self._max_calls = max_calls
        self._state = _State.TEXT
        self._pending = ""  # not looked at yet, or not to be decided yet
        self._may_be_bare = form.is_bare
        self._held_space = ""
        self._has_content = False
        self._call = _CallReader("", False)
        self._delta = ReplyDelta()

    def push(self, text: str) -> ReplyDelta:
        self._pending += text
        while self._advance():
            pass
        delta, self._delta = self._delta, ReplyDelta()
        return delta

    def finish(self) -> ReplyDelta:
        """What was held back, when the reply ends."""
        delta = self.push("")
        self._delta = delta
        if self._state is _State.TEXT:
            self._say(self._pending)
        elif self._state is _State.CALL and self._call.name is None:
            self._say(self._call.opening + self._call.raw)
        if not self.num_calls and self._held_space:
            self._delta.content += self._held_space
        self._pending = self._held_space = ""
        return self._delta

    def _advance(self) -> bool:
        """Do what can be done; whether there may be more."""
        if self._state is _State.TEXT:
            return self._advance_text()
        if self._state is _State.CALL:
            return self._advance_call()
        return self._advance_after_call()

    def _advance_text(self) -> bool:
        if self._may_be_bare and self._starts_bare_call():
            return True
        text, marker = self._pending, self._form.opening
        if self._may_be_bare and not text.strip("; \t\r\n"):
            return False
        start = text.find(marker)
        if start >= 0:
            self._say(text[:start])
            self._pending = text[start + len(marker) :]
            self._begin_call(marker)
            return True
        num_held = _overlap(text, marker)
        said = text[: len(text) - num_held]
        if said.strip():
            self._may_be_bare = False
        self._say(said)
        self._pending = text[len(said) :]
        return False

    def _starts_bare_call(self) -> bool:
        separators = " \t\r\n;" if self.num_calls else " \t\r\n"
        stripped = self._pending.lstrip(separators)
        if not stripped.startswith("{"):
            return False
        skipped = self._pending[: len(self._pending) - len(stripped)]
        self._pending = stripped
        self._begin_call(skipped)
        return True

    def _begin_call(self, opening: str) -> None:
        self._state = _State.CALL
        self._call = _CallReader(opening, self._form.is_bare)

    def _advance_call(self) -> bool:
        call = self._call
        was_named = call.name is not None
        num_read = call.read(self._pending)
        self._pending = self._pending[num_read:]
        if call.name is not None and not was_named:
            self.is_inside_call = True
            self._tell(ToolCallDelta(self.num_calls, f"call_{uuid4().hex[:24]}", call.name))
            self.num_calls += 1
        if call.new_arguments:
            self._tell(ToolCallDelta(self.num_calls - 1, arguments=call.new_arguments))
            call.new_arguments = ""
        if call.is_no_call:
            self._may_be_bare = False
            self._state = _State.TEXT
            self._say(call.opening + call.raw)
            return True
        if call.has_ended:
            self.is_inside_call = False
            self._state = _State.AFTER_CALL
            return True
        return False

    def _advance_after_call(self) -> bool:
        closing = self._form.closing
        rest = self._pending.lstrip(" \t\r\n}") if closing else self._pending
        if closing and closing.startswith(rest) and rest != closing:
            self._pending = rest
            return False
        self._pending = rest.removeprefix(closing)
        self._state = _State.TEXT
        self._may_be_bare = self._form.is_bare
        return True

    def _say(self, text: str) -> None:
        stripped = text.rstrip()
        if stripped:
            before = self._held_space
            if self.num_calls and not self._has_content:
                before, stripped = "", stripped.lstrip()
            self._delta.content += before + stripped
            self._has_content = True
            self._held_space = text[len(text.rstrip()) :]
        else:
            self._held_space += text

    def _tell(self, delta: ToolCallDelta) -> None:
        if self._max_calls is not None and delta.index >= self._max_calls:
            return
        told = self._delta.tool_calls
        if told and told[-1].index == delta.index:
            told[-1].arguments += delta.arguments
        else:
            told.append(delta)


class _CallReader:
    """Reads the JSON object of one call. `new_arguments` are known and not yet taken."""

    def __init__(self, opening: str, is_bare: bool) -> None:
        self.opening = opening  # what stood before it, to give back
        self.raw = ""
        self.name: str | None = None
        self.new_arguments = ""
        self.has_ended = False
        self.is_no_call = False
        self._is_bare = is_bare and not opening.strip()
        self._depth = 0  # of objects and lists
        self._in_string = False
        self._is_escaped = False
        self._in_arguments = False
        self._is_first_key = True

    def read(self, text: str) -> int:
        """Take in characters up to the end of the call; how many."""
        for number, character in enumerate(text):
            if self._depth == 0 and not self._in_string and character not in "{ \t\r\n":
                self.is_no_call = True
                return number
            if character == "<" and not self._in_string:  # never in JSON: the closing tag, too early
                self.has_ended = self.name is not None
                self.is_no_call = self.name is None
                return number
            self._take(character)
            if self.has_ended or self.is_no_call:
                return number + 1
        return len(text)

    def _take(self, character: str) -> None:
        if character == "{" and self._depth == 1 and not self._in_string and self.name is None:
            head = _HEAD.fullmatch(self.raw)
            if head is not None:
                self.name = _decoded(head[1])
                self._in_arguments = self.name is not None
        self.raw += character
        self._scan(character)
        if self._in_arguments:
            self.new_arguments += character
            self._in_arguments = self._depth > 1 or self._in_string
        if self._depth == 0 and self.raw.strip():
            self._end()

    def _scan(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped = character == "\\"
            self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        elif character == ":" and self._is_first_key:
            self._is_first_key = False
            # An answer that is some other JSON is not kept back until its end.
            self.is_no_call = self._is_bare and _FIRST_KEY.fullmatch(self.raw) is None

    def _end(self) -> None:
        if self.name is None:
            self.name, self.new_arguments = _whole_call(self.raw, self._is_bare)
        self.has_ended = self.name is not None
        self.is_no_call = self.name is None


def _whole_call(text: str, is_bare: bool) -> tuple[str | None, str]:
    """Name and arguments of a call whose arguments do not come last, are text, or are missing.

    An object that no marker announces is only a call if it has arguments.
    """
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None, ""
    name = call.get("name", call.get("function"))
    if not isinstance(name, str) or (is_bare and not {"arguments", "parameters"} & call.keys()):
        return None, ""
    arguments: Any = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        return name, arguments
    return name, json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _decoded(text: str) -> str | None:
    try:
        return str(json.loads(text))
    except ValueError:
        return None


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
