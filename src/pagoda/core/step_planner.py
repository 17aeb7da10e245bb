"""`StepPlanner`: how the token budget of one step is shared out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

from pagoda.config import SchedulerConfig
from pagoda.core.events import EventRecorder
from pagoda.core.fork import Fork
from pagoda.core.kv_cache_manager import KVCacheManager
from pagoda.core.prefill_pace import PrefillPace
from pagoda.core.prefix_lookup import NO_HIT, PrefixHit
from pagoda.core.request import Request, RequestStatus
from pagoda.core.request_queue import RequestQueue, admission_order
from pagoda.core.step import BlockCopy, ScheduledRequest, SchedulerOutput

MAX_PASSED_OVER = 64  # waiting requests that a step looks up in the cache and cannot start


@dataclass(slots=True)
class _StepPlan:
    """A step in the making. `prefill_budget` is what is left of `budget` for requests that want more than
    one token. Partial prefills are those that will have tokens left to compute after the step."""

    budget: int
    prefill_budget: int
    num_partial: int = 0
    num_long_partial: int = 0
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
        pace: PrefillPace,
    ) -> None:
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._recorder = recorder
        self._clock = clock
        self._pace = pace
        self._num_spare_blocks = [int(pool.num_blocks * config.watermark) for pool in kv.pools]

    def plan(self) -> tuple[SchedulerOutput, list[Request]] | None:
        """The next step and its requests, in the same order; None when there is nothing to compute."""
        budget = self._config.max_num_batched_tokens
        plan = _StepPlan(budget, self._max_prefill_tokens(budget))
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
            num_tokens = num_left = request.num_tokens - request.num_computed_tokens
            if num_tokens > 1:
                num_tokens = self._chunk(num_tokens, plan, plan.budget - self._num_decodes_from(index + 1))
            if num_tokens > 0:
                num_tokens = self._make_room(request, num_tokens)
                if num_tokens == 0:
                    break  # it was the last in order and has been preempted itself
                self._plan_tokens(request, num_tokens, plan)
            if num_tokens < num_left:
                self._note_partial(num_left, plan)
            index += 1

    def _max_prefill_tokens(self, budget: int) -> int:
        """Tokens of all prefills in a step: few while others decode, because they wait for its end."""
        num_decoding = self._num_decodes_from(0)
        if not num_decoding:
            return budget
        num_places = self._config.max_num_seqs - len(self._running)
        num_prefilling = len(self._running) - num_decoding + min(num_places, len(self._waiting))
        limit = self._config.max_prefill_tokens_while_decoding or budget
        return min(limit, self._pace.max_tokens(budget, num_decoding, num_prefilling))

    def _note_partial(self, num_left: int, plan: _StepPlan) -> None:
        plan.num_partial += 1
        plan.num_long_partial += self._is_long(num_left)

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
            if self._kv.forks.release_all():
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return 0

    def _schedule_waiting(self, plan: _StepPlan) -> None:
        started: list[Request] = []
        num_passed_over = 0
        for request in self._admission_order(plan):
            if plan.budget <= 0 or len(self._running) >= self._config.max_num_seqs:
                break
            if num_passed_over >= MAX_PASSED_OVER:
                break
            start = self._find_start(request, plan)
            if start is None:
                continue
            num_left = request.num_tokens - start.num_tokens
            num_tokens = self._chunk(num_left, plan, plan.budget) if num_left > 1 else 1
            if not self._may_be_partial(num_left, num_tokens, plan):
                num_passed_over += 1
                continue
            fitting = self._fit(request, start)
            if fitting is None:
                break  # nobody overtakes the head of the queue into the room it waits for
            num_left = request.num_tokens - fitting.num_tokens
            num_tokens = self._kv.num_tokens_that_fit(request, min(num_tokens, num_left), fitting)
            if num_tokens == 0:
                break
            self._start(request, fitting, num_tokens, plan)
            if num_tokens < num_left:
                self._note_partial(num_left, plan)
            started.append(request)
        for request in started:
            self._waiting.remove(request)

    def _admission_order(self, plan: _StepPlan) -> Iterable[Request]:
        """Waiting requests in the order in which they may start; only the first of them are rearranged."""
        if plan.budget <= 0 or len(self._running) >= self._config.max_num_seqs or len(self._waiting) < 2:
            return self._waiting
        if not self._config.longest_prefix_first or not self._kv.config.enable_prefix_caching:
            return self._waiting
        first = admission_order(
            self._waiting[:MAX_PASSED_OVER], self._config, self._clock(), self._kv.lookup.num_cached_blocks
        )
        return chain(first, self._waiting[MAX_PASSED_OVER:])

    def _find_start(self, request: Request, plan: _StepPlan) -> PrefixHit | Fork | None:
        """What a waiting request can begin with; None when it is to wait for what others compute now."""
        fork = self._kv.forks.find(request)
        if fork is None and self._kv.forks.is_coming(request):
            return None
        if fork is None and plan.prefill_budget <= 0:
            return None
        if fork is None and request.awaited_hash is not None and self._kv.is_pending(request.awaited_hash):
            return None
        hit = self._kv.find_hit(request)
        if fork is not None and fork.num_tokens >= hit.num_tokens:
            return fork
        request.awaited_hash = hit.awaits
        return hit if hit.awaits is None else None

    def _may_be_partial(self, num_left: int, num_tokens: int, plan: _StepPlan) -> bool:
        """Whether a request with so much left may start with so many tokens beside other partial ones."""
        if 0 < num_tokens == num_left:
            return True
        if self._is_long(num_left) and plan.num_long_partial >= self._config.max_long_partial_prefills:
            return False
        return num_tokens > 0 and plan.num_partial < self._config.max_num_partial_prefills

    def _fit(self, request: Request, start: PrefixHit | Fork) -> PrefixHit | Fork | None:
        """`start`, or less of it, if there is room for all of the request's tokens."""
        if self._has_room(request, start):
            return start
        if isinstance(start, PrefixHit) and start.has_copy:
            start = start.without_copy(self._kv.block_size)
            if self._has_room(request, start):
                return start
        if not self._kv.forks.release_all():
            return None
        start = self._kv.forks.find(request) or self._kv.find_hit(request).without_copy(self._kv.block_size)
        return start if self._has_room(request, start) else None

    def _start(self, request: Request, start: PrefixHit | Fork, num_tokens: int, plan: _StepPlan) -> None:
        """Admit a waiting request. What the prefix cache did for it is told once, before any preemption."""
        is_first = request.first_scheduled_s is None
        if is_first:
            request.first_scheduled_s = self._clock()
        if isinstance(start, Fork):
            self._recorder.forked(request, start.num_tokens)
        else:
            if is_first:
                request.prefix_miss = self._kv.explain_miss(request, start)
                request.num_cached_tokens = start.num_tokens
            self._recorder.scheduled(request, start.num_tokens)
        request.num_computed_tokens = start.num_tokens
        request.status = RequestStatus.RUNNING
        self._running.add(request)
        self._plan_tokens(request, num_tokens, plan, start)

    def _has_room(self, request: Request, start: PrefixHit | Fork) -> bool:
        """For all tokens it has, not just for its first chunk, so that it is not preempted in its prefill.
        While others run, the watermark stays free for them to grow into."""
        spare = self._num_spare_blocks if len(self._running) else [0] * len(self._num_spare_blocks)
        return self._kv.has_room(request, start, request.num_tokens, self._running, spare)

    def _chunk(self, num_tokens: int, plan: _StepPlan, budget: int) -> int:
        """Tokens of a prefill in this step."""
        num_tokens = min(num_tokens, budget, plan.prefill_budget)
        return self._config.long_prefill_token_threshold if self._is_long(num_tokens) else num_tokens

    def _is_long(self, num_tokens: int) -> bool:
        return 0 < self._config.long_prefill_token_threshold < num_tokens

    def _plan_tokens(
        self, request: Request, num_tokens: int, plan: _StepPlan, hit: PrefixHit | Fork = NO_HIT
    ) -> None:
        is_prefill = request.num_tokens - request.num_computed_tokens > 1
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
        plan.prefill_budget -= num_tokens if is_prefill else 0
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
