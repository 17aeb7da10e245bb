"""What happens in the control plane, as one stream of typed events.

Metrics, traces, the dashboard, replay and the invariant checker read it. Every event carries `time_s` on
the scheduler's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from pagoda.core.prefix_cache import MissReason, PrefixCacheStats, PrefixMiss
from pagoda.core.request import FinishReason, Request
from pagoda.core.step import SchedulerOutput

UnpinReason: TypeAlias = Literal["asked", "expired", "reset", "failed"]


class RequestAdded(NamedTuple):
    time_s: float
    request_id: str
    num_prompt_tokens: int
    max_num_tokens: int  # where its output ends at the latest, prompt included
    priority: int


class RequestScheduled(NamedTuple):
    """A waiting request starts, or goes on after preemption.

    `num_queried_tokens` is 0 when the prefix cache was not asked, and on resumption: counters of hits and
    queries sum over these events, so each request counts once. `num_forked_tokens` are those whose blocks
    it took from another choice of its request; the prefix cache has no part in them.
    """

    time_s: float
    request_id: str
    queue_s: float
    resumed: bool
    num_queried_tokens: int
    num_cached_tokens: int
    miss: PrefixMiss | None
    num_forked_tokens: int = 0


class TokenGenerated(NamedTuple):
    time_s: float
    request_id: str
    token_id: int
    num_output_tokens: int  # this one included


class RequestPreempted(NamedTuple):
    time_s: float
    request_id: str
    num_computed_tokens: int


class RequestFinished(NamedTuple):
    time_s: float
    request_id: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class PoolUsage(NamedTuple):
    """Blocks of one layer group by state; the four add up to the pool.

    Held are those in a request's table, pinned those that only a pin keeps.
    """

    num_free: int
    num_reusable: int
    num_held: int
    num_pinned: int = 0

    @property
    def num_blocks(self) -> int:
        return sum(self)

    @property
    def used_share(self) -> float:
        """Share of the pool that cannot be given to anybody now."""
        return (self.num_held + self.num_pinned) / self.num_blocks


class StepScheduled(NamedTuple):
    time_s: float
    step: int
    num_scheduled_tokens: int
    num_scheduled_requests: int
    num_running: int
    num_waiting: int
    num_block_copies: int
    usage: tuple[PoolUsage, ...]  # by layer group


class StepFinished(NamedTuple):
    """`execute_s` is what the executor took, from the end of planning to its results."""

    time_s: float
    step: int
    execute_s: float


class BlockCached(NamedTuple):
    """A full block can be hit from now on. Its hash is a key that other processes would give it, too."""

    time_s: float
    group: int
    block_id: int
    block_hash: bytes


class BlockEvicted(NamedTuple):
    """A cached block made room; `block_hash` is empty for a partly filled one."""

    time_s: float
    group: int
    block_id: int
    block_hash: bytes


class PrefixPinned(NamedTuple):
    """A prefix is kept from eviction, or for another time than before; `ttl_s` None is for good."""

    time_s: float
    block_hash: bytes
    num_tokens: int
    ttl_s: float | None


class PrefixUnpinned(NamedTuple):
    """It is kept no more: it was asked for, its time is up, all was forgotten, or its content is in doubt."""

    time_s: float
    block_hash: bytes
    reason: UnpinReason


Event: TypeAlias = (
    RequestAdded
    | RequestScheduled
    | TokenGenerated
    | RequestPreempted
    | RequestFinished
    | StepScheduled
    | StepFinished
    | BlockCached
    | BlockEvicted
    | PrefixPinned
    | PrefixUnpinned
)
EventSink: TypeAlias = Callable[[Event], None]


class EventRecorder:
    """Turns what happens to requests and steps into events and into `prefix_stats`."""

    def __init__(self, clock: Callable[[], float], on_event: EventSink | None) -> None:
        self._clock = clock
        self._on_event = on_event
        self.prefix_stats = PrefixCacheStats()
        self.num_preemptions = 0
        self.num_forked_tokens = 0

    def added(self, r: Request) -> None:
        if self._on_event is not None:
            event = RequestAdded(
                self._clock(), r.request_id, r.num_prompt_tokens, r.max_num_tokens, r.priority
            )
            self._on_event(event)

    def scheduled(self, r: Request, num_hit_tokens: int) -> None:
        """Prefix counters count a request once: not again when it goes on after preemption."""
        is_first = r.num_preemptions == 0
        is_query = is_first and (r.prefix_miss is None or r.prefix_miss.reason is not MissReason.DISABLED)
        num_queried = r.num_prompt_tokens if is_query else 0
        self.prefix_stats.num_queries += is_query
        self.prefix_stats.num_queried_tokens += num_queried
        self.prefix_stats.num_hit_tokens += num_hit_tokens if is_query else 0
        if is_first and r.prefix_miss is not None:
            self.prefix_stats.num_misses[r.prefix_miss.reason] += 1
        if self._on_event is not None:
            now, miss = self._clock(), r.prefix_miss if is_first else None
            self._on_event(
                RequestScheduled(
                    now, r.request_id, now - r.queued_s, not is_first, num_queried, num_hit_tokens, miss
                )
            )

    def generated(self, r: Request, token_id: int) -> None:
        if self._on_event is not None:
            self._on_event(TokenGenerated(self._clock(), r.request_id, token_id, r.num_output_tokens))

    def forked(self, r: Request, num_forked_tokens: int) -> None:
        """It starts, or goes on, with the blocks of a sibling: the prefix cache was not asked."""
        self.num_forked_tokens += num_forked_tokens
        if self._on_event is not None:
            now, resumed = self._clock(), r.num_preemptions > 0
            self._on_event(
                RequestScheduled(now, r.request_id, now - r.queued_s, resumed, 0, 0, None, num_forked_tokens)
            )

    def preempted(self, r: Request) -> None:
        self.num_preemptions += 1
        if self._on_event is not None:
            self._on_event(RequestPreempted(self._clock(), r.request_id, r.num_computed_tokens))

    def finished(self, r: Request) -> None:
        if self._on_event is not None:
            assert r.finish_reason is not None
            counts = (r.num_prompt_tokens, r.num_output_tokens, r.num_cached_tokens, r.num_preemptions)
            self._on_event(RequestFinished(self._clock(), r.request_id, r.finish_reason, *counts))

    def step_scheduled(
        self,
        number: int,
        step: SchedulerOutput,
        num_running: int,
        num_waiting: int,
        usage: Callable[[], tuple[PoolUsage, ...]],
    ) -> None:
        if self._on_event is not None:
            counts = (step.num_scheduled_tokens, len(step.requests), num_running, num_waiting)
            self._on_event(StepScheduled(self._clock(), number, *counts, len(step.block_copies), usage()))

    def step_finished(self, number: int, execute_s: float) -> None:
        if self._on_event is not None:
            self._on_event(StepFinished(self._clock(), number, execute_s))
