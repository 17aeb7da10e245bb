"""`StepPlanner`: how the token budget of one step is shared out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pagoda.config import SchedulerConfig
from pagoda.core.events import EventRecorder
from pagoda.core.kv_cache_manager import KVCacheManager
from pagoda.core.prefix_lookup import NO_HIT, PrefixHit
from pagoda.core.request import Request, RequestStatus
from pagoda.core.request_queue import RequestQueue
from pagoda.core.step import BlockCopy, ScheduledRequest, SchedulerOutput


@dataclass(slots=True)
class _StepPlan:
    """A step in the making."""

    budget: int
    requests: list[Request] = field(default_factory=list)
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)


class StepPlanner:
    """Moves requests between the two queues, and blocks between requests, for one step after the other.

    Running requests come first, in order. One that cannot get a block takes it from the last in order,
    so the first always goes on, and with it the whole queue.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        waiting: RequestQueue,
        running: RequestQueue,
        recorder: EventRecorder,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._recorder = recorder
        self._clock = clock
        self._num_spare_blocks = [int(pool.num_blocks * config.watermark) for pool in kv.pools]

    def plan(self) -> tuple[SchedulerOutput, list[Request]] | None:
        """The next step and its requests, in the same order; None when there is nothing to compute."""
        plan = _StepPlan(self._config.max_num_batched_tokens)
        self._schedule_running(plan)
        self._schedule_waiting(plan)
        self._kv.end_planning()
        if not plan.requests:
            return None
        return SchedulerOutput(tuple(plan.scheduled), tuple(plan.copies)), plan.requests

    def _schedule_running(self, plan: _StepPlan) -> None:
        index = 0
        while index < len(self._running) and plan.budget > 0:
            request = self._running[index]
            num_tokens = request.num_tokens - request.num_computed_tokens
            if num_tokens > 1:
                num_tokens = self._chunk(num_tokens, plan.budget - self._num_decodes_from(index + 1))
            if num_tokens > 0:
                num_tokens = self._make_room(request, num_tokens)
                if num_tokens == 0:
                    break  # it was the last in order and has been preempted itself
                self._plan_tokens(request, num_tokens, plan)
            index += 1

    def _num_decodes_from(self, index: int) -> int:
        """Running requests that want one token. They get it before any prefill: somebody is reading."""
        return sum(r.num_tokens - r.num_computed_tokens == 1 for r in self._running[index:])

    def _make_room(self, request: Request, num_tokens: int) -> int:
        """Tokens that the request can have, at most `num_tokens`. Others are preempted, last in order
        first and the request itself at the end, until there is room for one at least."""
        while True:
            num_fitting = self._kv.num_tokens_that_fit(request, num_tokens)
            if num_fitting > 0:
                return num_fitting
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return 0

    def _schedule_waiting(self, plan: _StepPlan) -> None:
        started: list[Request] = []
        num_long = sum(self._is_long(r.num_tokens - r.num_computed_tokens) for r in self._running)
        for request in self._waiting:
            if plan.budget <= 0 or len(self._running) >= self._config.max_num_seqs:
                break
            if request.awaited_hash is not None and self._kv.is_pending(request.awaited_hash):
                continue
            hit = self._kv.find_hit(request)
            request.awaited_hash = hit.awaits
            if hit.awaits is not None:
                continue
            is_long = self._is_long(request.num_tokens - hit.num_tokens)
            if is_long and num_long >= self._config.max_long_partial_prefills:
                continue
            if not self._start(request, hit, plan):
                break  # nobody overtakes the head of the queue into the room it waits for
            num_long += is_long
            started.append(request)
        for request in started:
            self._waiting.remove(request)

    def _start(self, request: Request, hit: PrefixHit, plan: _StepPlan) -> bool:
        """Admit a waiting request if there is room for all of its tokens."""
        if not self._has_room(request, hit):
            if hit.source is None:
                return False
            hit = hit.without_copy(self._kv.block_size)
            if not self._has_room(request, hit):
                return False
        num_tokens = self._chunk(request.num_tokens - hit.num_tokens, plan.budget)
        num_tokens = self._kv.num_tokens_that_fit(request, num_tokens, hit)
        if num_tokens == 0:
            return False
        if request.num_preemptions == 0:
            request.prefix_miss = self._kv.explain_miss(request, hit)
            request.num_cached_tokens = hit.num_tokens
            request.first_scheduled_s = self._clock()
        self._recorder.scheduled(request, hit.num_tokens)
        request.num_computed_tokens = hit.num_tokens
        request.status = RequestStatus.RUNNING
        self._running.add(request)
        self._plan_tokens(request, num_tokens, plan, hit)
        return True

    def _has_room(self, request: Request, hit: PrefixHit) -> bool:
        """For all tokens it has, not just for its first chunk, so that it is not preempted in its prefill.
        While others run, the watermark stays free for them to grow into."""
        spare = self._num_spare_blocks if len(self._running) else [0] * len(self._num_spare_blocks)
        return self._kv.has_room(request, hit, request.num_tokens, self._running, spare)

    def _chunk(self, num_tokens: int, budget: int) -> int:
        """Tokens of a prefill in this step."""
        num_tokens = min(num_tokens, budget)
        return self._config.long_prefill_token_threshold if self._is_long(num_tokens) else num_tokens

    def _is_long(self, num_tokens: int) -> bool:
        return 0 < self._config.long_prefill_token_threshold < num_tokens

    def _plan_tokens(
        self, request: Request, num_tokens: int, plan: _StepPlan, hit: PrefixHit = NO_HIT
    ) -> None:
        copies = self._kv.allocate(request, num_tokens, hit)
        assert copies is not None, "room was planned for and is not there"
        start = request.num_computed_tokens
        end = start + num_tokens
        num_prompt_logprobs = next_prompt_token_id = None
        if request.needs_prompt_logprobs and start + 1 < request.num_prompt_tokens:
            num_prompt_logprobs = request.params.prompt_logprobs
            next_prompt_token_id = request.token_ids[end] if end < request.num_prompt_tokens else None
        is_last = end == request.num_tokens and request.generates
        plan.budget -= num_tokens
        plan.copies.extend(copies)
        plan.requests.append(request)
        plan.scheduled.append(
            ScheduledRequest(
                request.request_id,
                start,
                request.token_ids[start:end],
                self._kv.block_tables(request),
                request.sampling_input() if is_last else None,
                num_prompt_logprobs,
                next_prompt_token_id,
            )
        )

    def _preempt(self, request: Request) -> None:
        """Take all blocks back; what it has computed stays in the prefix cache as long as there is room."""
        self._running.remove(request)
        self._kv.free(request)
        self._recorder.preempted(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        request.queued_s = self._clock()
        self._waiting.add(request)
