"""A model whose next token is a pure function of the whole history, once read through block tables and
once computed naively. A wrong table, a stale block or a double write changes what it says."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pagoda.core.cost import KVCacheSpec, LayerGroup
from pagoda.core.request import FinishReason, Request
from pagoda.core.step import (
    BlockCopy,
    ModelOutput,
    PromptLogprob,
    SampledToken,
    SamplingInput,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprob,
)
from pagoda.sampling_params import SamplingParams

Windows = tuple[int | None, ...]


def make_spec(windows: Windows = (None,), block_size: int = 4) -> KVCacheSpec:
    groups = tuple(LayerGroup((i,), 1, 8, window) for i, window in enumerate(windows))
    return KVCacheSpec(groups, block_size)


def state_of(token_id: int, position: int, visible: Sequence[Sequence[int]]) -> int:
    """What is "computed" for a token: it depends on every state that each group's span shows."""
    return hash((token_id, position, *(tuple(v) for v in visible))) & 0x7FFF_FFFF_FFFF


def choose(state: int, vocab_size: int, masked_token_ids: Sequence[int]) -> int:
    allowed = [t for t in range(vocab_size) if t not in masked_token_ids]
    return allowed[state % len(allowed)]


def prompt_logprob(state: int) -> float:
    return -float(state % 1009)


class NaiveModel:
    """The oracle: no blocks, no cache, no batch."""

    def __init__(self, windows: Windows, vocab_size: int) -> None:
        self.windows = windows
        self.vocab_size = vocab_size
        self._states: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}

    def states(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        tokens = tuple(token_ids)
        known = len(tokens)
        while tokens[:known] not in self._states:
            known -= 1
        states = list(self._states[tokens[:known]])
        for position in range(known, len(tokens)):
            visible = [states[0 if w is None else max(0, position - w + 1) :] for w in self.windows]
            states.append(state_of(tokens[position], position, visible))
            self._states[tokens[: position + 1]] = tuple(states)
        return tuple(states)

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, eos: frozenset[int], max_num_tokens: int
    ) -> tuple[list[int], FinishReason]:
        """The whole answer, by the rules of `SamplingParams` alone."""
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
        output: list[int] = []
        while len(prompt) + len(output) < max_num_tokens:
            masked = ends if len(output) < params.min_tokens else set()
            state = self.states([*prompt, *output])[-1]
            output.append(choose(state, self.vocab_size, sorted(masked)))
            if output[-1] in ends and len(output) >= params.min_tokens:
                return output, FinishReason.STOP
        return output, FinishReason.LENGTH


class PagedModel:
    """An `Executor` that keeps states in blocks, and checks what it reads against a `NaiveModel`."""

    def __init__(self, spec: KVCacheSpec, num_blocks: Sequence[int], vocab_size: int) -> None:
        self.spec = spec
        self.num_blocks = tuple(num_blocks)
        self.naive = NaiveModel(tuple(g.window for g in spec.groups), vocab_size)
        self.vocab_size = vocab_size
        self.slots: list[list[int | None]] = [[None] * (n * spec.block_size) for n in num_blocks]
        self.failing: set[str] = set()  # requests that get an error instead of a token
        self.num_computed_tokens = 0

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        size = self.spec.block_size
        for group, source, target in copies:
            slots = self.slots[group]
            slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        sampled, prompt_logprobs = {}, {}
        for r in step.requests:
            states = [self._compute(r, i) for i in range(len(r.token_ids))]
            self.num_computed_tokens += len(states)
            if r.num_prompt_logprobs is not None:
                predicted = array("i", r.token_ids[1:])
                if r.next_prompt_token_id is not None:
                    predicted.append(r.next_prompt_token_id)
                prompt_logprobs[r.request_id] = tuple(
                    PromptLogprob(r.start + i + 1, TokenLogprob(token_id, prompt_logprob(state)))
                    for i, (token_id, state) in enumerate(zip(predicted, states, strict=False))
                )
            if r.sampling is not None:
                sampled[r.request_id] = self._sample(r, r.sampling, states[-1])
        return ModelOutput(sampled, prompt_logprobs)

    def close(self) -> None:
        pass

    def _sample(self, r: ScheduledRequest, sampling: SamplingInput, state: int) -> SampledToken:
        history = [*sampling.prompt_token_ids, *sampling.output_token_ids]
        assert len(history) == r.start + len(r.token_ids), "sampled before all tokens are computed"
        assert state == self.naive.states(history)[-1], f"{r.request_id} has read what is not its own history"
        if r.request_id in self.failing:
            return SampledToken(-1, error="no finite logit")
        return SampledToken(choose(state, self.vocab_size, sampling.masked_token_ids))

    def _compute(self, r: ScheduledRequest, row: int) -> int:
        position = r.start + row
        visible = []
        for group, table in enumerate(r.block_tables):
            window = self.spec.groups[group].window
            first = 0 if window is None else max(0, position - window + 1)
            states = [self.slots[group][self._slot(table, p)] for p in range(first, position)]
            assert None not in states, f"{r.request_id} reads a slot that was never written"
            visible.append([s for s in states if s is not None])
        state = state_of(r.token_ids[row], position, visible)
        for group, table in enumerate(r.block_tables):
            self.slots[group][self._slot(table, position)] = state
        return state

    def _slot(self, table: Sequence[int], position: int) -> int:
        index, offset = divmod(position, self.spec.block_size)
        assert table[index] >= 0, f"position {position} is behind the window and still visible"
        return table[index] * self.spec.block_size + offset


def make_request(request_id: str, prompt: Sequence[int], **options: object) -> Request:
    """A greedy request; sampling parameters and request options may be mixed."""
    names = SamplingParams.__dataclass_fields__.keys()
    params = {"temperature": 0.0} | {k: v for k, v in options.items() if k in names and k != "seed"}
    others = {k: v for k, v in options.items() if k not in names}
    return Request(request_id, prompt, SamplingParams(**params), seed=0, **others)  # type: ignore[arg-type]
