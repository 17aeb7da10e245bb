"""The official client against SmolLM2 on the native backend."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.servers import RunningServer

pytestmark = pytest.mark.real_model
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
GREEDY: dict[str, Any] = {"model": "smol", "temperature": 0, "max_tokens": 12}


def test_a_chat_and_its_repetition_from_the_cache(smol: RunningServer) -> None:
    """B58: the second answer is the same, from a cached prompt."""
    smol.http.post("/cache/reset")
    cold = smol.client.chat.completions.create(messages=QUESTION, **GREEDY)
    warm = smol.client.chat.completions.create(messages=QUESTION, **GREEDY)
    assert "Paris" in cold.choices[0].message.content
    assert warm.choices[0].message.content == cold.choices[0].message.content
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == warm.usage.prompt_tokens - 1


def test_a_stream_equals_the_whole_answer(smol: RunningServer) -> None:
    whole = smol.client.chat.completions.create(messages=QUESTION, **GREEDY)
    chunks = list(
        smol.client.chat.completions.create(
            messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_log_probabilities(smol: RunningServer) -> None:
    """B21, B22: greedy takes the likeliest token, and echo scores the prompt."""
    chat = smol.client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=3, **GREEDY)
    entries = chat.choices[0].logprobs.content
    assert "".join(e.token for e in entries) == chat.choices[0].message.content
    for e in entries:
        assert len(e.top_logprobs) == 3 and e.top_logprobs[0].token == e.token
        assert e.logprob == e.top_logprobs[0].logprob <= 0
    options = {**GREEDY, "max_tokens": 0}
    scored = smol.client.completions.create(
        prompt="The capital of France is Paris", echo=True, logprobs=1, **options
    )
    made = scored.choices[0].logprobs
    assert "".join(made.tokens) == scored.choices[0].text == "The capital of France is Paris"
    assert made.token_logprobs[-1] > -2.0


def test_choices_have_their_own_seeds(smol: RunningServer) -> None:
    """B33"""
    options = {**GREEDY, "temperature": 1.0, "seed": 11}
    four = [
        c.message.content
        for c in smol.client.chat.completions.create(messages=QUESTION, n=4, **options).choices
    ]
    again = smol.client.chat.completions.create(messages=QUESTION, n=4, **options)
    assert [c.message.content for c in again.choices] == four and len(set(four)) > 1


def test_vllms_first_calls_work_as_they_are(smol: RunningServer) -> None:
    completion = {"model": "smol", "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}
    answer = smol.http.post("/v1/completions", json=completion).json()
    assert answer["choices"][0]["text"] and answer["usage"]["completion_tokens"] == 7
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Who won the world series in 2020?"},
    ]
    chat = smol.http.post(
        "/v1/chat/completions", json={"model": "smol", "messages": messages, "max_tokens": 8}
    )
    assert chat.json()["choices"][0]["message"]["content"]
