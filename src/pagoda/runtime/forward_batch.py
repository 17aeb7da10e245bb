"""The arrays of one step, as backends read them. All integers are int32; T tokens, R requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of all scheduled requests, one request after the other.

    Request r owns rows [query_start_loc[r], query_start_loc[r + 1]), whose positions end at
    seq_lens[r] - 1. Slot s of a group is token s % block_size of block s // block_size.
    """

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    query_start_loc: Int32Array  # [R + 1]
    seq_lens: Int32Array  # [R] tokens in the KV cache once this step has run
    block_tables: tuple[Int32Array, ...]  # a group: [R, blocks of the longest request]
    slot_mapping: tuple[Int32Array, ...]  # a group: [T], where each token's key and value go
    logits_rows: Int32Array  # [L] rows of T whose logits are wanted, ascending


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of the rows to sample, one a row of logits [L, vocab]. Ragged lists are in CSR form:
    row i owns entries [start_loc[i], start_loc[i + 1]).

    Penalties read `history_*`: each unique token of prompt and output once, with its count in the output.
    """

    temperature: Float32Array  # [L]; 0 is greedy
    top_k: Int32Array  # [L]; 0 is all
    top_p: Float32Array  # [L]
    min_p: Float32Array  # [L]
    repetition_penalty: Float32Array  # [L]
    presence_penalty: Float32Array  # [L]
    frequency_penalty: Float32Array  # [L]
    seed: NDArray[np.uint64]  # [L]
    counter: NDArray[np.uint64]  # [L] number of the output token: random numbers are keyed (seed, counter)
    history_start_loc: Int32Array  # [L + 1]
    history_token_ids: Int32Array
    history_output_counts: Int32Array
    bias_start_loc: Int32Array  # [L + 1]
    bias_token_ids: Int32Array
    bias_values: Float32Array  # added to the logit; -inf forbids the token
    num_logprobs: Int32Array  # [L]; -1 is none, 0 is the chosen token's only
    allowed_mask: NDArray[np.uint32] | None = None  # [L, ceil(vocab / 32)]; bit set: token allowed


@dataclass(frozen=True, slots=True)
class SampleResult:
    """`token_ids[i]` is -1 when row i held nothing that can be chosen (NaN, or everything masked)."""

    token_ids: Int32Array  # [L]
    logprobs: Float32Array  # [L] of the chosen token, from the raw logits at temperature 1
    top_token_ids: Int32Array  # [L, max(num_logprobs)], best first, ties by lower id; -1 beyond a row's own
    top_logprobs: Float32Array
