"""What the serving benchmark makes of streams, against a server that sends what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.running_streams import (
    SETTLED_TOKENS,
    Countdown,
    StepSeconds,
    itl_under_prefill,
    measure_itl,
    measure_overhead,
)
from benchmarks.serving import Measurement, workloads
from benchmarks.streaming import Answer, StreamTiming, percentile, stream_answer, summarise
from pagoda.core.events import StepFinished
from pagoda.server.metric_families import metrics_text
from pagoda.server.metrics import ServerMetrics

DONE = "[DONE]"
STEP_S = 0.05
Event = str | dict[str, Any]


def chunk(text: str, num_tokens: int | None, **delta: str) -> dict[str, Any]:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    return {
        "choices": [{"delta": {"content": text, **delta}}],
        **({} if num_tokens is None else {"usage": usage}),
    }


def usage_only(num_tokens: int) -> dict[str, Any]:
    return {**chunk("", num_tokens), "choices": []}


async def serve_and_ask(
    events: list[tuple[float, Event]],
    max_tokens: int,
    *,
    status: int = 200,
    cut: bool = False,
    timeout_s: float = 5.0,
) -> Answer:
    """The answer to one request to a server that sends each event after a pause, over a real connection."""

    is_over = asyncio.Event()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(v.split(b":")[1]) for v in head.split(b"\r\n") if v.lower().startswith(b"content-l")
        )
        await reader.readexactly(length)
        writer.write(b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
        for pause_s, event in events:
            await asyncio.sleep(pause_s)
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        writer.write(b"" if cut else b"0\r\n\r\n")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        is_over.set()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=timeout_s, verify=False
        ) as client:
            return await stream_answer(client, "/v1/chat/completions", {"max_tokens": max_tokens})
    finally:
        await is_over.wait()
        server.close()
        await server.wait_closed()


def ask(events: list[tuple[float, Event]], max_tokens: int, **options: Any) -> Answer:
    return asyncio.run(serve_and_ask(events, max_tokens, **options))


def test_the_first_text_sets_the_time_to_first_token() -> None:
    """G01: neither headers nor a role without text; the usage at the end is no gap."""
    answer = ask(
        [
            (0, chunk("", 0, role="assistant")),
            (3 * STEP_S, chunk("a", 1)),
            (STEP_S, chunk("b", 2)),
            (3 * STEP_S, usage_only(2)),
            (0, DONE),
        ],
        2,
    )
    assert answer.failure is None and answer.text == "ab"
    assert answer.timing.ttft_s is not None and answer.timing.ttft_s >= 3 * STEP_S
    assert len(answer.timing.itl_s) == 1 and answer.timing.itl_s[0] < 3 * STEP_S
    assert (answer.num_prompt_tokens, answer.num_cached_tokens) == (9, 4)


def test_gaps_go_by_tokens_and_not_by_chunks() -> None:
    """G03, G04: chunks of 3, 1, 4, none and 2 tokens; there is one gap fewer than tokens, and they add up."""
    timing = StreamTiming()
    for time_s, text, num_tokens in (
        (1.0, "abc", 3),
        (1.5, "d", 4),
        (2.5, "", 8),  # tokens whose text is held back
        (2.6, "efgh", 8),
        (3.5, "ij", 10),
        (9.0, "", 10),
    ):
        timing.add(time_s, text, num_tokens)
    assert timing.itl_s == [0, 0, 0.5, 0.25, 0.25, 0.25, 0.25, 0.5, 0.5]
    assert len(timing.itl_s) == timing.num_tokens - 1 == 9
    assert timing.ttft_s is not None and math.isclose(timing.ttft_s + sum(timing.itl_s), 3.5)


FAILURES: dict[str, tuple[list[tuple[float, Event]], dict[str, Any], str]] = {
    "nothing but the end": ([(0, DONE)], {}, "no text"),
    "tokens without text": ([(0, chunk("", 2)), (0, DONE)], {}, "no text"),
    "an error": ([(0, chunk("a", 1)), (0, {"error": {"message": "broken"}})], {}, "broken"),
    "a status": ([(0, "{}")], {"status": 500}, "HTTP 500"),
    "no end": ([(0, chunk("a", 1)), (0, chunk("b", 2))], {}, "without [DONE]"),
    "a cut connection": ([(0, chunk("a", 1))], {"cut": True}, "RemoteProtocolError"),
    "silence": ([(0, chunk("a", 1)), (0.5, chunk("b", 2))], {"timeout_s": 0.1}, "ReadTimeout"),
    "fewer tokens": ([(0, chunk("a", 1)), (0, DONE)], {}, "1 tokens came and 2 were asked for"),
    "no counts": ([(0, chunk("ab", None)), (0, DONE)], {}, "continuous_usage_stats"),
    "no JSON": ([(0, "{")], {}, "not JSON"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_is_not_a_whole_answer_is_a_failure(name: str) -> None:
    """G06"""
    events, options, told = FAILURES[name]
    answer = ask(events, 2, **options)
    assert answer.failure is not None and told in answer.failure


def test_failures_are_counted_and_in_no_latency() -> None:
    """G06"""
    timing = StreamTiming()
    timing.add(2.0, "a", 1)
    timing.add(3.0, "b", 2)
    failed = Answer({}, failure="HTTP 500")
    summary = summarise([failed, Answer({}, "ab", 0.0, timing, 9, 4), failed], wall_s=4.0)
    assert (summary.num_answered, summary.failures) == (1, ("HTTP 500", "HTTP 500"))
    assert (summary.ttft_s, summary.itl_s) == ((2.0,), (1.0,))
    assert (summary.num_output_tokens, summary.num_prompt_tokens, summary.num_cached_tokens) == (2, 9, 4)
    assert math.isnan(percentile(summarise([failed], 1.0).ttft_s, 50))


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(n) for n in range(1, 201)]
    assert [percentile(values, p) for p in (0, 50, 99, 100)] == [1, 100, 198, 200]
    assert percentile([7.0], 99) == 7.0


def test_prompts_are_new_in_every_run() -> None:
    """G08: what one run has left in the cache is no help to the next; a workload shares what it says."""
    first, second = workloads(), workloads()
    for one, other in zip(first.values(), second.values(), strict=True):
        starts = [[str(prompts[0][:16]) for prompts in run.clients] for run in (one, other)]
        assert not set(starts[0]) & set(starts[1])
    shared, chats, apart = first.values()
    assert len({tuple(prompts[0][:1350]) for prompts in shared.clients}) == 1
    assert [(len(w.clients), len(w.clients[0])) for w in first.values()] == [(48, 1), (8, 5), (32, 1)]
    assert {len(prompts[0]) for prompts in shared.clients} == {1416}
    assert len({str(prompts[0][:1]) for prompts in apart.clients}) > 16 and chats.max_tokens == 64


def stream(sent_s: float, times_s: list[float], max_tokens: int | None = None) -> Answer:
    timing = StreamTiming()
    for number, time_s in enumerate(times_s, 1):
        timing.add(time_s - sent_s, "x", number)
    return Answer({"max_tokens": max_tokens or len(times_s)}, "x", sent_s, timing)


def test_gaps_of_running_streams_are_those_that_a_long_prompt_fell_into() -> None:
    """The first gaps, in which the streams themselves were prefilled, are in neither list."""
    first = [100.0 + 0.5 * i for i in range(SETTLED_TOKENS + 1)]  # prefills: half a second a token
    alone = [first[-1] + 0.01 * i for i in range(1, 11)]
    sent_s = alone[-1] + 0.005
    under = [alone[-1] + 0.03 * i for i in range(1, 5)]
    after = [under[-1] + 0.01 * i for i in range(1, 5)]
    long = stream(sent_s, [under[-1] - 0.001, after[0]])
    seen = itl_under_prefill([stream(99.0, [*first, *alone, *under, *after])], long)
    assert len(seen.alone_s) == len(alone) and np.allclose(seen.alone_s, 0.01)
    assert len(seen.under_prefill_s) == len(under) and np.allclose(seen.under_prefill_s, 0.03)
    assert math.isclose(seen.ratio, 3.0, rel_tol=1e-6) and seen.num_ended == 0
    assert itl_under_prefill([stream(99.0, [*first, *alone, *under[:2]])], long).num_ended == 1


def test_overhead_is_what_steps_take_beside_the_executor() -> None:
    metrics = ServerMetrics("m")
    before = StepSeconds.parse(metrics_text(metrics).decode())
    for number in range(4):
        metrics.on_event(StepFinished(0.0, number, 0.018))
        metrics.on_step(0.02)
    spent = StepSeconds.parse(metrics_text(metrics).decode()) - before
    assert spent.num_steps == 4 and math.isclose(spent.overhead_share, 0.1)


def test_a_measurement_begins_when_every_stream_has_so_many_tokens() -> None:
    countdown = Countdown(2, 3)
    for stream_number, num_tokens in ((0, 3), (0, 9), (1, 2)):
        countdown.on_tokens(stream_number, num_tokens)
        assert not countdown.reached.is_set()
    countdown.on_tokens(1, 4)
    assert countdown.reached.is_set()


@pytest.mark.parametrize("measure", [measure_itl, measure_overhead])
def test_a_measurement_ends_when_nothing_is_answered(
    measure: Measurement, capsys: pytest.CaptureFixture[str]
) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, content=metrics_text(ServerMetrics("m")))
        return httpx.Response(500, text="broken")

    async def run() -> tuple[bool, list[Answer]]:
        transport = httpx.MockTransport(respond)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await asyncio.wait_for(measure(client, "m"), 10)

    is_right, answers = asyncio.run(run())
    assert not is_right and answers and all(answer.failure for answer in answers)
    assert f"{len(answers)} x HTTP 500" in capsys.readouterr().out
