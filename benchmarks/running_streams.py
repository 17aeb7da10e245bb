"""What streams notice of others, and of the server: the gaps between their tokens while a long prompt is
prefilled, and the share of a step that is not computing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.streaming import COMPLETIONS, Answer, completion, percentile, random_tokens, stream_answer

NUM_STREAMS, STREAM_TOKENS, LONG_PROMPT_TOKENS, MAX_ITL_RATIO = 4, 1536, 4096, 3.0
NUM_ALONE = 128  # tokens that each stream gets before the long prompt comes
OVERHEAD_STREAMS, OVERHEAD_TOKENS, MAX_OVERHEAD_SHARE = 32, 192, 0.1
SETTLED_TOKENS = 16


class Countdown:
    """An event for when each of so many streams has a number of tokens, or all are over."""

    def __init__(self, num_streams: int, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._missing = set(range(num_streams))
        self.reached = asyncio.Event()

    def on_tokens(self, stream: int, num_tokens: int) -> None:
        if num_tokens >= self._num_tokens:
            self._missing.discard(stream)
            if not self._missing:
                self.reached.set()


async def _run_streams(
    client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], countdowns: Sequence[Countdown]
) -> list[Answer]:
    """The answers to `bodies`, sent together. No countdown is waited for in vain."""

    async def run(stream: int, body: dict[str, Any]) -> Answer:
        def on_tokens(num_tokens: int) -> None:
            for countdown in countdowns:
                countdown.on_tokens(stream, num_tokens)

        return await stream_answer(client, COMPLETIONS, body, on_tokens)

    try:
        return await asyncio.gather(*(run(number, body) for number, body in enumerate(bodies)))
    finally:
        for countdown in countdowns:
            countdown.reached.set()


@dataclass(frozen=True, slots=True)
class ITLUnderPrefill:
    """Gaps in seconds between tokens of the running streams: before the long prompt was sent, and from then
    until its first token. `num_ended` streams were over before that."""

    alone_s: tuple[float, ...]
    under_prefill_s: tuple[float, ...]
    ttft_s: float
    num_ended: int

    @property
    def ratio(self) -> float:
        """The longest gap during the prefill over the median without one."""
        return max(self.under_prefill_s, default=float("nan")) / percentile(self.alone_s, 50)


def itl_under_prefill(streams: Sequence[Answer], long: Answer) -> ITLUnderPrefill:
    """Of answers without failure. The first gaps of a stream count in neither: others were prefilled then."""
    assert long.timing.ttft_s is not None
    alone: list[float] = []
    under: list[float] = []
    num_ended = 0
    start_s, end_s = long.sent_s, long.sent_s + long.timing.ttft_s
    settled_s = max(s.sent_s + s.timing.last_token_s - sum(s.timing.itl_s[SETTLED_TOKENS:]) for s in streams)
    for stream in streams:
        alone += stream.timing.gaps_between(settled_s - stream.sent_s, start_s - stream.sent_s)[:-1]
        under += stream.timing.gaps_between(start_s - stream.sent_s, end_s - stream.sent_s)
        num_ended += stream.sent_s + stream.timing.last_token_s < end_s
    return ITLUnderPrefill(tuple(alone), tuple(under), end_s - start_s, num_ended)


async def measure_itl(client: httpx.AsyncClient, model: str) -> tuple[bool, list[Answer]]:
    """Run and print it; whether the measurement holds, and the answers."""
    bodies = [completion(model, random_tokens(64), STREAM_TOKENS) for _ in range(NUM_STREAMS)]
    long_body = completion(model, random_tokens(LONG_PROMPT_TOKENS), 16)
    decoding = Countdown(NUM_STREAMS, NUM_ALONE)

    async def send_long() -> Answer:
        await decoding.reached.wait()
        return await stream_answer(client, COMPLETIONS, long_body)

    streams, long = await asyncio.gather(_run_streams(client, bodies, [decoding]), send_long())
    answers = [*streams, long]
    print(f"\nITL of {NUM_STREAMS} streams while a prompt of {LONG_PROMPT_TOKENS} tokens is prefilled")
    if print_failures(answers):
        return False, answers
    seen = itl_under_prefill(streams, long)
    alone_ms = 1000 * percentile(seen.alone_s, 50)
    under_ms = [1000 * percentile(seen.under_prefill_s, p) for p in (50, 99, 100)]
    print(f"  without prefill {alone_ms:.1f} ms median; during it ", end="")
    print(f"{under_ms[0]:.1f} ms median, {under_ms[1]:.1f} ms p99, {under_ms[2]:.1f} ms maximum")
    print(f"  maximum / median {seen.ratio:.1f} (goal {MAX_ITL_RATIO:g} *); ", end="")
    print(f"TTFT of the long prompt {seen.ttft_s:.2f} s")
    if seen.num_ended:
        print(f"  warning: {seen.num_ended} streams ended before the long prompt had its first token")
    return True, answers


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Sums over all steps of a server, from its /metrics."""

    num_steps: float
    step_s: float
    execute_s: float

    @classmethod
    def parse(cls, text: str) -> StepSeconds:
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return cls(
            values["pagoda_step_seconds_count"],
            values["pagoda_step_seconds_sum"],
            values["pagoda_step_execute_seconds_sum"],
        )

    def __sub__(self, other: StepSeconds) -> StepSeconds:
        return StepSeconds(
            self.num_steps - other.num_steps, self.step_s - other.step_s, self.execute_s - other.execute_s
        )

    @property
    def overhead_share(self) -> float:
        return 1.0 - self.execute_s / self.step_s


async def measure_overhead(client: httpx.AsyncClient, model: str) -> tuple[bool, list[Answer]]:
    """Run and print it, over steps in which every stream decodes; whether the measurement holds, and the
    answers."""
    bodies = [completion(model, random_tokens(64), OVERHEAD_TOKENS) for _ in range(OVERHEAD_STREAMS)]
    settled = Countdown(OVERHEAD_STREAMS, SETTLED_TOKENS)
    ending = Countdown(1, OVERHEAD_TOKENS - SETTLED_TOKENS)  # the first, and the others are as far

    async def read(countdown: Countdown) -> StepSeconds:
        await countdown.reached.wait()
        return StepSeconds.parse((await client.get("/metrics")).raise_for_status().text)

    answers, before, after = await asyncio.gather(
        _run_streams(client, bodies, [settled, ending]), read(settled), read(ending)
    )
    spent = after - before
    print(f"\nserver overhead: {OVERHEAD_STREAMS} streams that decode")
    if print_failures(answers):
        return False, answers
    itl_ms = 1000 * percentile([gap for a in answers for gap in a.timing.itl_s[SETTLED_TOKENS:]], 50)
    print(f"  {spent.num_steps:.0f} steps of {1000 * spent.step_s / spent.num_steps:.2f} ms, ", end="")
    print(f"{1000 * spent.execute_s / spent.num_steps:.2f} ms of it in the executor; ", end="")
    print(f"ITL {itl_ms:.2f} ms median")
    print(f"  {spent.overhead_share:.1%} of a step is overhead (goal {MAX_OVERHEAD_SHARE:.0%} *)")
    return True, answers


def print_failures(answers: Sequence[Answer]) -> bool:
    """Whether there are any."""
    failures = [answer.failure for answer in answers if answer.failure is not None]
    for failure in sorted(set(failures)):
        print(f"    {failures.count(failure)} x {failure}")
    return bool(failures)
