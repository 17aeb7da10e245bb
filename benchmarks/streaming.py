"""One streamed request and what its events add up to: time to first text, gaps between tokens, counts."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TOKEN_IDS = range(1000, 48000)  # of SmolLM2: ordinary ones
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def completion(model: str, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
    """A greedy one of so many tokens."""
    return {
        "model": model,
        "prompt": token_ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,  # after random tokens some answers are made of them alone
    }


def random_tokens(num_tokens: int) -> list[int]:
    """New ones in every run, so that no run is served from the cache of an earlier one."""
    return random.choices(TOKEN_IDS, k=num_tokens)


class BadAnswer(Exception):
    """A request that was not answered as asked; it has no latency."""


@dataclass(slots=True)
class StreamTiming:
    """Times in seconds since the request was sent.

    The first text sets `ttft_s`: headers, a chunk with nothing but a role, and the usage do not. Gaps go by
    the growth of the token count: the time since the last growth is shared by the tokens that came, those
    in the first chunk came at once. So there is one gap fewer than tokens, whatever a chunk holds.
    """

    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    last_token_s: float = 0.0

    def add(self, time_s: float, text: str, num_tokens: int) -> None:
        """An event at `time_s` after which `num_tokens` have been generated."""
        if text and self.ttft_s is None:
            self.ttft_s = time_s
        num_new = num_tokens - self.num_tokens
        if num_new < 0:
            raise BadAnswer(f"the token count fell from {self.num_tokens} to {num_tokens}")
        if num_new == 0:
            return
        if self.num_tokens == 0:
            self.itl_s += [0.0] * (num_new - 1)
        else:
            self.itl_s += [(time_s - self.last_token_s) / num_new] * num_new
        self.num_tokens, self.last_token_s = num_tokens, time_s

    def gaps_between(self, start_s: float, end_s: float) -> list[float]:
        """Those of `itl_s` that some of this time fell into, in seconds since the request was sent."""
        gaps, gap_end_s = [], self.last_token_s
        for gap_s in reversed(self.itl_s):
            gap_start_s = gap_end_s - gap_s
            if gap_end_s > start_s and gap_start_s < end_s:
                gaps.append(gap_s)
            gap_end_s = gap_start_s
        return gaps[::-1]


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that was answered with as many tokens as it asked for, or `failure` says what went wrong."""

    body: dict[str, Any]
    text: str = ""
    sent_s: float = 0.0  # on the clock of `time.perf_counter`
    timing: StreamTiming = field(default_factory=StreamTiming)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    failure: str | None = None


async def stream_answer(
    client: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
) -> Answer:
    """Send `body` and read its stream to the end; never raises for what the server does. `on_tokens` is told
    how many tokens have come."""
    try:
        return await _read_stream(client, path, body, on_tokens)
    except BadAnswer as error:
        return Answer(body, failure=str(error))
    except httpx.HTTPError as error:
        return Answer(body, failure=f"{type(error).__name__}: {error}".rstrip(": "))


async def _read_stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], on_tokens: Callable[[int], None]
) -> Answer:
    timing, pieces, is_done = StreamTiming(), [], False
    usage: dict[str, Any] = {}
    start_s = time.perf_counter()
    async with client.stream("POST", path, json={**body, **STREAM}) as response:
        if response.status_code != 200:
            raise BadAnswer(f"HTTP {response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                if line:
                    raise BadAnswer(f"not an event: {line[:200]}")
                continue
            time_s = time.perf_counter() - start_s
            data = line[5:].strip()
            if data == "[DONE]":
                is_done = True
                break
            text, new_usage = _read_event(data)
            pieces.append(text)
            usage = new_usage or usage
            if text and not new_usage:
                raise BadAnswer("text came without usage; timing needs continuous_usage_stats")
            timing.add(time_s, text, usage.get("completion_tokens", 0))
            on_tokens(timing.num_tokens)
    if not is_done:
        raise BadAnswer("the stream ended without [DONE]")
    if timing.ttft_s is None:
        raise BadAnswer(f"no text came, in {timing.num_tokens} tokens")
    if timing.num_tokens != body["max_tokens"]:
        raise BadAnswer(f"{timing.num_tokens} tokens came and {body['max_tokens']} were asked for")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(body, "".join(pieces), start_s, timing, usage.get("prompt_tokens", 0), cached)


def _read_event(data: str) -> tuple[str, dict[str, Any] | None]:
    """Text and usage of an event of either endpoint."""
    try:
        event = json.loads(data)
    except ValueError:
        raise BadAnswer(f"not JSON: {data[:200]}") from None
    if "error" in event:
        raise BadAnswer(f"the stream failed: {event['error']}")
    choices = event.get("choices") or [{}]
    text = choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or ""
    return text, event.get("usage")


@dataclass(frozen=True, slots=True)
class Summary:
    """What the answers of one workload add up to. Those that failed are counted, and in nothing else."""

    wall_s: float
    num_answered: int
    failures: tuple[str, ...]
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    num_output_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int


def summarise(answers: Sequence[Answer], wall_s: float) -> Summary:
    right = [answer for answer in answers if answer.failure is None]
    return Summary(
        wall_s=wall_s,
        num_answered=len(right),
        failures=tuple(answer.failure for answer in answers if answer.failure is not None),
        ttft_s=tuple(a.timing.ttft_s for a in right if a.timing.ttft_s is not None),
        itl_s=tuple(gap for a in right for gap in a.timing.itl_s),
        num_output_tokens=sum(a.timing.num_tokens for a in right),
        num_prompt_tokens=sum(a.num_prompt_tokens for a in right),
        num_cached_tokens=sum(a.num_cached_tokens for a in right),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many per cent do not exceed; NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
