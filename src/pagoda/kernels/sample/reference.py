"""Choosing the next token of each row of logits: what every sampler has to do, token for token.

A row goes through these steps, all in float32 until weights are made:

1. A row that holds NaN or +inf has no token (-1), nor does a row in which nothing is left to choose.
   Other rows never notice. -inf in the logits forbids a token.
2. Log-probabilities come from the untouched logits at temperature 1, as vLLM's `raw_logprobs`.
3. Logit bias is added; -inf forbids. `allowed_mask` forbids what it does not name.
4. Penalties, over unique tokens of the history. Repetition (Keskar et al. 2019, arXiv 1909.05858; the sign
   rule is that of Hugging Face transformers): a positive logit is divided by it, any other multiplied, once
   however often the token occurred. Then frequency * count and presence, for tokens of the output (OpenAI
   API reference, `frequency_penalty`).
5. Temperature 0 takes the largest logit, the lowest id among equals, and stops here.
6. Tokens get integer weights, round(2^44 * exp((logit - largest) / temperature)); see `token_weights`.
   Integers add up exactly in any order, which is why implementations can agree without sorting alike.
7. `min_p` (Nguyen et al. 2024, arXiv 2407.01082): a weight below min_p times the largest becomes 0.
8. Tokens are ordered by descending logit, equals by ascending id (-0 equals 0).
   `top_k` (Fan et al. 2018, arXiv 1805.04833) keeps the first k.
9. `top_p` (Holtzman et al. 2019, arXiv 1904.09751) keeps the shortest prefix whose weights add up to at
   least top_p of the sum of those that are left.
10. One draw by inverting the cumulative weights, with a random number that depends on (seed, counter) only.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pagoda.runtime.forward_batch import Float32Array, SampleResult, SamplingBatch

WEIGHT_ONE = 1 << 44  # the weight of the likeliest token: 2^18 of them still add up within an int64
SMALLEST_EXPONENT = -32.0  # exp(-32) * 2^44 rounds to 0
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # n * LN2_HIGH is exact
LOG2_E = 1.4426950408889634
EXP_COEFFICIENTS = tuple(1.0 / math.factorial(i) for i in range(7, -1, -1))

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
UINT64 = (1 << 64) - 1


def sample(logits: Float32Array, batch: SamplingBatch) -> SampleResult:
    """Choose one token a row; the rules are those of this module's docstring.

    Args:
        logits: float32 [num_rows, vocab_size], vocab_size below 2^19; left as it is.
        batch: parameters of each row. A token id occurs once in a row's list.

    Returns:
        Token ids, -1 for a row without one. `logprobs` is NaN for rows that did not ask (`num_logprobs` -1)
        or have no token. The top lists of such rows are empty (-1, NaN); no list names a token whose
        logit is -inf.

    Raises:
        ValueError: a token id is outside the vocabulary or repeated in a row's list, a temperature is
            negative or not finite, or a min_p is outside 0 to 1.
    """
    check_sampling_batch(batch, logits.shape[1])
    num_rows = len(logits)
    width = max(0, int(batch.num_logprobs.max(initial=0)))
    result = SampleResult(
        token_ids=np.full(num_rows, -1, np.int32),
        logprobs=np.full(num_rows, np.nan, np.float32),
        top_token_ids=np.full((num_rows, width), -1, np.int32),
        top_logprobs=np.full((num_rows, width), np.nan, np.float32),
    )
    for i, raw in enumerate(logits):
        token_id = choose_token(raw, batch, i)
        result.token_ids[i] = token_id
        if token_id >= 0 and batch.num_logprobs[i] >= 0:
            logprobs = raw_logprobs(raw)
            result.logprobs[i] = logprobs[token_id]
            top = [t for t in descending(raw)[: batch.num_logprobs[i]] if raw[t] > -np.inf]
            result.top_token_ids[i, : len(top)] = top
            result.top_logprobs[i, : len(top)] = logprobs[top]
    return result


def choose_token(raw: Float32Array, batch: SamplingBatch, row: int) -> int:
    """The token of one row, or -1. `raw` is float32 [vocab_size]."""
    if not _is_choosable(raw):
        return -1
    logits = edited_logits(raw, batch, row)
    if not _is_choosable(logits):
        return -1
    temperature = batch.temperature[row]
    if temperature == 0.0:
        return int(np.argmax(logits))
    weights = token_weights(logits, temperature)
    weights[weights < math.ceil(float(batch.min_p[row]) * WEIGHT_ONE)] = 0
    order = descending(logits)
    if batch.top_k[row] > 0:
        order = order[: batch.top_k[row]]
    cumulative = np.cumsum(weights[order])
    top_p = float(batch.top_p[row])
    if top_p < 1.0:
        needed = math.ceil(top_p * float(cumulative[-1]))
        cumulative = cumulative[: np.searchsorted(cumulative, needed) + 1]
    target = (random_word(int(batch.seed[row]), int(batch.counter[row])) * int(cumulative[-1])) >> 64
    return int(order[np.searchsorted(cumulative, target, side="right")])


def check_sampling_batch(batch: SamplingBatch, vocab_size: int) -> None:
    """Raise ValueError for what `sample` says; -1 would otherwise mean the last token of the vocabulary."""
    for name in ("history", "bias"):
        token_ids = getattr(batch, f"{name}_token_ids")
        start_loc = getattr(batch, f"{name}_start_loc")
        if ((token_ids < 0) | (token_ids >= vocab_size)).any():
            raise ValueError(f"{name}_token_ids holds an id outside the vocabulary of {vocab_size} tokens")
        for start, end in pairwise(start_loc):
            if len(np.unique(token_ids[start:end])) != end - start:
                raise ValueError(f"{name}_token_ids repeats an id within a row")
    if not ((batch.temperature >= 0) & np.isfinite(batch.temperature)).all():
        raise ValueError("temperature is negative or not finite")
    if not ((batch.min_p >= 0) & (batch.min_p <= 1)).all():
        raise ValueError("min_p is outside 0 to 1")


def edited_logits(raw: Float32Array, batch: SamplingBatch, row: int) -> Float32Array:
    """A copy of `raw` with bias, mask and penalties applied, in this order."""
    logits: Float32Array = raw.copy()
    entries = slice(batch.bias_start_loc[row], batch.bias_start_loc[row + 1])
    logits[batch.bias_token_ids[entries]] += batch.bias_values[entries]
    if batch.allowed_mask is not None:
        bits = np.unpackbits(batch.allowed_mask[row].astype("<u4").view(np.uint8), bitorder="little")
        logits[bits[: len(logits)] == 0] = -np.inf

    entries = slice(batch.history_start_loc[row], batch.history_start_loc[row + 1])
    token_ids, counts = batch.history_token_ids[entries], batch.history_output_counts[entries]
    penalised = logits[token_ids]
    repetition = batch.repetition_penalty[row]
    with np.errstate(over="ignore"):  # an overflow to +inf is a row without a token
        penalised = np.where(penalised > 0, penalised / repetition, penalised * repetition)
        penalised -= batch.frequency_penalty[row] * counts.astype(np.float32)
        penalised -= np.where(counts > 0, batch.presence_penalty[row], np.float32(0))
    logits[token_ids] = penalised
    return logits


def token_weights(logits: Float32Array, temperature: np.float32) -> NDArray[np.int64]:
    """round(2^44 * exp((logit - largest) / temperature)), the same on every machine.

    All in float64, each operation rounded once: x = (logit - largest) * (1 / temperature), at least -32;
    n = round(x * log2 e), ties to even; f = (x - n * LN2_HIGH) - n * LN2_LOW (Cody & Waite 1980);
    the Taylor polynomial of degree 7 at f in Horner's form, without fused operations, times 2^n. Relative
    error under 1e-8, far below that of float32 logits. Tokens more than 31.2 temperatures below the
    largest have weight 0; rounding moves at most 1e-8 of the probability, all tokens taken together.
    """
    with np.errstate(over="ignore"):
        scaled = (logits.astype(np.float64) - np.float64(logits.max())) * (1.0 / np.float64(temperature))
    x = np.maximum(scaled, SMALLEST_EXPONENT)
    n = np.rint(x * LOG2_E)
    f = (x - n * LN2_HIGH) - n * LN2_LOW
    p = np.full_like(f, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = p * f + coefficient
    weights: NDArray[np.int64] = np.rint(np.ldexp(p, n.astype(np.int32)) * WEIGHT_ONE).astype(np.int64)
    return weights


def raw_logprobs(raw: Float32Array) -> Float32Array:
    """log_softmax in float64 with the sum of `token_weights` at temperature 1, rounded to float32."""
    total = int(token_weights(raw, np.float32(1)).sum())
    above = raw.astype(np.float64) - np.float64(raw.max())
    with np.errstate(over="ignore"):
        logprobs: Float32Array = (above - math.log(total / WEIGHT_ONE)).astype(np.float32)
    return logprobs


def descending(logits: Float32Array) -> NDArray[np.intp]:
    """Token ids by descending logit, equals by ascending id."""
    order: NDArray[np.intp] = np.argsort(-logits, kind="stable")
    return order


def random_word(seed: int, counter: int) -> int:
    """64 random bits: number `counter` of the SplitMix64 stream that starts at the mixed seed.

    Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators". All modulo 2^64.
    """
    return _mix(_mix(seed + GOLDEN_GAMMA) + (counter + 1) * GOLDEN_GAMMA)


def _mix(z: int) -> int:
    z &= UINT64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & UINT64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & UINT64
    return z ^ (z >> 31)


def _is_choosable(logits: Float32Array) -> bool:
    """No NaN, no +inf, and a token that is not forbidden. NaN fails both comparisons."""
    return bool((logits < np.inf).all() and logits.max() > -np.inf)
