"""`SimExecutor`: steps that take virtual time, by a cost model, under the real scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.core.step import BlockCopy, ModelOutput, SampledToken, SchedulerOutput


class VirtualClock:
    """A clock that moves only when told to; call it for the time in seconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        if duration_s < 0:
            raise ValueError(f"a clock cannot go back by {-duration_s} s")
        self._now_s += duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCostModel:
    """Seconds of a step = `step_s` + tokens x `token_s` + attended positions x `context_token_s`.

    An attended position is one (query, key) pair: a token at position p attends to p + 1 of them.
    """

    step_s: float
    token_s: float
    context_token_s: float = 0.0

    def duration_s(self, step: SchedulerOutput) -> float:
        num_attended = 0
        for r in step.requests:
            first, last = r.start + 1, r.start + len(r.token_ids)
            num_attended += (first + last) * len(r.token_ids) // 2
        return self.step_s + step.num_scheduled_tokens * self.token_s + num_attended * self.context_token_s


class SimExecutor:
    """Advances `clock` by what the cost model says and answers every sampled row with `token_id`.

    Requests end by length alone unless `token_id` is one of their stop tokens. There are no
    probabilities, so a request that asks for some fails.
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        cost_model: LinearCostModel,
        clock: VirtualClock,
        *,
        token_id: int = 0,
    ) -> None:
        self._num_blocks = tuple(num_blocks)
        self._cost_model = cost_model
        self._clock = clock
        self._token_id = token_id

    @property
    def num_blocks(self) -> tuple[int, ...]:
        return self._num_blocks

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies are free: they read and write a block, which is little beside a step."""

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        self._clock.advance(self._cost_model.duration_s(step))
        sampled = {}
        for r in step.requests:
            if r.num_prompt_logprobs is not None or (r.sampling and r.sampling.params.logprobs is not None):
                error = "a simulation has no log-probabilities"
                sampled[r.request_id] = SampledToken(-1, error=error)
            elif r.sampling is not None:
                sampled[r.request_id] = SampledToken(self._token_id)
        return ModelOutput(sampled)

    def close(self) -> None:
        pass
