"""/v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.servers import HELLO, HELLO_TOKENS, RunningServer, parrot, serving, text_tokens


def complete(server: RunningServer, prompt: Any, **options: Any) -> Any:
    return server.client.completions.create(model="test", prompt=prompt, **options)


@pytest.mark.parametrize("prompt", ["abc<a>", text_tokens("abc<a>"), ["abc<a>"], [text_tokens("abc<a>")]])
def test_every_form_of_a_prompt(server: RunningServer, prompt: Any) -> None:
    answer = complete(server, prompt)
    assert [c.text for c in answer.choices] == ["abc"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 4)
    assert answer.usage.prompt_tokens_details.cached_tokens in range(6)


@pytest.mark.parametrize("streams", [False, True])
def test_several_prompts_have_consecutive_indexes(server: RunningServer, streams: bool) -> None:
    """B17, B34: every choice of every prompt ends once, under its own index."""
    answer = complete(server, ["one<a>", "three<a>", "no<a>"], n=2, stream=streams)
    texts, reasons = [""] * 6, [""] * 6
    for chunk in answer if streams else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == ["one", "one", "three", "three", "no", "no"]
    assert reasons == ["stop"] * 6


def test_usage_counts_a_prompt_once(server: RunningServer) -> None:
    """F05"""
    usage = complete(server, ["one<a>", "three<a>"], n=3).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (6 + 8, 3 * 4 + 3 * 6)
    assert usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_echo_with_logprobs_covers_the_prompt(
    server: RunningServer, max_tokens: int, streams: bool, n: int
) -> None:
    """B21: an entry a prompt token, then one a generated token, in every choice."""
    answer = complete(server, "abcde<a>", echo=True, logprobs=1, max_tokens=max_tokens, stream=streams, n=n)
    choices = [c for chunk in answer for c in chunk.choices] if streams else answer.choices
    for index in range(n):
        check_echo([choice for choice in choices if choice.index == index], max_tokens)


def check_echo(parts: list[Any], max_tokens: int) -> None:
    text = "".join(part.text for part in parts)
    assert text == "abcde<a>" + "abc"[:max_tokens]
    tokens = [token for part in parts for token in part.logprobs.tokens]
    assert "".join(tokens) == text and len(tokens) == 8 + max_tokens
    logprobs = [lp for part in parts for lp in part.logprobs.token_logprobs]
    assert logprobs[0] is None and all(lp <= 0 for lp in logprobs[1:])
    assert [o for part in parts for o in part.logprobs.text_offset] == list(range(8 + max_tokens))
    for token, top in zip(tokens[1:], [t for p in parts for t in p.logprobs.top_logprobs][1:], strict=True):
        assert token in top


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_log_probabilities_of_the_prompt_are_streamed_as_they_are_answered(
    server: RunningServer, path: str, n: int
) -> None:
    asked = {"messages": HELLO} if "chat" in path else {"prompt": ["abc<a>", "no<a>"]}
    body = {**asked, "prompt_logprobs": 1, "max_tokens": 2, "n": n}
    whole = server.http.post(path, json=body).json()
    text = server.http.post(path, json={**body, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    if "chat" in path:
        assert [c["prompt_logprobs"] for c in chunks if "prompt_logprobs" in c] == [whole["prompt_logprobs"]]
        assert "prompt_logprobs" in chunks[0] and len(whole["prompt_logprobs"]) == HELLO_TOKENS
        return
    for choice in whole["choices"]:
        assert len(choice["prompt_logprobs"]) == (6 if choice["index"] < n else 5)
        parts = [e for c in chunks for e in c["choices"] if e["index"] == choice["index"]]
        assert [e["prompt_logprobs"] for e in parts if "prompt_logprobs" in e] == [choice["prompt_logprobs"]]
        assert "prompt_logprobs" in parts[0]


@pytest.mark.parametrize("streams", [False, True])
def test_an_echo_that_is_aborted_early_has_its_text(streams: bool) -> None:
    prompt = "y" * 100  # four steps
    with serving(parrot, before_step=lambda step: time.sleep(0.1)) as server, ThreadPoolExecutor() as pool:
        call = pool.submit(
            server.http.post,
            "/v1/completions",
            json={"prompt": prompt, "echo": True, "logprobs": 0, "request_id": "mine", "stream": streams},
        )
        server.wait_until(lambda: server.scheduler.num_running == 1)
        server.http.delete("/requests/mine")
        answer = call.result()
    lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
    (choice,) = json.loads(lines[0] if streams else answer.text)["choices"]
    assert (answer.status_code, choice["finish_reason"], choice["text"]) == (200, "abort", prompt)
    assert choice["logprobs"]["token_logprobs"] == [None] * len(prompt)


def test_echo_alone_repeats_the_prompt(server: RunningServer) -> None:
    assert complete(server, "abc<a>", echo=True).choices[0].text == "abc<a>abc"
    assert complete(server, text_tokens("abc<a>"), echo=True, max_tokens=1).choices[0].text == "abc<a>a"
    chunks = list(complete(server, "abc<a>", echo=True, n=2, stream=True))
    for index in range(2):
        text = "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)
        assert text == "abc<a>abc"


def test_logprobs_list_the_sampled_token_beside_the_likeliest() -> None:
    """B22"""
    logits = [0.0] * 267
    logits[ord("a")], logits[ord("b")] = 3.0, 2.5
    with serving([logits]) as server:
        choice = complete(server, "p", logprobs=1, temperature=1.5, seed=5, max_tokens=16).choices[0]
    made = choice.logprobs
    assert len(made.tokens) == 16 and set(made.tokens) - {"a"}
    for token, logprob, top in zip(made.tokens, made.token_logprobs, made.top_logprobs, strict=True):
        assert top[token] == logprob and "a" in top
        assert len(top) == (1 if token == "a" else 2)


def test_bytes_of_a_part_of_a_character_are_spelled_out(server: RunningServer) -> None:
    made = complete(server, "é<a>", logprobs=0).choices[0]
    assert made.text == "é" and made.logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9"]


def test_max_tokens_has_openais_default_and_yields_to_the_room_there_is(server: RunningServer) -> None:
    assert complete(server, "y").usage.completion_tokens == 16
    assert complete(server, "y" * 120).usage.completion_tokens == 8


@pytest.mark.parametrize(("asked", "got"), [(None, 4), (3, 3), (999, 4), (0, 0)])
def test_the_operators_cap_holds(asked: int | None, got: int) -> None:
    """B29: unset, null, or too much: never more than the cap."""
    with serving([ord("x")], config={"max_output_tokens": 4}) as server:
        body = {"prompt": "y", "ignore_eos": True}
        body |= {} if asked is None else {"max_tokens": asked}
        for sent in (body, {**body, "max_tokens": asked}):
            usage = server.http.post("/v1/completions", json=sent).json()["usage"]
            assert usage["completion_tokens"] == got
        refused = server.http.post("/v1/completions", json={**body, "max_tokens": -1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
        chat = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "y"}]})
        assert chat.json()["usage"]["completion_tokens"] == 4


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    made = server.http.post("/tokenize", json={"prompt": "DEF<|eos|>é", "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 128
    back = server.http.post("/detokenize", json={"tokens": made["tokens"]}).json()
    assert back == {"prompt": "DEF<|eos|>é"}


def test_models_and_version(server: RunningServer) -> None:
    (model,) = server.client.models.list().data
    assert (model.id, model.owned_by) == ("test", "pagoda")
    assert server.client.models.retrieve("test").max_model_len == 128  # type: ignore[attr-defined]
    assert server.http.get("/version").json()["version"]
