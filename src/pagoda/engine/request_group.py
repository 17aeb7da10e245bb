"""`RequestGroup`: a request as its client sees it, over the scheduler's one request a choice."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.core.request import Request
from pagoda.core.step import PromptLogprob
from pagoda.engine.choice import Choice, described_logprobs
from pagoda.engine.output import OutputKind, RequestMetrics, RequestOutput, TokenLogprobs
from pagoda.engine.tokenizer import Tokenizer


class RequestGroup:
    """`requests[i]` belongs to `choices[i]`. Usage counts the prompt, and what was cached of it, once."""

    def __init__(
        self,
        request_id: str,
        requests: Sequence[Request],
        choices: Sequence[Choice],
        *,
        prompt: str | None,
        output_kind: OutputKind,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.requests = requests
        self.choices = choices
        self._prompt = prompt
        self._prompt_token_ids = list(requests[0].prompt_token_ids)
        self._output_kind = output_kind
        self._tokenizer = tokenizer
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._finished_s: float | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]  # nothing predicts the first token
        self._prompt_logprobs_taken = requests[0].params.prompt_logprobs is None
        self._held: list[Choice] = []  # with news, while the prompt's log-probabilities are not all there
        self._num_output_tokens = 0
        self._num_unfinished = len(choices)

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    def add_prompt_logprobs(self, logprobs: Sequence[PromptLogprob]) -> None:
        for entry in logprobs:
            assert entry.position == len(self._prompt_logprobs), "prompt log-probabilities out of order"
            self._prompt_logprobs.append(described_logprobs(entry.token, entry.top_logprobs, self._tokenizer))

    def note_tokens(self, num_tokens: int, now_s: float) -> None:
        """A step has brought tokens for one choice."""
        self._num_output_tokens += num_tokens
        self._first_token_s = now_s if self._first_token_s is None else self._first_token_s
        self._last_token_s = now_s

    def note_finished(self) -> None:
        """One choice has ended."""
        self._num_unfinished -= 1

    def take_output(self, now_s: float, changed: Sequence[Choice]) -> RequestOutput | None:
        """What to hand out now; `changed` are the choices with news. None when nothing is due yet.

        The prompt's log-probabilities are in the first output: another choice than the first, which computes
        them, may have its first token before.
        """
        finished = self._num_unfinished == 0
        if self._output_kind is OutputKind.FINAL and not finished:
            return None
        if finished:
            self._finished_s = now_s
        is_delta = self._output_kind is OutputKind.DELTA
        changed = [*self._held, *(c for c in changed if c not in self._held)]
        if not self._prompt_logprobs_taken and not self._has_prompt_logprobs and not self.choices[0].finished:
            self._held = changed
            return None
        self._held = []
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[c.take_delta() for c in changed] if is_delta else [c.cumulative() for c in self.choices],
            finished=finished,
            num_cached_tokens=self.requests[0].num_cached_tokens,
            metrics=self._metrics(),
            prompt_logprobs=self._take_prompt_logprobs(is_delta),
        )

    @property
    def _has_prompt_logprobs(self) -> bool:
        return len(self._prompt_logprobs) == len(self._prompt_token_ids)

    def _take_prompt_logprobs(self, is_delta: bool) -> list[TokenLogprobs | None] | None:
        if self._prompt_logprobs_taken or not self._has_prompt_logprobs:
            return None
        self._prompt_logprobs_taken = is_delta
        return self._prompt_logprobs

    def _metrics(self) -> RequestMetrics:
        first = self.requests[0]  # its siblings came with it, so it is scheduled first
        return RequestMetrics(
            arrival_s=first.arrival_s,
            first_scheduled_s=first.first_scheduled_s,
            first_token_s=self._first_token_s,
            last_token_s=self._last_token_s,
            finished_s=self._finished_s,
            num_prompt_tokens=len(self._prompt_token_ids),
            num_output_tokens=self._num_output_tokens,
            num_preemptions=sum(r.num_preemptions for r in self.requests),
        )
