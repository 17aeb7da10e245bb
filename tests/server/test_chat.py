"""/v1/chat/completions, through the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.servers import (
    EOS,
    HELLO,
    HELLO_TOKENS,
    RunningServer,
    parrot,
    piece,
    serving,
    text_tokens,
    user,
)


def chat(server: RunningServer, messages: list[Any] = HELLO, **options: Any) -> Any:
    return server.client.chat.completions.create(model="test", messages=messages, **options)


def stream(server: RunningServer, messages: list[Any] = HELLO, **options: Any) -> list[Any]:
    return list(chat(server, messages, stream=True, **options))


def joined(chunks: list[Any], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
    return "".join(c.delta.content or "" for c in choices)


def finish_reasons(chunks: list[Any], index: int = 0) -> list[str]:
    choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
    return [c.finish_reason for c in choices if c.finish_reason is not None]


def test_an_answer_has_text_reason_and_usage(server: RunningServer) -> None:
    answer = chat(server, user("Grüße 😀"))
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Grüße 😀")
    assert (choice.finish_reason, choice.index, answer.object) == ("stop", 0, "chat.completion")
    num_tokens = len("Grüße 😀".encode()) + 1  # the end token was generated, too
    assert answer.usage.completion_tokens == num_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + num_tokens


@pytest.mark.parametrize("text", ["a", "plain words", "Grüße", "世界 and 😀", "👨‍👩‍👧"])
def test_a_stream_joins_to_the_whole_answer(server: RunningServer, text: str) -> None:
    """B01: characters whose bytes are spread over tokens come out whole."""
    chunks = stream(server, user(text))
    assert joined(chunks) == text == chat(server, user(text)).choices[0].message.content
    assert finish_reasons(chunks) == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_role_comes_with_the_first_token() -> None:
    """G02, G09: while a prompt of several chunks is computed, nothing is sent that looks like a token."""
    with serving(parrot, max_num_batched_tokens=8) as server:
        chunks = stream(server, user("three chunks of prompt"))
        num_steps_before = [len(step.requests) for step in server.executor.steps]
    assert len(num_steps_before) > 3
    first = chunks[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "t")
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert all(chunk.choices[0].delta.content for chunk in chunks[:-1])


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_no_usage_chunk_unless_asked(server: RunningServer, options: dict[str, Any]) -> None:
    """B13: clients index choices[0] of every chunk."""
    assert all(chunk.choices and chunk.usage is None for chunk in stream(server, **options))


def test_the_usage_chunk_is_the_last(server: RunningServer) -> None:
    """B13, B58"""
    *chunks, last = stream(server, stream_options={"include_usage": True})
    assert last.choices == [] and all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.usage == chat(server).usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )


def test_continuous_usage_counts_every_token(server: RunningServer) -> None:
    """G04: a token that shows no text yet is counted in a chunk of its own."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server, user("é😀"), stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == [1, 2, 3, 4, 5, 6, 7, 7]
    assert all(chunk.usage.prompt_tokens == len("<user>é😀<a>".encode()) for chunk in chunks)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(1, "length"), (5, "length"), (6, "stop"), (None, "stop")]
)
def test_the_finish_reason_is_the_right_one(
    server: RunningServer, max_tokens: int | None, reason: str, streams: bool
) -> None:
    """B17, B18: exactly one, and every token is counted."""
    if streams:
        chunks = stream(server, max_tokens=max_tokens, stream_options={"include_usage": True})
        reasons, usage = finish_reasons(chunks), chunks[-1].usage
    else:
        answer = chat(server, max_completion_tokens=max_tokens)
        reasons, usage = [answer.choices[0].finish_reason], answer.usage
    assert reasons == [reason]
    assert usage.completion_tokens == min(max_tokens or 6, 6)


def test_cached_tokens_are_always_reported(server: RunningServer) -> None:
    """B58: 0 on a miss, and never the last prompt token on a hit."""
    messages = user("never said before")
    num_prompt = len("<user>never said before<a>")
    cold, warm = chat(server, messages).usage, chat(server, messages).usage
    assert cold.prompt_tokens_details.cached_tokens < len("<user>n")
    assert warm.prompt_tokens_details.cached_tokens == num_prompt - 1
    for salted in ({"cache_salt": "other"}, {"cache": False}):
        again = chat(server, messages, extra_body=salted).usage
        assert again.prompt_tokens_details.cached_tokens == 0
        assert "cached_tokens" in json.loads(again.prompt_tokens_details.model_dump_json())


STOPS: list[tuple[list[int], list[str], str, str | None]] = [
    ([piece("DEF"), piece("G"), piece("HI"), piece("J"), EOS], ["DEFGHIJ"], "", "DEFGHIJ"),  # B06
    ([piece("DEF"), piece("G"), piece("HI"), piece("X"), EOS], ["DEFGHIJ"], "DEFGHIX", None),  # B06
    ([piece("DEF"), piece("G"), piece("HI"), piece("J"), EOS], ["GH", "GHI"], "DEF", "GH"),  # B06
    ([ord("w"), piece("?\n"), ord("z"), EOS], ["\n"], "w?", "\n"),  # B07
    ([piece("ple"), piece("as"), EOS], ["assistant"], "pleas", None),  # B08
]


@pytest.mark.parametrize(("script", "stop", "text", "stop_reason"), STOPS)
def test_stop_strings_across_tokens(
    script: list[int], stop: list[str], text: str, stop_reason: str | None
) -> None:
    """B06, B07, B08: none of a match is sent, all of a near miss is, with and without streaming."""
    with serving(script) as server:
        choice = chat(server, stop=stop).choices[0]
        chunks = stream(server, stop=stop)
    assert choice.message.content == joined(chunks) == text
    assert choice.finish_reason == "stop" and finish_reasons(chunks) == ["stop"]
    assert choice.stop_reason == chunks[-1].choices[0].stop_reason == stop_reason


def test_stop_strings_can_be_kept_and_stop_tokens_named(server: RunningServer) -> None:
    kept = chat(server, stop="ll", extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.message.content == "Hell"
    token = chat(server, extra_body={"stop_token_ids": [ord("l")]}).choices[0]
    assert (token.message.content, token.finish_reason, token.stop_reason) == ("He", "stop", ord("l"))
    forced = chat(server, max_tokens=8, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert forced.choices[0].message.content == "Hello<|eos|><|eos|><|eos|>"
    least = chat(server, max_tokens=9, extra_body={"min_tokens": 8}).choices[0].message.content
    assert least.startswith("Hello") and len(least) > 5


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_are_those_of_the_sampled_tokens(streams: bool) -> None:
    """B22: an entry a token, held-back ones too; the tokens join to the text."""
    logits = [-30.0] * 267
    logits[ord("a")], logits[ord("b")], logits[ord("q")] = 3.0, 2.5, 2.4
    with serving([logits]) as server:
        options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 12, "temperature": 1.5}
        options |= {"seed": 3, "stop": ["aaaaaaaaaaaaaaa"]}
        if streams:
            chunks = stream(server, **options)
            entries = [e for c in chunks for e in (c.choices[0].logprobs or NO_LOGPROBS).content]
            text = joined(chunks)
        else:
            choice = chat(server, **options).choices[0]
            entries, text = choice.logprobs.content, choice.message.content
    assert len(entries) == 12
    assert b"".join(bytes(e.bytes) for e in entries).decode("utf-8", "replace") == text
    assert {e.token for e in entries} == {"a", "b", "q"}
    for e in entries:
        assert [t.token for t in e.top_logprobs] == ["a", "b"]
        if e.token in "ab":
            assert e.logprob == e.top_logprobs["ab".index(e.token)].logprob
        else:
            assert e.logprob < e.top_logprobs[1].logprob


class NO_LOGPROBS:
    content: list[Any] = []  # noqa: RUF012


def test_log_probabilities_leave_out_the_end_token(server: RunningServer) -> None:
    choice = chat(server, logprobs=True).choices[0]
    assert "".join(e.token for e in choice.logprobs.content) == "Hello"
    assert all(e.top_logprobs == [] for e in choice.logprobs.content)


@pytest.mark.parametrize("streams", [False, True])
def test_choices_are_separate_and_reproducible(streams: bool) -> None:
    """B33, B34: own seeds, own text, own index, one finish reason each."""
    logits = [-30.0] * 267
    for token in (*b"abcdefgh", EOS):
        logits[token] = 0.0
    with serving([logits]) as server:

        def texts(n: int) -> list[str]:
            options: dict[str, Any] = {"n": n, "seed": 7, "temperature": 1.0, "max_tokens": 20}
            if not streams:
                choices = sorted(chat(server, **options).choices, key=lambda c: c.index)
                assert [c.index for c in choices] == list(range(n))
                return [c.message.content for c in choices]
            chunks = stream(server, **options)
            assert [len(finish_reasons(chunks, index)) for index in range(n)] == [1] * n
            return [joined(chunks, index) for index in range(n)]

        four = texts(4)
        assert len(set(four)) == 4 and len({len(text) for text in four}) > 1
        assert texts(4) == four
        assert texts(1) == four[:1]
        server.wait_until(server.is_idle)


PARTS: list[Any] = [
    ("ab", "ab"),
    ([{"type": "text", "text": "ab"}], "ab"),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
    ([], ""),
    (None, ""),
]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize(("content", "text"), PARTS)
def test_content_parts_equal_their_text(server: RunningServer, content: Any, text: str, role: str) -> None:
    """B57"""
    messages = [{"role": role, "content": content}]
    ids = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert bytes(ids).decode() == f"<{role}>{text}<a>"
    assert (chat(server, messages).choices[0].message.content or "") == text


def test_the_last_message_can_be_continued(server: RunningServer) -> None:
    messages = [*user("Hi<a>"), {"role": "assistant", "content": "Well, "}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    plain = chat(server, messages, max_tokens=2, extra_body=body)
    assert plain.usage.prompt_tokens == len("<user>Hi<a><assistant>Well, ")
    echoed = chat(server, messages, max_tokens=2, extra_body={**body, "echo": True})
    assert echoed.choices[0].message.content == "Well, " + plain.choices[0].message.content


def test_token_ids_ids_and_timings_on_request(server: RunningServer) -> None:
    body = {"return_token_ids": True, "request_id": "mine", "timings": True, "prompt_logprobs": 0}
    answer = chat(server, extra_body=body)
    assert answer.id == "chatcmpl-mine"
    assert answer.prompt_token_ids == text_tokens("<user>Hello<a>")
    assert answer.choices[0].token_ids == [*text_tokens("Hello"), EOS]
    assert len(answer.prompt_logprobs) == HELLO_TOKENS and answer.prompt_logprobs[0] is None
    assert 0 <= answer.timings["queue_s"] <= answer.timings["ttft_s"] <= answer.timings["e2e_s"]
    chunks = stream(server, extra_body={"timings": True, "return_token_ids": True})
    assert [hasattr(chunk, "timings") for chunk in chunks].index(True) == len(chunks) - 1
    token_ids = [token for chunk in chunks for token in chunk.choices[0].token_ids]
    assert token_ids == [*text_tokens("Hello"), EOS]


def test_a_failure_in_mid_stream_is_an_error_and_no_done() -> None:
    """B56: the failed request ends with an error event; the engine goes on."""
    failing = True

    def fail_at_fifth(step: Any) -> None:
        if failing and any(r.sampling and len(r.sampling.output_token_ids) == 5 for r in step.requests):
            raise OSError("the device is gone")

    with serving(parrot, before_step=fail_at_fifth) as server:
        texts = []
        with pytest.raises(openai.APIError, match="the device is gone"):
            for chunk in chat(server, user("a long answer"), stream=True):
                texts.append(chunk.choices[0].delta.content)
        assert "".join(texts) == "a lon"
        body = {"model": "test", "messages": user("a long answer"), "stream": True}
        raw = server.http.post("/v1/chat/completions", json=body).text
        assert raw.rstrip().splitlines()[-1].startswith('data: {"error":') and "[DONE]" not in raw
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            chat(server, user("a long answer"))
        assert server.metric("pagoda_requests_finished_total", finish_reason="error") == 3
        server.wait_until(server.is_idle)
        failing = False
        assert chat(server, user("a long answer")).choices[0].message.content == "a long answer"
