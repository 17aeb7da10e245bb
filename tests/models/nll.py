"""How well a model predicts a text, and whether its greedy text follows another's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.models.run_program import Chunk, PagedModel


def position_nll(paged: PagedModel, token_ids: Sequence[int], chunk: int = 128) -> NDArray[np.float64]:
    """-log p(token_ids[i + 1] | token_ids[: i + 1]) in nats, for each i; float64 [len(token_ids) - 1]."""
    sequence = paged.start()
    parts: list[NDArray[np.float64]] = []
    for start in range(0, len(token_ids) - 1, chunk):
        inputs = token_ids[start : min(start + chunk, len(token_ids) - 1)]
        targets = np.asarray(token_ids[start + 1 : start + 1 + len(inputs)])
        (logits,) = paged.step([Chunk(sequence, inputs)])
        top = logits.max(axis=1)
        log_sum = np.log(np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64)) + top
        parts.append(log_sum - logits[np.arange(len(targets)), targets])
    paged.finish(sequence)
    return np.concatenate(parts)


def mean_nll(paged: PagedModel, token_ids: Sequence[int], chunk: int = 128) -> float:
    """Mean negative log-likelihood of a text in nats a token; its exponential is the perplexity."""
    return float(position_nll(paged, token_ids, chunk).mean())


def greedy_matches_until_gap(
    ids: Sequence[int], golden_ids: Sequence[int], gaps: Sequence[float], min_gap: float = 0.3
) -> bool:
    """Whether `ids` equals `golden_ids` up to the first position where the golden choice was close.

    `gaps[i]` is how far the best logit led the second when `golden_ids[i]` was chosen. Where it is under
    `min_gap` rounding may choose otherwise, and everything after may differ.
    """
    close = next((i for i, gap in enumerate(gaps) if gap < min_gap), len(golden_ids))
    return list(ids[:close]) == list(golden_ids[:close])


def disagreements(
    paged: PagedModel,
    prompt: Sequence[int],
    golden_ids: Sequence[int],
    gaps: Sequence[float],
    min_gap: float = 0.3,
    chunk: int | None = None,
) -> list[int]:
    """Places in a golden answer where this model, given the golden tokens before, prefers another token.

    Unlike `greedy_matches_until_gap` it judges every token whose gap is `min_gap` or more, also those
    after a close call.
    """
    tokens = [*prompt, *golden_ids[:-1]]
    sequence = paged.start()
    choices: list[int] = []
    for start in range(0, len(tokens), chunk or len(tokens)):
        (logits,) = paged.step([Chunk(sequence, tokens[start : start + (chunk or len(tokens))])])
        choices.extend(logits.argmax(axis=1).tolist())
    paged.finish(sequence)
    answers = choices[len(prompt) - 1 :]
    return [i for i, gap in enumerate(gaps) if gap >= min_gap and answers[i] != golden_ids[i]]
