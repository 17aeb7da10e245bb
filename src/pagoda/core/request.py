"""`Request`: one sequence of tokens on its way through the scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from pagoda.core.block_hash import ContentSpan, ExtraKey, encode_extra_keys
from pagoda.core.prefix_cache import PrefixMiss
from pagoda.core.step import PromptLogprob, SampledToken, SamplingInput, TokenGrammar
from pagoda.errors import RequestError
from pagoda.sampling_params import SamplingParams


class FinishReason(str, Enum):
    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH = "finished_length"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_ERROR = "finished_error"


FINISHED_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}


class Request:
    """Tokens of one sequence and how far they have been computed.

    `prompt_token_ids`, `output_token_ids` and `token_ids` (both together) are live arrays that grow:
    read them, and drop every buffer view before the next step. The boundary between prompt and output
    never moves, preemption included.

    `seed` is resolved by the caller (one for each of `n` choices). `deadline_s` is a time on the
    scheduler's clock. `adapter` identifies weights added to the model's own, content and all: blocks are
    never shared between two of them, nor between two `cache_salt`. With `use_cache` off the request
    neither takes blocks from the prefix cache nor leaves any. `grammar` is the request's own.

    `siblings` is one list that all choices of a request share, themselves included; they agree in all but
    `seed` and `prompt_logprobs`, and share the blocks of their prompt.

    Raises:
        RequestError: the prompt is empty or holds something that is not a token id.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        eos_token_ids: frozenset[int] = frozenset(),
        arrival_s: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        use_cache: bool = True,
        deadline_s: float | None = None,
        adapter: str | None = None,
        content_spans: Sequence[ContentSpan] = (),
        grammar: TokenGrammar | None = None,
        siblings: Sequence[Request] = (),
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.arrival_s = arrival_s
        self.priority = priority
        self.cache_salt = cache_salt
        self.use_cache = use_cache
        self.deadline_s = deadline_s
        self.content_spans = tuple(content_spans)
        self.siblings = siblings
        self.grammar = grammar
        self.cache_root = encode_extra_keys(_root_keys(cache_salt, adapter))
        self.block_hashes: list[bytes] = []  # of the full blocks so far, filled in by the KVCacheManager

        self.prompt_token_ids = _token_array(prompt_token_ids)
        self.output_token_ids = array("i")
        self.token_ids = array("i", self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # of the prompt, when it was first scheduled
        self.num_preemptions = 0
        self.num_prompt_logprobs_done = 0  # prompt positions whose log-probability has been handed out

        # Set by the scheduler.
        self.max_num_tokens = self.num_prompt_tokens + (params.max_tokens or 0)
        self.queue_key: tuple[float, int] = (0.0, 0)
        self.queued_s = arrival_s  # when it last began to wait
        self.awaited_hash: bytes | None = None  # of a block that another request is computing

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.first_scheduled_s: float | None = None
        self.prefix_miss: PrefixMiss | None = None  # why the prompt was not wholly cached; None: it was

        eos = () if params.ignore_eos else eos_token_ids
        self._end_token_ids = frozenset((*eos, *params.stop_token_ids))
        self._sampling = SamplingInput(
            params, seed, self.prompt_token_ids, self.output_token_ids, grammar=grammar
        )
        self._sampling_before_min_tokens = replace(
            self._sampling, masked_token_ids=tuple(sorted(self._end_token_ids))
        )

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def reads_cache(self) -> bool:
        """Whether it takes blocks from the prefix cache; rows of prompt logprobs have to be computed."""
        return self.use_cache and not self.needs_prompt_logprobs

    @property
    def needs_prompt_logprobs(self) -> bool:
        return (
            self.params.prompt_logprobs is not None
            and self.num_prompt_logprobs_done < self.num_prompt_tokens - 1
        )

    @property
    def generates(self) -> bool:
        """False when only the prompt is to be computed (`max_tokens` 0)."""
        return self.max_num_tokens > self.num_prompt_tokens

    def sampling_input(self) -> SamplingInput:
        """Before `min_tokens` the tokens that would end the request are masked."""
        return self._sampling if self._may_end else self._sampling_before_min_tokens

    @property
    def _may_end(self) -> bool:
        """`min_tokens` are there, or the grammar leaves nothing else to say."""
        if self.num_output_tokens >= self.params.min_tokens:
            return True
        return self.grammar is not None and self.grammar.is_complete

    def append_output(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)

    def advance_grammar(self) -> str | None:
        """Take the latest output token into the grammar, once it is known not to end the request; what is
        wrong if the grammar does not allow it."""
        if self.grammar is None or self.grammar.accept(self.output_token_ids[-1]):
            return None
        return f"the grammar of the output does not allow its last token: {self.grammar.error}"

    def check_end(self) -> tuple[FinishReason, int | str | None] | None:
        """Finish reason and stop reason if the latest output token ends the request, else None.

        The stop reason of an end-of-sequence token is None.
        """
        if self._may_end:
            token_id = self.output_token_ids[-1]
            if token_id in self._end_token_ids:
                is_eos = token_id in self.eos_token_ids and not self.params.ignore_eos
                return FinishReason.STOP, None if is_eos else token_id
        if self.num_tokens >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None


@dataclass(frozen=True, slots=True)
class RequestOutputDelta:
    """What one step adds to a request. `sampled` has one entry a new token, log-probabilities included.

    `finish_reason` is set on the last delta of a request; `error` says what went wrong when it is ERROR.
    """

    request_id: str
    sampled: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        return tuple(s.token_id for s in self.sampled)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


def _root_keys(cache_salt: str | None, adapter: str | None) -> list[ExtraKey]:
    keys = [("salt", cache_salt), ("adapter", adapter)]
    return [ExtraKey(kind, value.encode()) for kind, value in keys if value is not None]


def _token_array(token_ids: Sequence[int]) -> array[int]:
    try:
        tokens = array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise RequestError(
            f"the prompt holds something that is not a token id: {error}", param="prompt"
        ) from error
    if not tokens:
        raise RequestError("the prompt is empty", param="prompt", hint="send at least one token")
    if min(tokens) < 0:
        raise RequestError(f"token id {min(tokens)} of the prompt is negative", param="prompt")
    return tokens
