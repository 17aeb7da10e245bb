"""What a request gives back, shaped like vLLM's `RequestOutput`.

The dataclasses are not frozen only because a frozen one takes twice as long to make, and one of each is
made for every streamed token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class OutputKind(Enum):
    """What the outputs of a request hold each time a step hands them out."""

    DELTA = "delta"  # what is new since the last one
    CUMULATIVE = "cumulative"  # everything so far
    FINAL = "final"  # everything, once, when all choices have finished


class Logprob(NamedTuple):
    """Natural log of a token's probability under the model's own distribution (temperature 1).

    `rank` counts from 1 and is None for a chosen token that is not among the best ones asked for.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


TokenLogprobs = Mapping[int, Logprob]  # by token id: the token itself first, then the best, best first


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request.

    `token_ids` are all tokens that were generated, the one that ended the choice included; `text` leaves
    out the stop string or stop token unless `include_stop_str_in_output`. `logprobs` has one entry a
    token. `finish_reason` is "stop", "length", "abort" or "error", None while the choice goes on;
    `stop_reason` is the stop string or stop token id that ended it, None for the end-of-sequence token.
    `error` says what went wrong when `finish_reason` is "error".
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request on the engine's clock, in seconds; None where it has not happened.

    Of several choices, `first_scheduled_s` and `first_token_s` are the earliest, `finished_s` the last.
    `num_output_tokens` counts every choice, `num_prompt_tokens` the prompt once.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0

    @property
    def queue_s(self) -> float | None:
        """Arrival to the first step that computed one of its tokens."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, queueing included."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(slots=True)
class RequestOutput:
    """A request's answer: all of it, or with `OutputKind.DELTA` what the step added.

    `prompt_logprobs` has one entry a prompt token, the first of them None; it comes once, with the first
    output. `num_cached_tokens` is how many prompt tokens the prefix cache held, 0 included.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
