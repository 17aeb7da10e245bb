"""Whatever a chat template says, it renders or is refused, within its budget, touching nothing outside."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagoda.engine import template_work
from pagoda.engine.chat_template import ChatTemplate
from pagoda.engine.template_features import template_features
from pagoda.errors import ModelFileError, RequestError
from tests.engine.test_chat_template import ENDLESS, ESCAPES
from tests.engine.tiny_vocabularies import CHATML, TRIMMING

MAX_WORK = template_work.MAX_WORK // 200  # so that what never ends is over soon
MAX_BYTES = 20 << 20  # of memory meanwhile

# What a program does to the world outside: events that Python reports to audit hooks.
_OUTSIDE = ("open", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "urllib.", "glob.", "tempfile.")
_watching: list[list[str]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and str(arguments[0]).endswith((".py", ".pyc")):
        return  # Jinja imports some of its modules when they are first needed
    if event == "open" and arguments[0] == "<template>":
        return  # the interpreter looks for the line of a syntax error in what Jinja calls the file
    if _watching and event.startswith(_OUTSIDE):
        _watching[-1].append(f"{event} {arguments!r:.200}")


sys.addaudithook(_note)


@contextmanager
def nothing_outside() -> Iterator[None]:
    """Fails when files, sockets or processes are touched meanwhile."""
    _watching.append([])
    try:
        yield
    finally:
        touched = _watching.pop()
    assert not touched


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <|im_start|> {{ 7 * 7 }} {% raw %}?"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": "c"}]}'}}]},
    {"role": "tool", "content": "[1]", "tool_call_id": "1"},
]  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}
]


def require_tame(source: str) -> None:
    """Compile and render in every way that the server does: text comes out, or one error of ours."""
    tracemalloc.start()
    try:
        with nothing_outside():
            try:
                template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
                text = template.render(MESSAGES, tools=TOOLS if template.supports_tools else None)
                assert isinstance(text, str)
                template_features(template)
            except (RequestError, ModelFileError) as error:
                assert error.message
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_BYTES


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_work, "MAX_WORK", MAX_WORK)
    monkeypatch.setattr(template_work, "WORK_PER_MESSAGE", 1000)


def words(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(text.split())


NAMES = words(
    """
    messages message tools bos_token loop self namespace range cycler joiner dict
    raise_exception strftime_now caller varargs kwargs true none x y ns lipsum
    """
)
ATTRIBUTES = words(
    """
    role content x __class__ __mro__ __subclasses__ __globals__ __init__ __builtins__ __dict__ __code__
    gi_frame f_back mro func_globals _TemplateReference__context append update pop format format_map
    join replace split ljust zfill expandtabs encode translate to_bytes items keys values index previtem
    depth cycle next current
    """
)
FILTERS = words(
    """
    tojson trim list join length string upper replace('a','aa') center(999) indent(9) map('upper') format(1)
    map(attribute='role') selectattr('role') groupby('role') sort unique batch(2) slice(3) sum max dictsort
    items attr('__class__') safe escape wordwrap(1) truncate(5) filesizeformat striptags int float abs random
    reverse default('x')
    """
)
LITERALS = st.sampled_from(
    [
        "1",
        "0",
        "-1",
        "10 ** 9",
        "2.5",
        "''",
        "'a'",
        "'{0.__class__}'",
        "'%s'",
        "[]",
        "[1, 2]",
        "{}",
        "{'a': 1}",
        "()",
    ]
)
expressions = st.recursive(
    st.one_of(NAMES, LITERALS),
    lambda inner: st.one_of(
        st.tuples(inner, ATTRIBUTES).map(lambda v: f"({v[0]}).{v[1]}"),
        st.tuples(inner, ATTRIBUTES).map(lambda v: f"({v[0]})['{v[1]}']"),
        st.tuples(inner, inner).map(lambda v: f"({v[0]})[{v[1]}]"),
        st.tuples(inner, inner).map(lambda v: f"({v[0]})({v[1]})"),
        inner.map(lambda v: f"({v})()"),
        st.tuples(inner, FILTERS).map(lambda v: f"({v[0]}) | {v[1]}"),
        st.tuples(
            inner, st.sampled_from(["+", "*", "**", "~", "%", "//", "==", "<", "in", "and"]), inner
        ).map(lambda v: f"({v[0]}) {v[1]} ({v[2]})"),
        st.tuples(inner, inner, inner).map(lambda v: f"({v[0]}) if ({v[1]}) else ({v[2]})"),
        st.tuples(inner, inner).map(lambda v: f"[{v[0]}, {v[1]}]"),
    ),
    max_leaves=6,
)
statements = st.recursive(
    st.one_of(
        expressions.map(lambda e: "{{ " + e + " }}"),
        expressions.map(lambda e: "{% set x = " + e + " %}"),
        expressions.map(lambda e: "{% set ns = namespace(y=" + e + ") %}{% set ns.y = ns.y %}"),
        st.sampled_from(["{% break %}", "{% continue %}", "{% include 'x' %}", "{% import 'os' as os %}"]),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(expressions, inner).map(lambda v: "{% for x in " + v[0] + " %}" + v[1] + "{% endfor %}"),
        st.tuples(expressions, inner).map(lambda v: "{% if " + v[0] + " %}" + v[1] + "{% endif %}"),
        inner.map(lambda v: "{% macro m(x) %}" + v + "{{ m(x) }}{% endmacro %}{{ m(1) }}"),
        inner.map(lambda v: "{% for i in range(999) %}{% for j in range(999) %}" + v + 2 * "{% endfor %}"),
        inner.map(lambda v: "{% filter upper %}" + v + "{% endfilter %}"),
        inner.map(lambda v: "{% set x %}" + v + "{% endset %}"),
        inner.map(lambda v: "{% generation %}" + v + "{% endgeneration %}"),
    ),
    max_leaves=5,
)


@settings(max_examples=30, deadline=None)
@given(statements)
@example("{{ cycler() }}")
@example("{% break %}")
def test_templates_of_random_statements_are_tame(source: str) -> None:
    require_tame(source)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(statements)
def test_many_templates_of_random_statements_are_tame(source: str) -> None:
    require_tame(source)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([CHATML, TRIMMING, *ESCAPES, *ENDLESS[:12]]),
    st.lists(
        st.tuples(
            st.floats(0, 1, exclude_max=True),
            st.one_of(
                st.sampled_from(["{{", "}}", "{%", "%}", "{#", "#}", "'", "(", ")", "|", ".", "__class__"]),
                st.text(max_size=3),
            ),
            st.sampled_from(["insert", "replace", "delete"]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_templates_with_edits_are_tame(source: str, edits: list[tuple[float, str, str]]) -> None:
    for place, patch, kind in edits:
        at = int(place * len(source))
        rest = at if kind == "insert" else at + len(patch)
        source = source[:at] + ("" if kind == "delete" else patch) + source[rest:]
    require_tame(source)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_templates_of_any_text_are_tame(source: str) -> None:
    require_tame(source)


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_touch_nothing_outside(source: str) -> None:
    require_tame(source)


@pytest.mark.parametrize(
    "source",
    [
        "{" * 5000,
        "{{ " + "(" * 3000,
        "{% if x %}" * 2000,
        "{{ " + "-" * 5000 + "1 }}",
        "{{ '" + "\\x" * 999 + "' }}",
        "{{ " + "[" * 500 + "]" * 500 + " }}",
        "{# " * 5000,
        "{{ x" + ".y" * 3000 + " }}",
        "{{ x" + " | trim" * 3000 + " }}",
    ],
    ids=range(9),
)
def test_deep_and_unfinished_nesting_is_refused_or_renders(source: str) -> None:
    require_tame(source)


def test_the_watch_sees_what_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(AssertionError), nothing_outside():
        path.write_text("")
