"""Plain values that cross the seam between the engine and whatever computes: one step in, one step out.

`SchedulerOutput` is complete, not a delta, and an `Executor` keeps no state of a request between two
steps, so that state of one client can never reach another's row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pagoda.sampling_params import SamplingParams


class TokenGrammar(Protocol):
    """What one choice may still say. Its state follows the request, whatever row or step that is in."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end token may follow."""

    @property
    def error(self) -> str | None:
        """Why it allows nothing any more."""

    def allowed_mask(self) -> bytes:
        """32-bit words [ceil(vocab_size / 32)]; bit i of word w set: token 32 w + i may come next. An end
        token may come exactly where the text is complete. Changes no state."""

    def accept(self, token_id: int) -> bool:
        """Take in the token that came, unless it ended the request; False when it was not allowed."""


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """What choosing the next token of one request needs. The two sequences are read, never kept."""

    params: SamplingParams
    seed: int  # resolved: random numbers are keyed by (seed, number of the output token)
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    masked_token_ids: Sequence[int] = ()  # may not be chosen now (stop tokens before `min_tokens`)
    grammar: TokenGrammar | None = None


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: compute `token_ids` at positions `start`, `start` + 1, ...

    `block_tables` holds one table a layer group, entry i naming the block of positions
    [i * block_size, (i + 1) * block_size); -1 where a windowed group has let the block go.
    `sampling` is None while the request still has tokens to compute after this step.
    `num_prompt_logprobs` asks for log-probabilities of the prompt tokens that this step's rows predict:
    `token_ids[1:]`, and `next_prompt_token_id`, the one that the last row predicts if the prompt goes on.
    """

    request_id: str
    start: int
    token_ids: array[int]
    block_tables: tuple[array[int], ...]
    sampling: SamplingInput | None
    num_prompt_logprobs: int | None = None
    next_prompt_token_id: int | None = None


class BlockCopy(NamedTuple):
    """Copy one physical block onto another of the same group before the step runs (copy-on-write)."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    requests: tuple[ScheduledRequest, ...]
    block_copies: tuple[BlockCopy, ...] = ()

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.requests)


class TokenLogprob(NamedTuple):
    """Natural log of the probability of a token under the model's own distribution (temperature 1)."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token chosen for one request. `error` is set, and the token meaningless, when it failed."""

    token_id: int
    logprob: float | None = None  # only when `SamplingParams.logprobs` asks
    top_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Log-probability of the prompt token at `position`, and the best alternatives there."""

    position: int
    token: TokenLogprob
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Results by request id; a request without `sampling` has no entry in `sampled`."""

    sampled: dict[str, SampledToken]
    prompt_logprobs: dict[str, tuple[PromptLogprob, ...]] = field(default_factory=dict)


class Executor(Protocol):
    """Computes steps: a model on a backend, a simulation, or a test's script."""

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Physical blocks there are, by layer group."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...

    def execute(self, step: SchedulerOutput) -> ModelOutput: ...

    def close(self) -> None: ...
