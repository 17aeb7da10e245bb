"""`Choice`: one of the `n` answers of a request, from sampled tokens to text and an end."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.core.request import FinishReason, RequestOutputDelta
from pagoda.core.step import SampledToken, TokenLogprob
from pagoda.engine.detokenizer import IncrementalDetokenizer, StopChecker
from pagoda.engine.output import CompletionOutput, Logprob, TokenLogprobs
from pagoda.engine.tokenizer import Tokenizer
from pagoda.sampling_params import SamplingParams


class Choice:
    """Collects what one choice generates; knows nothing of steps or blocks."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.token_ids: list[int] = []
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = (
            IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                shown_special_token_ids=params.shown_special_token_ids,
            )
            if tokenizer is not None
            else None
        )
        self._stop_checker = (
            StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
        )
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative_logprob = 0.0
        self._taken = (0, 0)  # entries of `_text` and `token_ids` that deltas have handed out

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, delta: RequestOutputDelta) -> None:
        """Add the tokens of a step. A stop string may end the choice before the scheduler has.

        The text of a stop token is left out unless `include_stop_str_in_output`.
        """
        for number, token in enumerate(delta.sampled, 1):
            is_stop_token = delta.finish_reason is FinishReason.STOP and number == len(delta.sampled)
            self._add(token)
            if not is_stop_token or self._params.include_stop_str_in_output:
                self._add_text(token.token_id)
            if self.finished:
                return
        if delta.finish_reason is not None:
            self.finish(delta.finish_reason.value, delta.stop_reason, delta.error)

    def finish(self, reason: str, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """End the choice and let go of text that was held back, for a stop string or a character."""
        if self._stop_checker is not None:
            self._text.append(self._stop_checker.flush())
        if self._detokenizer is not None:
            self._text.append(self._detokenizer.flush())
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error

    def _add(self, token: SampledToken) -> None:
        self.token_ids.append(token.token_id)
        if self._params.logprobs is not None:
            assert token.logprob is not None, "the executor gave no log-probability where one was asked for"
            chosen = TokenLogprob(token.token_id, token.logprob)
            self._logprobs.append(described_logprobs(chosen, token.top_logprobs, self._tokenizer))
            self._cumulative_logprob += token.logprob

    def _add_text(self, token_id: int) -> None:
        if self._detokenizer is None:
            return
        text = self._detokenizer.push([token_id])
        # What the first `min_tokens` tokens say is never searched: it could not end the choice.
        if self._stop_checker is not None and len(self.token_ids) > self._params.min_tokens:
            text, stop = self._stop_checker.push(text)
            if stop is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP.value, stop
        self._text.append(text)

    def cumulative(self) -> CompletionOutput:
        return self._output(0, 0)

    def take_delta(self) -> CompletionOutput:
        """What is new since the last call."""
        output = self._output(*self._taken)
        self._taken = len(self._text), len(self.token_ids)
        return output

    def _output(self, first_text: int, first_token: int) -> CompletionOutput:
        has_logprobs = self._params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text="".join(self._text[first_text:]),
            token_ids=self.token_ids[first_token:],
            logprobs=self._logprobs[first_token:] if has_logprobs else None,
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )


def described_logprobs(
    token: TokenLogprob, top_logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer | None
) -> TokenLogprobs:
    """The token itself first, then the best alternatives, each with its rank and its text."""
    ranks = {t.token_id: rank for rank, t in enumerate(top_logprobs, 1)}
    return {
        t.token_id: Logprob(
            t.logprob, ranks.get(t.token_id), tokenizer.decode([t.token_id]) if tokenizer else None
        )
        for t in (token, *top_logprobs)
    }
