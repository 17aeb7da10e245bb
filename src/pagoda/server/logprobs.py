"""Log-probabilities in the formats of the two endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pagoda.engine.output import CompletionOutput, Logprob, TokenLogprobs
from pagoda.engine.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON has not


class LogprobsFormat:
    """Turns tokens into text and log-probabilities into JSON for one choice; keeps its `text_offset`."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, keeps_stop_token: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._keeps_stop_token = keeps_stop_token
        self._offset = 0

    def chat(self, output: CompletionOutput, num_top: int) -> dict[str, Any]:
        """`{"content": [...]}`: the sampled token, and the `num_top` likeliest."""
        content = []
        for token_id, logprobs in self._entries(output):
            best = [item for item in logprobs.items() if item[1].rank is not None]
            top = [self._chat_entry(t, logprob) for t, logprob in sorted(best, key=_rank)[:num_top]]
            content.append({**self._chat_entry(token_id, logprobs[token_id]), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(self, output: CompletionOutput) -> dict[str, Any]:
        """Four lists with an entry a token; the likeliest tokens include the sampled one."""
        return self._lists(self._entries(output))

    def echo(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The prompt's; nothing predicts its first token."""
        return self._lists(zip(token_ids, logprobs, strict=True))

    def _entries(self, output: CompletionOutput) -> Iterable[tuple[int, TokenLogprobs]]:
        assert output.logprobs is not None
        entries = list(zip(output.token_ids, output.logprobs, strict=True))
        ended_by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        # A token that ends the choice without being part of its text is counted, and not listed.
        return entries[:-1] if entries and ended_by_token and not self._keeps_stop_token else entries

    def _lists(self, entries: Iterable[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        tokens, token_logprobs, top_logprobs, text_offset = [], [], [], []
        for token_id, logprobs in entries:
            text = self._text(token_id)
            tokens.append(text)
            token_logprobs.append(None if logprobs is None else _finite(logprobs[token_id]))
            top_logprobs.append(
                None if logprobs is None else {self._text(t): _finite(lp) for t, lp in logprobs.items()}
            )
            text_offset.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }

    def _chat_entry(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        is_hidden = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        token_bytes = b"" if is_hidden else self._tokenizer.token_bytes(token_id)
        return {
            "token": self._text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(token_bytes),
        }

    def _text(self, token_id: int) -> str:
        """As OpenAI spells it: bytes that are only a part of a character are `bytes:\\xe2\\x82`."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        token_bytes = self._tokenizer.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def prompt_logprobs_json(logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's: by token id, an entry a prompt token."""
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": _finite(lp), "rank": lp.rank, "decoded_token": lp.decoded_token}
            for token_id, lp in entry.items()
        }
        for entry in logprobs
    ]


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)


def _rank(item: tuple[int, Logprob]) -> int:
    return item[1].rank or 0
