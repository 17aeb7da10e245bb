"""Drives a scheduler over a `PagedModel` and checks every invariant on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from pagoda.config import CacheConfig, SchedulerConfig
from pagoda.core.events import Event, PrefixPinned, PrefixUnpinned
from pagoda.core.invariants import LifecycleChecker, ProgressChecker, check_state, check_step
from pagoda.core.request import FinishReason, Request
from pagoda.core.scheduler import Scheduler
from pagoda.core.step import SchedulerOutput
from tests.core.paged_model import PagedModel, Windows, make_request, make_spec, prompt_logprob


class Harness:
    """One scheduler, one model, a clock that tests move, and all answers."""

    def __init__(
        self,
        num_blocks: int | Sequence[int] = 64,
        *,
        windows: Windows = (None,),
        block_size: int = 4,
        vocab_size: int = 50,
        cache: CacheConfig | None = None,
        duration_s: Callable[[SchedulerOutput], float] = lambda step: 0.0,
        **config: object,
    ) -> None:
        pools = [num_blocks] * len(windows) if isinstance(num_blocks, int) else list(num_blocks)
        spec = make_spec(windows, block_size)
        options = {"max_model_len": 1000, "max_num_seqs": 8, "max_num_batched_tokens": 64, "watermark": 0.0}
        self.now_s = 0.0
        self.duration_s = duration_s  # of a step
        self.events: list[Event] = []
        self.pinned: dict[bytes, int] = {}  # tokens by hash, as the events tell
        self.lifecycle = LifecycleChecker()
        self.progress = ProgressChecker(max_idle_steps=200)
        self.model = PagedModel(spec, pools, vocab_size)
        self.scheduler = Scheduler(
            SchedulerConfig(**(options | config)),  # type: ignore[arg-type]
            spec,
            pools,
            cache=cache or CacheConfig(block_size=block_size),
            clock=lambda: self.now_s,
            on_event=self._on_event,
        )
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[tuple[int, float]]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.steps: list[SchedulerOutput] = []

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        self.lifecycle(event)
        if isinstance(event, PrefixPinned):
            self.pinned[event.block_hash] = event.num_tokens
        elif isinstance(event, PrefixUnpinned):
            del self.pinned[event.block_hash]

    @property
    def kv(self):  # type: ignore[no-untyped-def]
        return self.scheduler.kv

    def add(self, request_id: str, prompt: Sequence[int], **options: object) -> Request:
        options.setdefault("arrival_s", self.now_s)
        request = make_request(request_id, prompt, **options)
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.prompt_logprobs[request_id] = []
        self.ended.pop(request_id, None)
        return request

    def add_choices(self, request_id: str, n: int, prompt: Sequence[int], **options: object) -> list[Request]:
        """`n` requests of one prompt that fork each other's blocks, named `request_id`/0 and so on."""
        siblings: list[Request] = []
        for index in range(n):
            logprobs = options.get("prompt_logprobs") if index == 0 else None
            choice = options | {"prompt_logprobs": logprobs, "siblings": siblings}
            siblings.append(self.add(f"{request_id}/{index}", prompt, **choice))
        return siblings

    def step(
        self, *, in_flight: Callable[[], object] | None = None, fail: bool = False
    ) -> SchedulerOutput | None:
        """One step; `in_flight` runs after it was planned and before it is executed."""
        step = self.scheduler.schedule()
        check_state(self.scheduler)
        self.progress(self.scheduler, step)
        if step is None:
            self._take(self.scheduler.collect_finished())
            return None
        check_step(self.scheduler, step)
        self.steps.append(step)
        if in_flight is not None:
            in_flight()
            check_state(self.scheduler)
        self.now_s += self.duration_s(step)
        if fail:
            self._take(self.scheduler.fail_step(step, "the device is gone"))
        else:
            self.model.copy_blocks(step.block_copies)
            self._take(self.scheduler.update(step, self.model.execute(step)))
        check_state(self.scheduler)
        return step

    def run(self, max_steps: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished, f"still busy after {max_steps} steps"
        check_state(self.scheduler)
        self.lifecycle.check_ended()

    def generate(self, request_id: str, prompt: Sequence[int], **options: object) -> Request:
        request = self.add(request_id, prompt, **options)
        self.run()
        return request

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool:
        found = self.scheduler.finish(request_id, reason, stop_reason)
        if found:
            assert request_id not in self.ended
            self.ended[request_id] = reason
        return found

    def events_of(self, kind: type) -> list:  # type: ignore[type-arg]
        return [e for e in self.events if isinstance(e, kind)]

    def check_answer(self, request_id: str) -> None:
        """What the request has given out is what the naive model says, or the beginning of it."""
        request = self.requests[request_id]
        expected, reason = self.model.naive.generate(
            request.prompt_token_ids, request.params, request.eos_token_ids, request.max_num_tokens
        )
        output = self.outputs[request_id]
        assert output == list(request.output_token_ids)
        assert list(request.token_ids) == [*request.prompt_token_ids, *output]
        assert output == expected[: len(output)]
        if self.ended.get(request_id) in (FinishReason.STOP, FinishReason.LENGTH) and not isinstance(
            request.stop_reason, str
        ):
            assert output == expected
            assert request.finish_reason is reason
        self._check_prompt_logprobs(request)

    def _check_prompt_logprobs(self, request: Request) -> None:
        if request.params.prompt_logprobs is None:
            assert self.prompt_logprobs[request.request_id] == []
            return
        states = self.model.naive.states(request.prompt_token_ids)
        expected = [(i + 1, prompt_logprob(s)) for i, s in enumerate(states[:-1])]
        given = self.prompt_logprobs[request.request_id]
        assert given == expected[: len(given)]
        if self.outputs[request.request_id]:
            assert given == expected

    def _take(self, deltas) -> None:  # type: ignore[no-untyped-def]
        for delta in deltas:
            assert delta.request_id not in self.ended, "a delta after the last one"
            assert delta.new_token_ids or delta.prompt_logprobs or delta.finished, "an empty delta"
            self.outputs[delta.request_id].extend(delta.new_token_ids)
            self.prompt_logprobs[delta.request_id].extend(
                (p.position, p.token.logprob) for p in delta.prompt_logprobs
            )
            if delta.finish_reason is not None:
                self.ended[delta.request_id] = delta.finish_reason
                assert (delta.error is not None) == (delta.finish_reason is FinishReason.ERROR)
        assert all(a != b for a, b in pairwise([d.request_id for d in deltas])), "two deltas in a step"
