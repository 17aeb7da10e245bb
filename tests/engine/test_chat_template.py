"""`ChatTemplate`: what templates expect, what requests may send, and what a hostile template cannot do."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.engine import template_sandbox, template_work
from pagoda.engine.chat_messages import normalize_messages
from pagoda.engine.chat_template import ChatTemplate
from pagoda.errors import ModelFileError, RequestError

USER = [{"role": "user", "content": "hi"}]

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: datetime(2024, 7, 26, 9, 5))


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return template(source).render(messages, **options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "01345678"),
        ("{% for i in range(9) %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}", "0123"),
        ("{% set n = namespace(x=0) %}{% for i in [1, 2] %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}",
         "3"),
        ("{% set ns = namespace(self=1, n=2) %}{{ ns.self }}{{ ns.n }}", "12"),
        ("{% for i in [1, 2, 3] %}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.last }} {% endfor %}",
         "2False 13False 2True "),
        ("{% for i in 'abc' %}{{ loop.index }}/{{ loop.length }} {% endfor %}", "1/3 2/3 3/3 "),
        ("{% macro m(a, b='x') %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(2, b='y') }}", "1x2y"),
        ("{% call(x) m2() %}<{{ x }}>{% endcall %}", None),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "a1b2"),
        ("{% for k, v in {'a': 1, 'b': 2} | items %}{{ k }}{{ v }}{% endfor %}", "a1b2"),
        ("{{ 'a,b'.split(',') | join('+') }}{{ ' x '.strip() }}{{ 'abc'.startswith('a') }}", "a+bxTrue"),
        ("{{ 'x'.upper().replace('X', 'y') ~ 1 ~ none }}", "y1None"),
        ("{{ '%s-%d' % ('a', 2) }}{{ '{}!'.format('b') }}", "a-2b!"),
        ("{{ messages[::-1][0].content }}{{ messages[-1:] | length }}{{ 'abcdef'[1:3] }}", "hi1bc"),
        ("  {% if true %}\n  x\n  {% endif %}\n y", "  x\n y"),
        ("a\n  {%- set x = 1 -%}\n  b\n", "ab"),
        ("{{ messages | map(attribute='role') | list | tojson }}{{ [3, 1] | sort | first }}", '["user"]1'),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ x is defined }}{{ none is none }}{{ messages is mapping }}", "FalseTrueFalse"),
        ("{{ {'a': '<é&\\'\"'} | tojson }}", '{"a": "<é&\'\\""}'),
        ("{{ {'b': ['é'], 'a': 1} | tojson(ensure_ascii=0, indent=1, separators=(',', ':'), sort_keys=1) }}",
         '{\n "a":1,\n "b":[\n  "é"\n ]\n}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ dict(a=1) | tojson }}{{ 1 if messages else 2 }}{{ [1] + [2] }}", '{"a": 1}1[1, 2]'),
        ("{{ 2 ** 3 * 2 % 7 }}{{ 7 // 2 }}{{ 1 < 2 <= 2 }}{{ 'a' in 'ab' and 3 not in (1, 2) }}",
         "23TrueTrue"),
        ("{% set x %}{{ 'a' }}b{% endset %}{{ x }}{% filter upper %}c{% endfilter %}", "abC"),
    ],
)  # fmt: skip
def test_what_templates_of_hugging_face_expect(source: str, expected: str | None) -> None:
    """C06, C08, C09: tags, functions, filters, string methods, slices and white space rules."""
    if expected is None:
        source = "{% macro m2() %}[{{ caller(7) }}]{% endmacro %}" + source
        expected = "[<7>]"
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "line"), [("{% if %}", 1), ("a\nb\n{{ 1 +", 3), ("\n{% endfor %}", 2), ("{{ 1 | nope }}", 1)]
)
def test_a_template_that_does_not_compile_is_refused_with_its_line(source: str, line: int) -> None:
    """C06: at start-up, not at the first request."""
    with pytest.raises(ModelFileError, match=f"line {line}"):
        template(source)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "system", "content": "s"}, *USER], "System role not supported"),
        ([*USER, *USER], "Conversation roles must alternate"),
        ([{"role": "assistant", "content": "a"}], "Conversation roles must alternate"),
        ([*USER, {"role": "nobody", "content": "a"}, {"role": "nobody", "content": "a"}], "must alternate"),
    ],
)
def test_what_a_strict_template_refuses_is_told_in_its_own_words(messages: Any, message: str) -> None:
    """C11"""
    with pytest.raises(RequestError, match=message) as raised:
        render(GEMMA, messages)
    assert raised.value.param == "messages"


def test_a_tool_round_trip_that_a_template_cannot_show_says_so() -> None:
    """C12: the usual four messages on a template that knows users and assistants only."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "user", "content": "thanks"},
    ]
    with pytest.raises(RequestError, match="must alternate") as raised:
        render(GEMMA, [*messages[:2], messages[2], *messages[2:]])
    assert raised.value.hint == "the model's chat template knows no tool calls or tool results"
    with pytest.raises(RequestError, match="does not support tools") as raised:
        render(GEMMA, USER, tools=[{"type": "function"}])
    assert raised.value.param == "tools"
    assert render(GEMMA, USER, tools=[]) == render(GEMMA, USER)


def test_other_failures_of_a_template_are_errors_of_the_request() -> None:
    for source in (
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ nothing() }}",
        "{{ messages.x.y }}",
    ):
        with pytest.raises(RequestError, match="chat template") as raised:
            render(source)
        assert raised.value.param == "messages"


# Messages

SHOW = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("continued", [False, True])
def test_every_form_of_a_content_is_its_joined_text(role: str, continued: bool) -> None:
    """B57: string, parts, no parts, null and missing; for each role; the last message, continued or not."""

    def shown(message: dict[str, Any]) -> str:
        return render(SHOW, [*USER, {"role": role, **message}], continue_final_message=continued)

    assert shown({"content": [part("a b")]}) == shown({"content": "a b"})
    assert shown({"content": [part("a"), part("b")]}) == shown({"content": "a\nb"})
    assert shown({"content": []}) == shown({"content": None}) == shown({}) == shown({"content": ""})


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([*USER, {"role": "user", "content": 3}], "messages[1].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": [part("a"), {"type": "image_url"}]}], "messages[0].content[1].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0]"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: Any, param: str) -> None:
    """B57: an unknown part type, among others."""
    with pytest.raises(RequestError) as raised:
        render(SHOW, messages)
    assert raised.value.param == param


def with_arguments(arguments: Any) -> list[dict[str, Any]]:
    return [
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
        }
    ]


@pytest.mark.parametrize(
    "source",
    [
        "{{ a | tojson }}",
        "{{ a }}",
        "{{ '<' + a + '>' }}",
        "{{ a ~ '' }}",
        "{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}",
        "{{ a if a is string else a | tojson }}",
    ],
)
def test_arguments_as_text_and_as_object_render_alike(source: str) -> None:
    """C10: for templates that want a mapping and for those that want text."""
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}" + source
    arguments = {"city": "Zürich <&'\">", "days": 3}
    as_object = render(source, with_arguments(arguments))
    assert as_object == render(source, with_arguments('{"city":"Zürich <&\'\\">","days":3}'))
    assert "Zürich <&" in as_object and "&lt;" not in as_object and "\\u" not in as_object
    assert render(source, with_arguments("")) == render(source, with_arguments({}))


@pytest.mark.parametrize("arguments", ["{", "nope", "[1]", "3", [1], "[" * 100_000])
def test_arguments_that_are_no_json_object_are_refused(arguments: Any) -> None:
    """C10"""
    with pytest.raises(RequestError, match="JSON") as raised:
        render(SHOW, with_arguments(arguments))
    assert raised.value.param == "messages[0].tool_calls[0].function.arguments"


def test_null_fields_are_as_if_never_sent() -> None:
    source = "{{ 'tool_calls' in messages[0] }}{{ messages[0].name is defined }}"
    message = {"role": "user", "content": "x", "tool_calls": None, "name": None, "refusal": None}
    assert render(source, [message]) == render(source, [message | {"tool_calls": []}]) == "FalseFalse"


def test_reasoning_is_found_under_each_of_its_names() -> None:
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert render(source, [{"role": "assistant", "content": "a", name: "why"}]) == "why|why"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, st.text())
def test_normalising_twice_changes_nothing(value: Any, content: str) -> None:
    messages = [{"role": "user", "content": content, "extra": value}]
    once = normalize_messages(messages)
    assert normalize_messages(once) == once
    assert once[0]["content"] == content


# The final message, continued


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("<{{ messages[-1].content }}>", "a b ", "<a b "),
        ("<{{ messages[-1].content | trim }}>", " a b ", "<a b"),
        ("<{{ messages[-1].content }}><{{ messages[-1].content }}>", "a", "<a><a"),
    ],
)
def test_the_text_ends_inside_the_final_message(source: str, content: str, expected: str) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    assert render(source, messages, continue_final_message=True) == expected


def test_continuing_needs_a_template_that_shows_the_message() -> None:
    with pytest.raises(RequestError, match="cannot be continued"):
        render("nothing", continue_final_message=True)
    with pytest.raises(RequestError, match="exclude each other"):
        render(SHOW, continue_final_message=True, add_generation_prompt=True)


# Hostile templates

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ range.__self__ }}",
    "{{ namespace.__init__ }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ ('{0.__class__.__init__.__globals__}').format(raise_exception) }}",
    "{{ '{0.__class__}' | format(1) }}{{ ''['__class__'] }}{{ '' | attr('__class__') }}{{ x.y }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends '/etc/passwd' %}",
    "{{ strftime_now.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_does_not_reach_the_interpreter_or_files(source: str) -> None:
    with pytest.raises((RequestError, ModelFileError)):
        print(render(source + "{{ undefined.attribute.of }}"))
    try:
        shown = render(source)
    except (RequestError, ModelFileError):
        return
    assert not any(word in shown for word in ("class ", "module", "function", "object at", "root:"))


def repeated(start: str, step: str) -> str:
    return "{% set ns = namespace(x=" + start + ") %}{% for i in range(60) %}" + step + "{% endfor %}"


# Small in memory, as each level shares the one below, and endless to walk.
NESTED = repeated("[1]", "{% set ns.x = [ns.x, ns.x] %}")
ENDLESS = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(10 ** 12) %}x{% endfor %}",
    "{% set r = range(9999) %}{% for i in r %}{% for j in r %}{{ r | sum }}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 9 ** (9 ** (9 ** 9)) }}",
    repeated("3", "{% set ns.x = ns.x * ns.x %}"),
    repeated("'x'", "{% set ns.x = ns.x + ns.x %}"),
    repeated("'x'", "{% set ns.x = ns.x ~ ns.x %}"),
    repeated("'x'", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    repeated("'x'", "{% set ns.x = [ns.x, ns.x] | join %}"),
    repeated("'x'", "{% set ns.x = ns.x.replace('x', 'xx') %}"),
    repeated("'x'", "{% set ns.x = ns.x | replace('x', 'xx') %}"),
    repeated("[1]", "{% set ns.x = ns.x + ns.x %}"),
    NESTED + "{{ ns.x }}",
    NESTED + "{{ ns.x | tojson }}",
    NESTED + "{{ ns.x ~ '' }}",
    NESTED + "{{ ns.x | string }}",
    "{{ 'x'.ljust(10 ** 10) }}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ '\\t'.expandtabs(10 ** 10) }}",
    "{{ '{:>9999999999}'.format('x') }}",
    "{{ '{:>{}}'.format('x', 9999999999) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ 'a\\nb' | indent(10 ** 10) }}",
    "{{ [1] | batch(10 ** 10, 0) | list }}",
    "{{ [1] | slice(10 ** 10) | list }}",
    "{{ 1 | round(10 ** 9, 'ceil') }}",
    "{{ {'a': [[[1]]]} | tojson(indent=10 ** 9) }}",
    "{{ {'a': 1} | tojson(indent='x' * 10 ** 7) }}",
    "{{ lipsum(n=10 ** 9) }}",
    "{{ 'x' | center(10000000000) }}",
    "{{ 'x' | replace('', 'y') | center(100000) }}",
    "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "{{ 'x'.encode().ljust(10 ** 10) }}",
    NESTED + "{{ [ns.x] | map('string') | list }}",
    NESTED + "{{ '%s' % ([ns.x],) }}",
    NESTED + "{{ '{}'.format(ns.x) }}",
    NESTED + "{{ raise_exception(ns.x) }}",
    NESTED + "{% set a = ns.x %}" + NESTED + "{{ a == ns.x }}",
    NESTED + "{% set a = ns.x %}" + NESTED + "{{ a in [ns.x] }}",
    NESTED + "{% set a = ns.x %}" + NESTED + "{{ a is eq ns.x }}",
    NESTED + "{% set a = ns.x %}" + NESTED + "{{ [a].index(ns.x) }}",
    NESTED + "{% set a = ns.x %}" + NESTED + "{{ [a, ns.x] | sort }}",
    NESTED.replace("[ns.x, ns.x]", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "{% set ns = namespace(x=(1,)) %}{% macro f() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ f(ns.x, ns.x) }}{% endfor %}{{ {ns.x: 1}.get(ns.x) }}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_cannot_run_or_grow_for_ever(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_work, "MAX_WORK", template_work.MAX_WORK // 20)  # to fail sooner
    start = time.process_time()
    with pytest.raises((RequestError, ModelFileError)):
        render(source)
    assert time.process_time() - start < 10  # what is endless takes minutes


def test_long_chats_are_within_the_budget() -> None:
    """A megabyte of text in two thousand messages renders with a template that looks at every message."""
    messages = [{"role": role, "content": "words " * 90} for role in ("user", "assistant") * 1000]
    assert len(render(GEMMA, messages)) > 1_000_000


def test_the_budget_is_that_of_one_rendering() -> None:
    looped = template("{% for i in range(1000) %}{{ i }}{% endfor %}")
    budget = 1000 * template_work.STEP * 4
    for _ in range(3):
        template_sandbox.render(looped._template, {}, budget)
    with pytest.raises(template_work.WorkLimitError):
        template_sandbox.render(looped._template, {}, budget // 4)
