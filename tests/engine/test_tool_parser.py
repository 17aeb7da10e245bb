"""From a reply's text to content and tool calls, however the text is cut."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.engine.tool_format import HERMES, LLAMA3_JSON, ToolFormat, detect_tool_format
from pagoda.engine.tool_parser import ReplyDelta, ToolCallParser


@dataclass
class Reply:
    """What a client has put together from all deltas."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, delta: ReplyDelta) -> None:
        self.content += delta.content
        indexes = [call.index for call in delta.tool_calls]
        assert len(set(indexes)) == len(indexes), "two entries with one index in a chunk"
        for call in delta.tool_calls:
            if call.index == len(self.calls):
                assert call.call_id is not None and call.name is not None, "id and name come first"
                self.calls.append((call.name, call.arguments))
                self.ids.append(call.call_id)
            else:
                assert call.call_id is None and call.name is None, "id and name come once"
                name, arguments = self.calls[call.index]
                self.calls[call.index] = name, arguments + call.arguments

    @property
    def parsed(self) -> tuple[str, list[tuple[str, Any]]]:
        return self.content, [(name, json.loads(arguments)) for name, arguments in self.calls]


def parse(pieces: list[str], form: ToolFormat = HERMES, **options: Any) -> Reply:
    parser, reply = ToolCallParser(form, **options), Reply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.finish())
    assert parser.num_calls >= len(reply.calls) == len(set(reply.ids))
    return reply


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


A, B = call("f", {"city": "Zürich", "tag": "</tool_call> {"}), call("g", {"list": [1, {"a": "}"}]})
A_CALL = ("f", {"city": "Zürich", "tag": "</tool_call> {"})
B_CALL = ("g", {"list": [1, {"a": "}"}]})
HERMES_REPLIES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("", "", []),
    ("just text with a < b and <tool", "just text with a < b and <tool", []),
    ("  spaces kept \n", "  spaces kept \n", []),
    (A, "", [A_CALL]),
    (f"{A}\n{B}", "", [A_CALL, B_CALL]),
    (f"{A}{B}", "", [A_CALL, B_CALL]),
    (f"Let me see.\n{A}\nAnd then\n{B}\nDone.\n", "Let me see.\n\nAnd then\n\nDone.", [A_CALL, B_CALL]),
    (A.removesuffix("\n</tool_call>"), "", [A_CALL]),
    ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", {"x": 1})]),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", {"x": 1})]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ('<tool_call>{"name": "f", "arguments": {}}}</tool_call> ok', "ok", [("f", {})]),
    ('<tool_call>{"name":"\\u0066","arguments":{"a":"\\"<"}}</tool_call>', "", [("f", {"a": '"<'})]),
    ("I write <tool_call> tags.", "I write <tool_call> tags.", []),
    ('<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ("<tool_call>", "<tool_call>", []),
]  # fmt: skip

X = '{"name": "f", "parameters": {"x": "};{"}}'
X_CALL = ("f", {"x": "};{"})
LLAMA_REPLIES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    (X, "", [X_CALL]),
    (f"{X}; {X}", "", [X_CALL, X_CALL]),
    (f"\n<|python_tag|>{X}\n", "", [X_CALL]),
    (f"Sure. <|python_tag|>{X};{X}", "Sure.", [X_CALL, X_CALL]),
    (f"{X} and so on", "and so on", [X_CALL]),
    ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", {})]),
    ('{"function": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    ('{"answer": {"name": 1}} {"name"', '{"answer": {"name": 1}} {"name"', []),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    (f"Said: {X}", f"Said: {X}", []),
    ("{}", "{}", []),
    ("plain", "plain", []),
]
CASES = [(HERMES, *case) for case in HERMES_REPLIES] + [(LLAMA3_JSON, *case) for case in LLAMA_REPLIES]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_every_way_to_cut_a_reply_gives_the_same(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    """B44, B47: two calls, text around them, every split position of each tag."""
    assert parse([text], form).parsed == (content, calls)
    assert parse(list(text), form).parsed == (content, calls)
    for cut in range(1, len(text)):
        assert parse([text[:cut], text[cut:]], form).parsed == (content, calls)


@given(st.data())
def test_any_pieces_join_to_one_result(data: st.DataObject) -> None:
    """B47"""
    form = data.draw(st.sampled_from([HERMES, LLAMA3_JSON]))
    fragments = [
        A,
        B,
        X,
        form.opening,
        form.closing,
        "{",
        "}",
        '"name"',
        ": ",
        "<",
        "text ",
        "\n",
        '{"name": "f", ',
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, cut = parse([text], form), parse(pieces, form)
    assert (whole.content, whole.calls) == (cut.content, cut.calls)


def test_arguments_are_told_as_they_come() -> None:
    parser = ToolCallParser(HERMES)
    head = parser.push('<tool_call>\n{"name": "f", "arguments": {"a')
    assert [(c.name, c.arguments) for c in head.tool_calls] == [("f", '{"a')]
    assert parser.is_inside_call
    assert [c.arguments for c in parser.push('": 1').tool_calls] == ['": 1']
    assert [c.arguments for c in parser.push("}}\n").tool_calls] == ["}"]
    assert not parser.is_inside_call


def test_an_unfinished_call_is_told_as_far_as_it_goes() -> None:
    reply = parse(['<tool_call>\n{"name": "f", "arguments": {"a": "b'])
    assert (reply.content, reply.calls) == ("", [("f", '{"a": "b')])


def test_calls_after_the_last_allowed_one_are_left_out() -> None:
    assert parse([f"{A}\n{B}"], max_calls=1).parsed == ("", [A_CALL])


def test_some_other_json_is_not_kept_back() -> None:
    assert ToolCallParser(LLAMA3_JSON).push('{"answer": 4').content == '{"answer": 4'


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ('{"name": function name, "parameters": dictionary}{{ "<|python_tag|>" }}{{ tools }}', LLAMA3_JSON),
        ("{{ tools }}[TOOL_CALLS]", None),
        ("{{ messages }}", None),
    ],
)
def test_the_template_says_how_calls_are_written(template: str, form: ToolFormat | None) -> None:
    assert detect_tool_format(template) is form
