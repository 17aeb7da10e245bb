"""Tool calls over HTTP, through the official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from pagoda.engine.token_bytes import byte_alphabet
from pagoda.engine.tokenizer import Tokenizer
from pagoda.sim.scripted_executor import Script, ScriptedExecutor
from pagoda.weights.checkpoint import load_checkpoint
from tests.engine.schema_corpus import closed
from tests.engine.test_structured_output import random_logits
from tests.real_models import QWEN2_5_CODER, real_model
from tests.server.servers import (
    EOS,
    VOCAB_SIZE,
    RunningServer,
    byte_tokenizer,
    running,
    scripted_loader,
    user,
)

# The parts of Qwen2.5's that matter to the server; the real one is tested below.
HERMES_TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }} by <tool_call>{...}</tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
LLAMA_TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }} by "
    '{"name": function name, "parameters": dictionary}; <|python_tag|> {% endif %}'
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Zürich"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
STOP: Any = {"type": "function", "function": {"name": "stop"}}
TOOLS = [WEATHER, STOP]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'
STOP_CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


def saying(text: str) -> list[int]:
    return [*text.encode(), EOS]


@contextmanager
def tool_server(
    script: Script, template: str = HERMES_TEMPLATE, tokenizer: Tokenizer | None = None, **config: Any
) -> Iterator[RunningServer]:
    executors: list[ScriptedExecutor] = []
    tokenizer = (tokenizer or byte_tokenizer()).with_chat_template(template)
    load = scripted_loader(
        script,
        executors,
        max_model_len=4096,
        num_blocks=256,
        block_size=16,
        max_num_batched_tokens=512,
        tokenizer=tokenizer,
    )
    with running(load, **config) as server:
        server.executor = executors[0]
        yield server
        server.wait_until(server.is_idle)


def chat(server: RunningServer, messages: Any = None, **options: Any) -> Any:
    options = {"tools": TOOLS, "max_tokens": 600, **options}
    return server.client.chat.completions.create(
        model="test", messages=messages or user("weather?"), **options
    )


def called(message: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


def streamed(server: RunningServer, **options: Any) -> tuple[str, list[tuple[str, Any]], str, list[Any]]:
    """What a client puts together from the chunks, and the chunks."""
    chunks = list(chat(server, stream=True, **options))
    content, reason, calls = "", "", []
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        entries = choice.delta.tool_calls or []
        assert len({entry.index for entry in entries}) == len(entries)
        for entry in entries:
            if entry.index == len(calls):
                assert entry.id.startswith("call_") and entry.type == "function"
                calls.append([entry.function.name, ""])
            else:
                assert entry.id is None and entry.function.name is None
            calls[entry.index][1] += entry.function.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls], reason, chunks


ZURICH = ("get_weather", {"city": "Zürich", "days": 3})
REPLIES: list[tuple[str, str | None, list[tuple[str, Any]], str]] = [
    ("Just text.", "Just text.", [], "stop"),
    (CALL, None, [ZURICH], "tool_calls"),
    (f"{CALL}\n{STOP_CALL}", None, [ZURICH, ("stop", {})], "tool_calls"),
    (
        f"I look.\n{CALL}\n and {STOP_CALL} done",
        "I look.\n\n and  done",
        [ZURICH, ("stop", {})],
        "tool_calls",
    ),
    ("a < b, <tool_call> is a tag", "a < b, <tool_call> is a tag", [], "stop"),
]


@pytest.mark.parametrize(("reply", "content", "calls", "reason"), REPLIES)
def test_calls_and_text_are_told_apart(
    reply: str, content: str | None, calls: list[tuple[str, Any]], reason: str
) -> None:
    """B44, B47: whole and streamed, byte by byte."""
    with tool_server(saying(reply)) as server:
        choice = chat(server).choices[0]
        assert (choice.message.content, called(choice.message), choice.finish_reason) == (
            content,
            calls,
            reason,
        )
        ids = [call.id for call in choice.message.tool_calls or []]
        assert len(set(ids)) == len(calls) and all(call_id.startswith("call_") for call_id in ids)
        assert streamed(server)[:3] == (content or "", calls, reason)


def test_arguments_are_streamed_as_they_come() -> None:
    with tool_server(saying(CALL)) as server:
        *_, chunks = streamed(server)
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 20
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["tool_calls"]


def test_name_and_first_arguments_may_come_in_one_step() -> None:
    """B44: one entry for them."""
    alphabet = byte_alphabet()
    piece = '<tool_call>{"name": "stop", "arguments": {"a": 1'
    pieces = ["".join(alphabet[b] for b in piece.encode()), *["x"] * 8]
    tokenizer = custom_tokenizer(pieces)
    with tool_server([258, *b"}}</tool_call>", EOS], tokenizer=tokenizer) as server:
        content, calls, reason, chunks = streamed(server)
        assert (content, calls, reason) == ("", [("stop", {"a": 1})], "tool_calls")
        assert len(chunks[0].choices[0].delta.tool_calls) == 1


def custom_tokenizer(pieces: list[str], kinds: list[int] | None = None) -> Tokenizer:
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*byte_alphabet(), "<|eos|>", "<|start|>", *pieces],
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3] + (kinds or [1] * len(pieces)),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": EOS,
        }
    )


OPEN, CLOSE, OTHER = 258, 259, 260


def marker_tokenizer() -> Tokenizer:
    """<tool_call> and </tool_call> are control tokens, as is another."""
    pieces = ["<tool_call>", "</tool_call>", "<|other|>", *"abcdef"]
    return custom_tokenizer(pieces, [3, 3, 3] + [1] * 6)


def test_markers_that_are_control_tokens_are_seen_and_not_shown() -> None:
    """B46: by the parser only, and only when there are tools."""
    script = [*b"Ok ", OTHER, OPEN, *b'{"name": "stop", "arguments": {}}', CLOSE, OTHER, *b" done", EOS]
    with tool_server(script, tokenizer=marker_tokenizer()) as server:
        choice = chat(server).choices[0]
        assert (choice.message.content, called(choice.message)) == ("Ok  done", [("stop", {})])
        assert streamed(server)[:3] == ("Ok  done", [("stop", {})], "tool_calls")
        plain = chat(server, tools=openai.NOT_GIVEN).choices[0].message
        assert plain.content == 'Ok {"name": "stop", "arguments": {}} done' and not plain.tool_calls


def test_required_calls_use_markers_that_are_control_tokens() -> None:
    tokenizer = marker_tokenizer()
    with tool_server(random_logits(tokenizer, VOCAB_SIZE), tokenizer=tokenizer) as server:
        choice = chat(server, tool_choice="required", extra_body={"return_token_ids": True}).choices[0]
        assert choice.token_ids[0] == OPEN and choice.token_ids.count(CLOSE) == len(choice.message.tool_calls)
        check_calls(choice.message)


def check_calls(message: Any) -> None:
    assert message.tool_calls and message.content is None
    for name, arguments in called(message):
        schema = {t["function"]["name"]: t["function"].get("parameters", {"maxProperties": 0}) for t in TOOLS}
        Draft202012Validator(schema[name]).validate(arguments)


@pytest.fixture(scope="module", params=[HERMES_TEMPLATE, LLAMA_TEMPLATE], ids=["hermes", "llama3"])
def random_server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with tool_server(random_logits(byte_tokenizer(), VOCAB_SIZE), request.param) as server:
        yield server


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_comes_whatever_the_model_wants(random_server: RunningServer, seed: int) -> None:
    choice = chat(random_server, tool_choice="required", seed=seed).choices[0]
    assert choice.finish_reason == "tool_calls"
    check_calls(choice.message)
    content, calls, reason, _ = streamed(random_server, tool_choice="required", seed=seed)
    assert (content, calls, reason) == ("", called(choice.message), "tool_calls")


@pytest.mark.parametrize("name", ["get_weather", "stop"])
def test_a_named_function_is_called_once(random_server: RunningServer, name: str) -> None:
    wanted: Any = {"type": "function", "function": {"name": name}}
    for seed in range(3):
        choice = chat(random_server, tool_choice=wanted, seed=seed).choices[0]
        assert [call[0] for call in called(choice.message)] == [name]
        check_calls(choice.message)


def test_calls_in_parallel_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a model that would go on for ever."""
    monkeypatch.setattr("pagoda.server.tools.MAX_PARALLEL_CALLS", 3)
    logits = random_logits(byte_tokenizer(), VOCAB_SIZE)

    def endless(history: Sequence[int]) -> Any:
        row = logits(history).copy()
        row[EOS] = -1000
        return row

    for template in (HERMES_TEMPLATE, LLAMA_TEMPLATE):
        with tool_server(endless, template) as server:
            options: dict[str, Any] = {"tool_choice": "required", "tools": [STOP]}
            many = chat(server, **options, max_tokens=3000).choices[0]
            assert (len(many.message.tool_calls), many.finish_reason) == (3, "tool_calls")
            one = chat(server, **options, parallel_tool_calls=False).choices[0]
            assert (len(one.message.tool_calls), one.finish_reason) == (1, "tool_calls")
    with tool_server(saying(f"{CALL}\n{STOP_CALL}")) as server:
        assert called(chat(server, parallel_tool_calls=False).choices[0].message) == [ZURICH]


def begins(reply: list[int], tokenizer: Tokenizer) -> Callable[[Sequence[int]], Any]:
    """Says `reply`, and then at random what it may say; to one prompt."""
    logits = random_logits(tokenizer, VOCAB_SIZE)
    lengths: list[int] = []

    def script(history: Sequence[int]) -> Any:
        lengths.append(len(history))
        num_said = len(history) - lengths[0]
        return reply[num_said] if num_said < len(reply) else logits(history)

    return script


def strict(tool: Any) -> Any:
    return {**tool, "function": {**tool["function"], "strict": True}}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_control_tokens", [False, True])
def test_a_strict_tool_gets_arguments_of_its_schema_though_it_need_not_be_called(
    has_control_tokens: bool, seed: int
) -> None:
    tokenizer = marker_tokenizer() if has_control_tokens else byte_tokenizer()
    said = [*b"I look < here ", *([OPEN] if has_control_tokens else b"<tool_call>")]
    with tool_server(begins(said, tokenizer), tokenizer=tokenizer) as server:
        message = chat(server, tools=[strict(WEATHER), STOP], seed=seed).choices[0].message
        assert message.content.startswith("I look < here") and message.tool_calls
        message.content = None
        check_calls(message)


def test_a_marker_in_ordinary_tokens_is_no_way_around_a_schema() -> None:
    """Where it is a control token; the parser would take it for one."""
    tokenizer = marker_tokenizer()
    said = b'<tool_call>{"name": "stop", "arguments": {"a": 1}}'
    with tool_server(begins(list(said), tokenizer), tokenizer=tokenizer) as server:
        assert called(chat(server, max_tokens=len(said) + 20).choices[0].message) == [("stop", {"a": 1})]
    with tool_server(begins(list(said), tokenizer), tokenizer=tokenizer) as server:
        message = chat(server, tools=[strict(STOP)], max_tokens=len(said) + 20).choices[0].message
        assert message.content.startswith("<tool_call") and not message.content.startswith("<tool_call>")


def test_strict_tools_leave_a_reply_without_calls_alone() -> None:
    for reply in ("Just text, with < and {braces}.", "", CALL, f"Both:\n{CALL}\n{STOP_CALL} done"):
        with tool_server(saying(reply)) as server:
            loose, kept = (chat(server, tools=t).choices[0] for t in (TOOLS, [strict(t) for t in TOOLS]))
            assert (kept.message.content, kept.finish_reason) == (loose.message.content, loose.finish_reason)
            assert called(kept.message) == called(loose.message)


def test_a_strict_tool_is_refused_where_it_cannot_be_enforced() -> None:
    with tool_server(saying("x"), LLAMA_TEMPLATE) as server:
        with pytest.raises(openai.BadRequestError, match="required") as refusal:
            chat(server, tools=[STOP, strict(WEATHER)])
        assert refusal.value.param == "tools[1].function.strict"
        assert chat(server, tools=[strict(STOP)], tool_choice="required").choices[0].message.tool_calls
    with tool_server(saying("x")) as server:
        unusable = with_function(strict=True, parameters={"not": {}})
        with pytest.raises(openai.BadRequestError) as refusal:
            chat(server, **unusable)
        assert refusal.value.param == "tools"


def test_several_choices_have_calls_of_their_own(random_server: RunningServer) -> None:
    choices = chat(random_server, tool_choice="required", n=3, seed=2).choices
    for choice in choices:
        check_calls(choice.message)
    assert len({call.id for choice in choices for call in choice.message.tool_calls}) >= 3


def test_an_answer_in_a_schema_may_be_calls_instead(random_server: RunningServer) -> None:
    schema = closed({"ok": {"type": "boolean"}})
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for seed in range(6):
        choice = chat(random_server, response_format=wanted, seed=seed).choices[0]
        if choice.message.tool_calls:
            check_calls(choice.message)
        else:
            Draft202012Validator(schema).validate(json.loads(choice.message.content))


LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 3}}'


@pytest.mark.parametrize(
    ("reply", "content", "calls"),
    [
        (LLAMA_CALL, None, [ZURICH]),
        (f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}", None, [ZURICH, ZURICH]),
        ('{"answer": 42}', '{"answer": 42}', []),
        ("Hello", "Hello", []),
    ],
)
def test_llama_3_writes_json(reply: str, content: str | None, calls: list[tuple[str, Any]]) -> None:
    with tool_server(saying(reply), LLAMA_TEMPLATE) as server:
        message = chat(server).choices[0].message
        assert (message.content, called(message)) == (content, calls)
        assert streamed(server)[:2] == (content or "", calls)


def prompt_text(server: RunningServer) -> str:
    """Of the latest request."""
    sampling = [r.sampling for step in server.executor.steps for r in step.requests if r.sampling is not None]
    return byte_tokenizer().decode(sampling[-1].prompt_token_ids)


def test_the_template_is_told_of_the_tools_unless_none_may_be_called() -> None:
    with tool_server(saying(CALL)) as server:
        chat(server)
        assert prompt_text(server).startswith("get_weather by <tool_call>")
        message = chat(server, tool_choice="none").choices[0].message
        assert message.content == CALL and message.tool_calls is None
        assert prompt_text(server) == "<user>weather?<a>"
        count = server.http.post("/tokenize", json={"messages": user("x"), "tools": TOOLS}).json()["count"]
        assert count > len("<user>x<a>")


def test_calls_and_their_results_come_back_in_the_history() -> None:
    with tool_server(saying("3 degrees")) as server:
        first = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
        history = [
            *user("?"),
            {"role": "assistant", "content": None, "tool_calls": first},
            {"role": "tool", "tool_call_id": "call_1", "content": "-3"},
        ]
        assert chat(server, history).choices[0].message.content == "3 degrees"
        assert prompt_text(server).endswith('<user>?<assistant>[f {"a": 1}]<tool>-3<a>')


def test_a_call_that_is_cut_off_ends_for_length() -> None:
    with tool_server(saying(CALL)) as server:
        choice = chat(server, max_tokens=60).choices[0]
        assert choice.finish_reason == "length"
        assert CALL.find(choice.message.tool_calls[0].function.arguments) > 0
        calls = [c.choices[0] for c in chat(server, max_tokens=60, stream=True)]
        assert calls[-1].finish_reason == "length"


def test_logprobs_cover_the_tokens_of_calls() -> None:
    with tool_server(saying(STOP_CALL)) as server:
        choice = chat(server, logprobs=True).choices[0]
        assert len(choice.logprobs.content) == len(STOP_CALL)
        chunks = chat(server, logprobs=True, stream=True)
        assert sum(len(c.choices[0].logprobs.content) for c in chunks) == len(STOP_CALL)


def test_the_parser_can_be_named() -> None:
    template = "{{ tools }}{{ messages[0].content }}"
    with tool_server(saying(CALL), template) as server, pytest.raises(openai.BadRequestError) as refusal:
        chat(server)
    assert "--tool-call-parser" in refusal.value.message
    with tool_server(saying(CALL), template, tool_call_parser="hermes") as server:
        assert called(chat(server).choices[0].message) == [ZURICH]


def with_function(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    (with_function(name=""), "tools[0].function.name"),
    (with_function(name="a b"), "tools[0].function.name"),
    (with_function(parameters=[1]), "tools[0].function.parameters"),
    (with_function(strict="yes"), "tools[0].function.strict"),
    ({"tools": [STOP, STOP]}, "tools[1].function.name"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({**with_function(parameters={"properties": "bar"}), "tool_choice": "required"}, "tools"),
    ({**with_function(parameters={"not": {}}), "tool_choice": "required"}, "tools"),
    ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "tools"),
    ({"extra_body": {"functions": [{}]}}, "functions"),
]


@pytest.mark.parametrize(("options", "param"), REFUSED)
def test_what_is_malformed_is_named(
    random_server: RunningServer, options: dict[str, Any], param: str
) -> None:
    """B49, B50"""
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(random_server, **options)
    assert refusal.value.param == param


def test_templates_without_tools_refuse_them() -> None:
    template = "{{ messages[0].content }}"
    with tool_server(saying("x"), template) as server:
        with pytest.raises(openai.BadRequestError, match="does not support tools") as refusal:
            chat(server)
        assert refusal.value.param == "tools"
        assert chat(server, tool_choice="none").choices[0].message.content == "x"


@pytest.mark.real_model
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_qwens_template(choice: str) -> None:
    """Qwen2.5's own template; what is said is scripted."""
    with load_checkpoint(real_model(QWEN2_5_CODER)) as checkpoint:
        template = Tokenizer.from_gguf(checkpoint.metadata).chat_template
    assert template is not None
    script: Callable[..., Any] | list[int] = saying(f"Sure.\n{CALL}")
    if choice == "required":
        script = random_logits(byte_tokenizer(), VOCAB_SIZE)
    with tool_server(script, template.source) as server:
        message = chat(server, tool_choice=choice).choices[0].message
        assert '"name": "get_weather"' in prompt_text(server)
        if choice == "required":
            check_calls(message)
        else:
            assert (message.content, called(message)) == ("Sure.", [ZURICH])
