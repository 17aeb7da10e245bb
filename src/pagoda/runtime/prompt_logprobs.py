"""Log-probabilities of prompt tokens, from the logits of the rows that predict them."""

from __future__ import annotations

from array import array

import numpy as np

from pagoda.core.step import PromptLogprob, ScheduledRequest, TokenLogprob
from pagoda.runtime.forward_batch import Float32Array


def prompt_logprobs(request: ScheduledRequest, logits: Float32Array) -> tuple[PromptLogprob, ...]:
    """`logits` [rows, vocab] are those of the request's first rows; row i predicts position start + i + 1.

    Rows are taken one by one: a step may hold a long prompt, and a second copy of its logits would be
    the largest array of the process.
    """
    assert request.num_prompt_logprobs is not None
    token_ids = array("i", request.token_ids[1:])
    if request.next_prompt_token_id is not None:
        token_ids.append(request.next_prompt_token_id)
    return tuple(
        _prompt_logprob(row, request.start + i + 1, token_id, request.num_prompt_logprobs)
        for i, (row, token_id) in enumerate(zip(logits, token_ids, strict=True))
    )


def _prompt_logprob(row: Float32Array, position: int, token_id: int, num_top: int) -> PromptLogprob:
    top = _top_token_ids(row, num_top)
    best = float(row.max())
    normaliser = best + float(np.log(np.exp(row - row.max(), dtype=np.float32).sum(dtype=np.float64)))
    token, *alternatives = (TokenLogprob(t, float(row[t]) - normaliser) for t in (token_id, *top))
    return PromptLogprob(position, token, tuple(alternatives))


def _top_token_ids(row: Float32Array, num_top: int) -> list[int]:
    """Best first, ties by lower id."""
    if num_top == 0:
        return []
    if num_top < len(row):
        threshold = np.partition(row, -num_top)[-num_top]
        candidates = np.flatnonzero(row >= threshold)
    else:
        candidates = np.arange(len(row))
    best_first = np.argsort(-row[candidates], kind="stable")[:num_top]
    return [int(token_id) for token_id in candidates[best_first]]
