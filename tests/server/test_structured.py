"""Structured output over HTTP, through the official client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from tests.engine.schema_corpus import PERSON, REFUSED, SCHEMAS
from tests.engine.test_structured_output import PAIR, random_logits
from tests.server.servers import HELLO, VOCAB_SIZE, RunningServer, byte_tokenizer, serving, user

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Says at random what it may say."""
    with serving(
        random_logits(byte_tokenizer(), VOCAB_SIZE), max_model_len=600, num_blocks=256, block_size=16
    ) as running:
        yield running


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def chat(server: RunningServer, **options: Any) -> Any:
    return server.client.chat.completions.create(model="test", messages=HELLO, seed=3, **options)  # type: ignore[arg-type]


def check(text: str, schema: Any) -> None:
    Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_kept_to_strict_or_not(server: RunningServer, strict: bool | None) -> None:
    choices = chat(server, response_format=json_schema(PAIR, strict=strict), n=3).choices
    for choice in choices:
        assert choice.finish_reason == "stop"
        check(choice.message.content, PAIR)


def test_a_json_object_is_one(server: RunningServer) -> None:
    content = chat(server, response_format={"type": "json_object"}).choices[0].message.content
    assert isinstance(json.loads(content), dict)
    assert chat(server, response_format={"type": "text"}, max_tokens=3).choices[0].message.content


def test_a_stream_joins_to_the_whole_answer(server: RunningServer) -> None:
    whole = chat(server, response_format=json_schema(PERSON)).choices[0].message.content
    chunks = chat(server, response_format=json_schema(PERSON), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    check(whole, PERSON)


class City(BaseModel):
    name: str
    inhabitants: int
    capital: bool


def test_the_clients_own_classes_come_back(server: RunningServer) -> None:
    completion = server.client.chat.completions.parse(
        model="test", messages=HELLO, response_format=City, seed=1  # type: ignore[arg-type]
    )  # fmt: skip
    assert isinstance(completion.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[ab]{2}"}, {"aa", "ab", "ba", "bb"}),
        ({"grammar": 'start: "x" ("1" | "2")'}, {"x1", "x2"}),
        ({"json": {"enum": [1, 2]}}, {"1", "2"}),
        ({"json": '{"const": null}'}, {"null"}),
    ],
)
def test_vllms_constraints(server: RunningServer, constraint: dict[str, Any], allowed: set[str]) -> None:
    assert chat(server, extra_body={"structured_outputs": constraint}).choices[0].message.content in allowed
    completion = server.client.completions.create(
        model="test", prompt=["a", "b"], extra_body={"structured_outputs": constraint}
    )
    assert {choice.text for choice in completion.choices} <= allowed


def refusal(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    num_steps = len(server.executor.steps)
    response = server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 5, **body})
    assert response.status_code == 400, response.text
    assert len(server.executor.steps) == num_steps, "something was computed"
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("name", sorted(REFUSED - {"true", "false"}))
def test_a_bad_schema_is_refused_and_the_server_goes_on(server: RunningServer, name: str) -> None:
    """B49, B50: 400 before queueing, streamed or not."""
    for stream in (False, True):
        wanted = json_schema(SCHEMAS[name], strict=True)
        assert refusal(server, {"response_format": wanted, "stream": stream})["param"] == "response_format"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema([1])}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {}}, "guided_json"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_named(server: RunningServer, body: dict[str, Any], param: str) -> None:
    assert refusal(server, body)["param"] == param


def test_hard_schemas_are_answered_soon(server: RunningServer) -> None:
    """B49: a million alternatives, 500 levels."""
    deep = '{"properties":{"a":' * 500 + "{}" + "}}" * 500
    wide = json.dumps({"enum": [f"v{i}" for i in range(10**6)]})
    start_s = time.monotonic()
    for schema in (deep, wide):
        wanted = '{"type":"json_schema","json_schema":{"name":"a","schema":' + schema + "}}"
        body = '{"messages":[{"role":"user","content":"x"}],"response_format":' + wanted + "}"
        response = server.http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
    assert time.monotonic() - start_s < 10


def test_a_grammar_does_not_hold_up_others() -> None:
    """While it is compiled and used, a stream without one goes on."""
    with serving(
        random_logits(byte_tokenizer(), VOCAB_SIZE), max_model_len=600, num_blocks=256, block_size=16
    ) as server:
        stream = server.client.chat.completions.create(
            model="test", messages=user("x"), stream=True, max_tokens=200, extra_body={"ignore_eos": True}
        )  # type: ignore[call-overload]
        next(stream)
        content = chat(server, response_format=json_schema({"enum": [f"v{i}" for i in range(5000)]}))
        assert content.choices[0].message.content.startswith('"v')
        assert len(list(stream)) > 100


@pytest.mark.real_model
def test_a_real_model_keeps_to_a_schema(smol: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "country": {"enum": ["France", "Japan", "Peru"]},
            "population_millions": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["city", "country", "population_millions"],
        "additionalProperties": False,
    }
    options: dict[str, Any] = {"model": "smol", "max_tokens": 100, "response_format": json_schema(schema)}
    question = [{"role": "user", "content": "Give me facts about Paris as JSON."}]
    answer = smol.client.chat.completions.create(messages=question, temperature=1.5, seed=7, n=2, **options)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        check(choice.message.content, schema)
    greedy = smol.client.chat.completions.create(messages=question, temperature=0, **options)
    assert json.loads(greedy.choices[0].message.content)["country"] == "France"


@pytest.mark.real_model
def test_a_real_model_chooses(smol: RunningServer) -> None:
    answer = smol.client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": "Is the sky blue? Answer yes or no."}],
        temperature=0,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert answer.choices[0].message.content in ("yes", "no")


@pytest.mark.real_model
def test_a_real_template_without_tools_says_so(smol: RunningServer) -> None:
    tool: Any = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(openai.BadRequestError, match="does not support tools"):
        smol.client.chat.completions.create(model="smol", messages=HELLO, tools=[tool])  # type: ignore[arg-type]
