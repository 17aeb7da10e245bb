"""From the `SamplingInput` of each row to the arrays that a sampler reads, and back to plain tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pagoda.core.step import SampledToken, SamplingInput, TokenLogprob
from pagoda.runtime.forward_batch import Float32Array, Int32Array, SampleResult, SamplingBatch

MAX_INT32 = 2**31 - 1
UINT64_MASK = 2**64 - 1


def build_sampling_batch(inputs: Sequence[SamplingInput]) -> SamplingBatch:
    """One row a `SamplingInput`, in their order.

    Depends on each input alone, so a row is the same whatever its company. A row without penalties has
    an empty history, and a row without a repetition penalty leaves its prompt out of it: those entries
    could change nothing.
    """
    params = [row.params for row in inputs]
    histories = [_history(row) for row in inputs]
    biases = [_biases(row) for row in inputs]

    def floats(name: str) -> Float32Array:
        return np.array([getattr(p, name) for p in params], dtype=np.float32)

    return SamplingBatch(
        temperature=floats("temperature"),
        top_k=np.array([min(max(0, p.top_k), MAX_INT32) for p in params], dtype=np.int32),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        repetition_penalty=floats("repetition_penalty"),
        presence_penalty=floats("presence_penalty"),
        frequency_penalty=floats("frequency_penalty"),
        seed=np.array([row.seed & UINT64_MASK for row in inputs], dtype=np.uint64),
        counter=np.array([len(row.output_token_ids) for row in inputs], dtype=np.uint64),
        history_start_loc=_start_loc(len(token_ids) for token_ids, _ in histories),
        history_token_ids=_concatenate([token_ids for token_ids, _ in histories if len(token_ids)]),
        history_output_counts=_concatenate([counts for _, counts in histories if len(counts)]),
        bias_start_loc=_start_loc(map(len, biases)),
        bias_token_ids=np.array([token_id for bias in biases for token_id in bias], dtype=np.int32),
        bias_values=np.array([value for bias in biases for value in bias.values()], dtype=np.float32),
        num_logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in params], dtype=np.int32),
        allowed_mask=_allowed_mask(inputs),
    )


NOTHING_TO_CHOOSE = "the model's logits are not finite, or every token is forbidden"


def sampled_tokens(result: SampleResult, inputs: Sequence[SamplingInput]) -> list[SampledToken]:
    """Plain values of a result. A row in which nothing could be chosen carries an error, on its own."""
    tokens = []
    for i, (token_id, row) in enumerate(zip(result.token_ids.tolist(), inputs, strict=True)):
        num_top = row.params.logprobs
        if token_id < 0:
            error = row.grammar.error if row.grammar is not None else None
            tokens.append(SampledToken(token_id, error=error or NOTHING_TO_CHOOSE))
        elif num_top is None:
            tokens.append(SampledToken(token_id))
        else:
            top = zip(
                result.top_token_ids[i, :num_top].tolist(),
                result.top_logprobs[i, :num_top].tolist(),
                strict=True,
            )
            alternatives = tuple(TokenLogprob(t, logprob) for t, logprob in top if t >= 0)
            tokens.append(SampledToken(token_id, float(result.logprobs[i]), alternatives))
    return tokens


_NONE = np.zeros(0, dtype=np.int32)


def _history(row: SamplingInput) -> tuple[Int32Array, Int32Array]:
    """Unique token ids of the row's history, ascending, and how often each is in the output."""
    if not row.params.has_penalties:
        return _NONE, _NONE
    # Copies: an `array` whose buffer is exported could not grow any more.
    output = np.array(row.output_token_ids, dtype=np.int32)
    output_ids, counts = np.unique(output, return_counts=True)
    if row.params.repetition_penalty == 1.0:
        return output_ids, counts.astype(np.int32)
    prompt = np.array(row.prompt_token_ids, dtype=np.int32)
    token_ids: Int32Array = np.unique(np.concatenate([prompt, output_ids]))
    num_outputs = np.zeros(len(token_ids), dtype=np.int32)
    num_outputs[np.searchsorted(token_ids, output_ids)] = counts
    return token_ids, num_outputs


def _biases(row: SamplingInput) -> dict[int, float]:
    if not row.masked_token_ids and not row.params.logit_bias:
        return {}
    return {**row.params.logit_bias, **dict.fromkeys(row.masked_token_ids, -np.inf)}


def _allowed_mask(inputs: Sequence[SamplingInput]) -> NDArray[np.uint32] | None:
    """None when no row has a grammar; rows without one may choose every token."""
    masks = [None if row.grammar is None else row.grammar.allowed_mask() for row in inputs]
    num_words = max((len(mask) // 4 for mask in masks if mask is not None), default=0)
    if num_words == 0:
        return None
    allowed = np.full((len(inputs), num_words), 0xFFFFFFFF, dtype=np.uint32)
    for row, mask in zip(allowed, masks, strict=True):
        if mask is not None:
            row[:] = np.frombuffer(mask, dtype=np.uint32)
    return allowed


def _start_loc(lengths: Iterable[int]) -> Int32Array:
    return np.array(list(accumulate(lengths, initial=0)), dtype=np.int32)


def _concatenate(parts: list[Int32Array]) -> Int32Array:
    return np.concatenate(parts) if parts else _NONE
