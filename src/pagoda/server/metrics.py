"""`ServerMetrics`: what the event stream and the outputs add up to.

Hot paths only add to plain numbers, in the engine thread. `metric_families` gives them names.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagoda.core.events import (
    Event,
    PoolUsage,
    RequestFinished,
    RequestPreempted,
    RequestScheduled,
    StepFinished,
    StepScheduled,
    TokenGenerated,
)
from pagoda.core.prefix_cache import MissReason
from pagoda.engine.output import RequestOutput

LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0,
    5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0,
)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
FINISH_REASONS = ("stop", "length", "abort", "error")  # the later one counts when choices differ
RATE_WINDOW_S = 30.0


class Histogram:
    """Counts by bucket; the total is their sum, so that a scrape never contradicts itself."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        total, cumulative = 0, []
        for bound, count in zip((*self.bounds, math.inf), tuple(self.counts), strict=True):
            total += count
            cumulative.append(("+Inf" if bound == math.inf else str(float(bound)), float(total)))
        return cumulative


class EngineState(NamedTuple):
    """What is so now, and is asked for when somebody looks."""

    num_running: int = 0
    num_waiting: int = 0
    usage: tuple[PoolUsage, ...] = ()


class ServerMetrics:
    """An event sink of the scheduler (`on_event`) and an observer of outputs and steps (`on_outputs`,
    `on_step`) of an `AsyncEngine`.

    A request counts once, however many choices it has: its prompt tokens, times and finish reason ("error"
    if any choice failed, else "abort", else "length", else "stop"). Generated tokens count in all choices.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.read_engine: Callable[[], EngineState] = EngineState
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_refused = 0  # with 429
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self.num_misses: dict[MissReason, int] = dict.fromkeys(MissReason, 0)
        self.ttft_s = Histogram(LATENCY_BUCKETS_S)
        self.itl_s = Histogram(LATENCY_BUCKETS_S)
        self.e2e_s = Histogram(LATENCY_BUCKETS_S)
        self.queue_s = Histogram(LATENCY_BUCKETS_S)
        self.prompt_lengths = Histogram(TOKEN_BUCKETS)
        self.output_lengths = Histogram(TOKEN_BUCKETS)
        self.step_tokens = Histogram(TOKEN_BUCKETS)
        self.step_s = Histogram(LATENCY_BUCKETS_S)
        self.execute_s = Histogram(LATENCY_BUCKETS_S)
        self._last_token_s: dict[str, float] = {}
        self._had_first_token: set[str] = set()
        self._finish_times_s: deque[float] = deque(maxlen=256)
        self._reasons: dict[str, str] = {}  # of unfinished requests some of whose choices have ended

    def retry_after_s(self, num_queued: int) -> int:
        """When a refused client may find room: as long as the queue takes at the present rate, 1 to 60 s."""
        now_s = time.monotonic()
        recent = [t for t in tuple(self._finish_times_s) if now_s - t < RATE_WINDOW_S]
        if len(recent) < 2:
            return 1
        per_second = len(recent) / max(now_s - recent[0], 1e-3)
        return max(1, min(60, math.ceil(num_queued / per_second)))

    def on_event(self, event: Event) -> None:
        if isinstance(event, TokenGenerated):
            self.num_output_tokens += 1
            last_s = self._last_token_s.get(event.request_id)
            if last_s is not None:
                self.itl_s.observe(event.time_s - last_s)
            self._last_token_s[event.request_id] = event.time_s
        elif isinstance(event, StepScheduled):
            self.num_steps += 1
            self.step_tokens.observe(event.num_scheduled_tokens)
        elif isinstance(event, StepFinished):
            self.execute_s.observe(event.execute_s)
        elif isinstance(event, RequestScheduled):
            self.num_queried_tokens += event.num_queried_tokens
            self.num_hit_tokens += event.num_cached_tokens if event.num_queried_tokens else 0
            if event.miss is not None and not event.resumed:
                self.num_misses[event.miss.reason] += 1
        elif isinstance(event, RequestPreempted):
            self.num_preemptions += 1
        elif isinstance(event, RequestFinished):
            self._last_token_s.pop(event.request_id, None)

    def on_step(self, duration_s: float) -> None:
        self.step_s.observe(duration_s)

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            request_id, ttft_s = output.request_id, output.metrics.ttft_s
            if ttft_s is not None and request_id not in self._had_first_token:
                self._had_first_token.add(request_id)
                self.ttft_s.observe(ttft_s)
            for choice in output.outputs:
                if choice.finish_reason is not None:
                    reasons = (self._reasons.get(request_id, "stop"), choice.finish_reason)
                    self._reasons[request_id] = max(reasons, key=FINISH_REASONS.index)
            if output.finished:
                self._on_finished(output)

    def _on_finished(self, output: RequestOutput) -> None:
        metrics = output.metrics
        self._had_first_token.discard(output.request_id)
        self.num_finished[self._reasons.pop(output.request_id, "stop")] += 1
        self._finish_times_s.append(time.monotonic())
        self.num_prompt_tokens += metrics.num_prompt_tokens
        self.num_cached_tokens += output.num_cached_tokens
        self.prompt_lengths.observe(metrics.num_prompt_tokens)
        self.output_lengths.observe(metrics.num_output_tokens)
        if metrics.e2e_s is not None:
            self.e2e_s.observe(metrics.e2e_s)
        if metrics.queue_s is not None:
            self.queue_s.observe(metrics.queue_s)
