"""What is wrong is refused before anything is sent, with OpenAI's error object and the field's name."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.servers import HELLO, RunningServer, parrot, serving, user

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
V = 267  # vocabulary size


def refused(server: RunningServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


WRONG: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", "warm"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("min_p", 2),
    ("n", 0),
    ("n", 129),
    ("n", 1.5),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("min_tokens", -1),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("stop", ""),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop_token_ids", [V]),
    ("stop_token_ids", [-1]),
    ("seed", "x"),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("prompt_logprobs", 21),
    ("request_id", "with space"),
    ("request_id", "x" * 129),
    ("priority", 1),  # nobody would look at it under fcfs
    ("model", 5),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_names_its_field(server: RunningServer, name: str, value: Any) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"})):
        error = refused(server, path, {**body, name: value})
        assert (error["param"] or "").split(".")[0].split("[")[0] == name, error
        assert error["type"] == "invalid_request_error"


KEYS = ["-1", str(V), str(V + 1), str(2**40), "abc", "1.5", "", "additionalProp1", "0x1", " 1"]


@pytest.mark.parametrize("bias", [*({key: 1} for key in KEYS), {"1": 1000}, {"1": None}, {"1": "x"}, [1]])
def test_logit_bias_is_checked_at_the_edge(server: RunningServer, bias: Any) -> None:
    """B31, B32: the message names the key; the engine goes on."""
    error = refused(server, CHAT, {"messages": HELLO, "logit_bias": bias})
    assert error["param"].startswith("logit_bias")
    key = next(iter(bias)) if isinstance(bias, dict) else ""
    assert key.strip() in error["message"] or "1000" in error["message"]
    body = {"messages": HELLO, "logit_bias": {"1": 5, str(V - 1): -100}}
    assert server.http.post(CHAT, json=body).status_code == 200


def test_numbers_that_json_has_not_are_refused(server: RunningServer) -> None:
    """B31: NaN and infinities pass Python's JSON reader."""
    for text in ('{"prompt": "a", "logit_bias": {"1": NaN}}', '{"prompt": "a", "temperature": Infinity}'):
        response = server.http.post(COMPLETIONS, content=text, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": 5}',
        b'{"messages": [5]}',
        b"[" * 5000,
    ],
)
def test_malformed_bodies_are_refused(server: RunningServer, body: bytes) -> None:
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        response = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and response.json()["error"]["message"], response.text


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [""], [V], [-1], [True], [2**40], ["a", 1], [[1], "a"], [[1], [V]], 5, None, {}]
)
def test_wrong_prompts_are_refused(server: RunningServer, prompt: Any) -> None:
    """B31: all prompts of a call are accepted, or none."""
    assert refused(server, COMPLETIONS, {"prompt": prompt})["param"].startswith("prompt")
    assert server.is_idle()


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
    ],
)
def test_wrong_messages_say_where(server: RunningServer, messages: Any, param: str) -> None:
    """B57: a part that is not text is refused."""
    assert refused(server, CHAT, {"messages": messages})["param"] == param


UNSUPPORTED: list[tuple[str, Any]] = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("guided_regex", "a+"),
    ("use_beam_search", True),
    ("truncate_prompt_tokens", 5),
    ("bad_words", ["a"]),
    ("reasoning_effort", "high"),
    ("no_such_field", 1),
    ("temprature", 0.5),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_fields_that_cannot_be_honoured_are_named(server: RunningServer, name: str, value: Any) -> None:
    error = refused(server, CHAT, {"messages": HELLO, name: value})
    assert error["param"] == name and name in error["message"]


def test_fields_that_ask_for_nothing_are_taken(server: RunningServer) -> None:
    neutral = {
        "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "tools": None,
        "tool_choice": "none", "response_format": {"type": "text"}, "use_beam_search": False,
    }  # fmt: skip
    answer = server.client.chat.completions.create(model="test", messages=HELLO, extra_body=neutral)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "Hello"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        (COMPLETIONS, {}, "prompt"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": 2}, "logprobs"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "stream_options": {"x": 1}, "stream": True}, "stream_options.x"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/detokenize", {"tokens": [V]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_fields_that_contradict_each_other(server: RunningServer, path: str, body: Any, param: str) -> None:
    assert refused(server, path, body)["param"] == param


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("num_tokens", [127, 128, 129, 1280])
def test_a_prompt_that_does_not_fit_is_refused_with_its_numbers(
    server: RunningServer, num_tokens: int, streams: bool
) -> None:
    """B25, B26, B27: 400 before anything else, never cut; the next request is served."""
    prompt = [ord("y")] * num_tokens
    body = {"prompt": prompt, "max_tokens": 1, "stream": streams}
    if num_tokens <= 127:
        assert server.http.post(COMPLETIONS, json=body).status_code == 200
    else:
        error = refused(server, COMPLETIONS, body)
        assert str(num_tokens) in error["message"] and "128" in error["message"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        text = refused(server, CHAT, {"messages": user("y" * num_tokens), "stream": streams})
        assert (text["param"], text["code"]) == ("messages", "context_length_exceeded")
    error = refused(server, COMPLETIONS, {**body, "prompt": "abc", "max_tokens": 126})
    assert error["param"] == "max_tokens" and all(n in error["message"] for n in ("3", "126", "128"))
    assert server.client.completions.create(model="test", prompt="a<a>").choices[0].text == "a"


def test_a_prompt_beyond_the_kv_pool_is_refused_at_once() -> None:
    """B26, E01: it could never run, and does not hold up others."""
    with serving(parrot, num_blocks=8) as server:
        error = refused(server, COMPLETIONS, {"prompt": "y" * 60, "max_tokens": 1})
        assert error["param"] == "prompt" and "60" in error["message"] and "32" in error["message"]
        assert server.client.completions.create(model="test", prompt="a<a>").choices[0].text == "a"


def test_what_is_not_there(server: RunningServer) -> None:
    assert refused(server, "/v1/nothing", {}, 404)["type"] == "not_found_error"
    assert refused(server, CHAT, {"messages": HELLO, "model": "gpt"}, 404)["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="gpt"):
        server.client.models.retrieve("gpt")
    assert server.http.get(CHAT).status_code == 405
    assert server.http.delete("/requests/none").json()["error"]["param"] == "request_id"


def test_text_that_no_utf8_holds_does_no_harm(server: RunningServer) -> None:
    for body in ({"prompt": "\ud800<a>"}, {"prompt": "a", "model": "\ud800"}, {"prompt": "a", "\ud800": 1}):
        text = json.dumps(body)
        response = server.http.post(COMPLETIONS, content=text, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 404), response.text
        json.loads(response.content)


def test_the_examples_of_the_description_work(server: RunningServer) -> None:
    """B32: a body made of the examples of the OpenAPI description is answered."""
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    for path, name in ((CHAT, "ChatCompletionBody"), (COMPLETIONS, "CompletionBody")):
        fields = schemas[name]["properties"]
        body = {key: field["examples"][0] for key, field in fields.items() if "examples" in field}
        assert "logit_bias" in body and server.http.post(path, json=body).status_code == 200


def test_a_body_that_is_too_large_gets_413() -> None:
    with serving(parrot, config={"max_body_bytes": 2000}) as server:
        body = json.dumps({"prompt": "y" * 3000})
        error = refused(server, COMPLETIONS, {"prompt": "y" * 3000}, 413)
        assert "2000" in error["message"]

        def chunks() -> Any:  # no Content-Length tells
            yield body[:1500].encode()
            yield body[1500:].encode()

        response = server.http.post(
            COMPLETIONS, content=chunks(), headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 413
        assert server.client.completions.create(model="test", prompt="a<a>").choices[0].text == "a"
