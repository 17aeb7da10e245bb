"""`Scheduler`: which requests compute which tokens in the next step.

There are no phases. Every request has `num_tokens` known tokens, of which `num_computed_tokens` are in
the KV cache; a step hands out a budget of tokens so that the second catches up with the first. Prefill,
chunked prefill, decode and resumption after preemption are all the same (after vLLM's V1 scheduler).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pagoda.config import CacheConfig, SchedulerConfig
from pagoda.core.cost import KVCacheSpec
from pagoda.core.deadlines import Deadlines
from pagoda.core.events import EventRecorder, EventSink
from pagoda.core.kv_cache_manager import KVCacheManager
from pagoda.core.prefill_pace import PrefillPace
from pagoda.core.prefix_cache import PrefixCacheStats
from pagoda.core.prefix_pins import PrefixInfo, named_prefix
from pagoda.core.request import FINISHED_STATUS, FinishReason, Request, RequestOutputDelta, RequestStatus
from pagoda.core.request_queue import RequestQueue, queue_key
from pagoda.core.step import (
    ModelOutput,
    PromptLogprob,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from pagoda.core.step_planner import StepPlanner
from pagoda.errors import CapacityError, RequestError


class Scheduler:
    """Continuous batching over a paged KV cache.

    `schedule` and `update` alternate; `add`, `finish` and `abort` may come at any time between them.

    Args:
        config: budgets and policy.
        spec: shape of the KV cache.
        num_blocks: blocks that the executor has, by layer group.
        cache: whether and how prefixes are shared.
        clock: now, in seconds; deadlines, ageing and events use it.
        on_event: receives every event of `core/events.py`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        spec: KVCacheSpec,
        num_blocks: Sequence[int],
        *,
        cache: CacheConfig,
        clock: Callable[[], float] = time.monotonic,
        on_event: EventSink | None = None,
    ) -> None:
        if len(num_blocks) != len(spec.groups) or min(num_blocks) < 1:
            raise CapacityError(
                f"num_blocks is {tuple(num_blocks)}; {len(spec.groups)} layer groups need blocks"
            )
        self.config = config
        self.kv = KVCacheManager(
            spec, num_blocks, cache, clock=clock, on_event=on_event, max_model_len=config.max_model_len
        )
        self.requests: dict[str, Request] = {}  # all that have not finished
        self.num_steps = 0
        self._clock = clock
        self._max_sequence_tokens = self.kv.max_sequence_tokens()
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._recorder = EventRecorder(clock, on_event)
        self._pace = PrefillPace(config.max_decode_slowdown)
        self._planner = StepPlanner(
            config, self.kv, self._waiting, self._running, self._recorder, clock, self._pace
        )
        self._step_started_s = self._step_planned_s = 0.0
        self._num_added = 0
        self._deadlines = Deadlines()
        self._finished: list[RequestOutputDelta] = []  # ended outside `update`, not yet handed out
        self._in_flight: tuple[SchedulerOutput, list[Request]] | None = None

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests or self._finished)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def prefix_stats(self) -> PrefixCacheStats:
        return self._recorder.prefix_stats

    @property
    def num_preemptions(self) -> int:
        """How often a request had to give its blocks back, since the start."""
        return self._recorder.num_preemptions

    @property
    def num_forked_tokens(self) -> int:
        """Prompt tokens that choices took from a sibling instead of computing them, since the start."""
        return self._recorder.num_forked_tokens

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: its prompt is longer than the model's context allows, or its id is taken.
            CapacityError: the KV cache could not hold its prompt even if it were alone.
        """
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        num_prompt, params = request.num_prompt_tokens, request.params
        num_least = num_prompt + (0 if params.max_tokens == 0 else 1)
        limit = self.config.max_model_len
        if num_least > limit:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; with {num_least - num_prompt} of output that is "
                f"more than max_model_len, which is {limit}",
                param="prompt",
            )
        max_kv = self._max_sequence_tokens
        if max_kv is not None and num_prompt > max_kv:
            raise CapacityError(
                f"the prompt has {num_prompt} tokens; the whole KV cache holds {max_kv}",
                hint="shorten the prompt or raise --kv-cache-memory-bytes",
            )
        max_tokens = limit if params.max_tokens is None else params.max_tokens
        request.max_num_tokens = min(num_prompt + max_tokens, limit)
        if max_kv is not None:
            # The last token is never computed, so it needs no room.
            request.max_num_tokens = min(request.max_num_tokens, max_kv + 1)
        request.queue_key = queue_key(request, self._num_added, self.config)
        self._num_added += 1
        self.requests[request.request_id] = request
        self._waiting.add(request)
        self._deadlines.add(request, len(self.requests))
        request.queued_s = self._clock()
        self._recorder.added(request)

    def abort(self, request_id: str) -> bool:
        """End a request that nobody waits for any more; False when it is not there (any more)."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> bool:
        """End a request for a reason seen outside, such as a stop string; False when it is not there.

        Its blocks are back before this returns. No `RequestOutputDelta` follows.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._end(request, reason, stop_reason)
        return True

    def collect_finished(self) -> list[RequestOutputDelta]:
        """Last deltas of requests that ended in `schedule` (past their deadline). `update` includes them;
        ask here when `schedule` returned None."""
        finished, self._finished = self._finished, []
        return finished

    # The prefix cache, for whoever runs the engine.

    def pin_prefix(
        self,
        token_ids: Sequence[int] | None = None,
        *,
        block_hash: bytes | None = None,
        ttl_s: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> PrefixInfo:
        """Keep the longest cached prefix of `token_ids`, or the one of this hash, from eviction.

        Whole blocks count: the result says how many tokens they have. At most `max_pinned_share` of the
        pool is pinned, and a sequence of `max_model_len` always finds room. `ttl_s` None is for good.

        Raises:
            RequestError: nothing of it is cached, or an argument is wrong.
            CapacityError: there is no room for another pin.
        """
        return self.kv.pins.pin(named_prefix(token_ids, block_hash, cache_salt, adapter), ttl_s)

    def unpin_prefix(
        self,
        token_ids: Sequence[int] | None = None,
        *,
        block_hash: bytes | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> bool:
        """Take back the pin of this hash, or the longest along `token_ids`; False when there is none."""
        return self.kv.pins.unpin(named_prefix(token_ids, block_hash, cache_salt, adapter))

    def list_prefixes(self) -> list[PrefixInfo]:
        """The longest cached prefixes and all pinned ones, latest use first."""
        return self.kv.pins.list_prefixes()

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds, pinned ones too; returns how many that were."""
        return self.kv.reset_prefix_cache()

    # One step.

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step; None when there is nothing to compute."""
        if self._in_flight is not None:
            raise RuntimeError("the last step is still to be updated")
        self._step_started_s = self._clock()
        self._expire()
        self.kv.pins.expire()
        self._in_flight = self._planner.plan()
        if self._in_flight is None:
            return None
        step = self._in_flight[0]
        self.num_steps += 1
        self._recorder.step_scheduled(
            self.num_steps, step, len(self._running), len(self._waiting), self.kv.usage
        )
        self._step_planned_s = self._clock()
        return step

    def update(self, step: SchedulerOutput, output: ModelOutput) -> list[RequestOutputDelta]:
        """Take in what a step has computed. Requests that have ended since it was planned are skipped."""
        executed_s = self._clock()
        deltas = self.collect_finished()
        requests = self._land(step)
        self._pace.observe(step, executed_s - self._step_started_s)
        for request, scheduled in zip(requests, step.requests, strict=True):
            if request.is_finished:
                continue
            delta = self._update_request(request, scheduled, output)
            if delta is not None:
                deltas.append(delta)
        self._recorder.step_finished(self.num_steps, executed_s - self._step_planned_s)
        return deltas

    def fail_step(self, step: SchedulerOutput, message: str) -> list[RequestOutputDelta]:
        """The executor could not run the step: its requests end with an error, the others go on."""
        deltas = self.collect_finished()
        for request in self._land(step):
            if not request.is_finished:
                self._end(request, FinishReason.ERROR, error=message)
                deltas.append(_delta(request))
        return deltas

    def _land(self, step: SchedulerOutput) -> list[Request]:
        if self._in_flight is None or self._in_flight[0] is not step:
            raise RuntimeError("this is not the step that was scheduled last")
        requests = self._in_flight[1]
        self._in_flight = None
        return requests

    def _update_request(
        self, request: Request, scheduled: ScheduledRequest, output: ModelOutput
    ) -> RequestOutputDelta | None:
        sampled: tuple[SampledToken, ...] = ()
        if scheduled.sampling is not None:
            token = output.sampled.get(request.request_id)
            if token is None or token.error is not None:
                error = "the model returned no token" if token is None else token.error
                self._end(request, FinishReason.ERROR, error=error)
                return _delta(request)
            sampled = (token,)
        request.num_computed_tokens += len(scheduled.token_ids)
        self.kv.commit(request)
        prompt_logprobs = self._new_prompt_logprobs(request, scheduled, output)
        end: tuple[FinishReason, int | str | None] | None = None
        if sampled:
            request.append_output(sampled[0].token_id)
            end = request.check_end()
            error = request.advance_grammar() if end is None else None
            if error is not None:
                self._end(request, FinishReason.ERROR, error=error)
                return _delta(request)
            self._recorder.generated(request, sampled[0].token_id)
        elif request.num_computed_tokens == request.num_tokens:
            end = FinishReason.LENGTH, None  # there was only a prompt to compute
        if end is not None:
            self._end(request, *end)
        if not (sampled or prompt_logprobs or end):
            return None
        return _delta(request, sampled, prompt_logprobs)

    def _new_prompt_logprobs(
        self, request: Request, scheduled: ScheduledRequest, output: ModelOutput
    ) -> tuple[PromptLogprob, ...]:
        """Those not handed out yet: after preemption in mid-prompt the first ones are computed again."""
        if scheduled.num_prompt_logprobs is None:
            return ()
        num_done = request.num_prompt_logprobs_done
        new = tuple(p for p in output.prompt_logprobs.get(request.request_id, ()) if p.position > num_done)
        request.num_prompt_logprobs_done += len(new)
        return new

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """The only way out for a request, whatever state it is in."""
        del self.requests[request.request_id]
        (self._running if request.status is RequestStatus.RUNNING else self._waiting).remove(request)
        self.kv.free(request, failed=reason is FinishReason.ERROR, keep_prompt=True)
        request.status = FINISHED_STATUS[reason]
        request.finish_reason, request.stop_reason, request.error = reason, stop_reason, error
        self._recorder.finished(request)

    def _expire(self) -> None:
        now_s = self._clock()
        for request in self._deadlines.take_expired(now_s):
            assert request.deadline_s is not None
            error = f"its deadline passed {now_s - request.deadline_s:.3f} s ago"
            self._end(request, FinishReason.ERROR, error=error)
            self._finished.append(_delta(request))


def _delta(
    request: Request,
    sampled: tuple[SampledToken, ...] = (),
    prompt_logprobs: tuple[PromptLogprob, ...] = (),
) -> RequestOutputDelta:
    return RequestOutputDelta(
        request.request_id,
        sampled,
        prompt_logprobs,
        request.num_cached_tokens,
        request.finish_reason,
        request.stop_reason,
        request.error,
    )
