"""From a `SchedulerOutput` to the arrays of a `ForwardBatch`, without a Python loop over tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from pagoda.core.step import ScheduledRequest, SchedulerOutput
from pagoda.runtime.forward_batch import ForwardBatch, Int32Array

NO_BLOCK = -1


def build_forward_batch(step: SchedulerOutput, block_size: int) -> ForwardBatch:
    """Arrays of one step; position p goes to slot table[p // block_size] * block_size + p % block_size.

    `logits_rows` holds the last row of each request that samples, and every row that predicts a prompt
    token whose log-probability is wanted.
    """
    requests = step.requests
    token_ids = array("i")
    for r in requests:
        token_ids.extend(r.token_ids)
    num_tokens = np.array([len(r.token_ids) for r in requests], dtype=np.int32)
    starts = np.array([r.start for r in requests], dtype=np.int32)
    query_start_loc = np.array([0, *accumulate(len(r.token_ids) for r in requests)], dtype=np.int32)
    if len(token_ids) == len(requests):  # every request decodes one token
        request_of_row, positions = np.arange(len(requests)), starts
    else:
        request_of_row = np.repeat(np.arange(len(requests)), num_tokens)
        positions = (
            np.arange(len(token_ids), dtype=np.int32) + (starts - query_start_loc[:-1])[request_of_row]
        )
    block_of_row, offset = np.divmod(positions, block_size)
    tables = tuple(
        _padded([r.block_tables[group] for r in requests]) for group in range(len(requests[0].block_tables))
    )
    return ForwardBatch(
        token_ids=np.frombuffer(token_ids, dtype=np.int32),
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=starts + num_tokens,
        block_tables=tables,
        slot_mapping=tuple(t[request_of_row, block_of_row] * block_size + offset for t in tables),
        logits_rows=_logits_rows(requests, query_start_loc),
    )


def num_prompt_logprob_rows(request: ScheduledRequest) -> int:
    """Rows of the request, from its first, that predict a prompt token of wanted log-probability."""
    if request.num_prompt_logprobs is None:
        return 0
    return len(request.token_ids) - (request.next_prompt_token_id is None)


def _padded(tables: Sequence[array[int]]) -> Int32Array:
    """[tables, longest table]; what a table lacks is `NO_BLOCK`."""
    width = max(map(len, tables))
    flat = array("i")
    for table in tables:
        flat.extend(table)
        if len(table) < width:
            flat.extend(array("i", [NO_BLOCK]) * (width - len(table)))
    return np.frombuffer(flat, dtype=np.int32).reshape(len(tables), width)


def _logits_rows(requests: Sequence[ScheduledRequest], query_start_loc: Int32Array) -> Int32Array:
    if all(r.num_prompt_logprobs is None for r in requests):
        return (query_start_loc[1:] - 1)[[r.sampling is not None for r in requests]]
    rows: list[int] = []
    for r, first, end in zip(
        requests, query_start_loc[:-1].tolist(), query_start_loc[1:].tolist(), strict=True
    ):
        num_prompt_rows = num_prompt_logprob_rows(r)
        rows.extend(range(first, first + num_prompt_rows))
        if r.sampling is not None and first + num_prompt_rows < end:
            rows.append(end - 1)
    return np.array(rows, dtype=np.int32)


def check_forward_batch(batch: ForwardBatch, block_size: int, num_blocks: Sequence[int]) -> None:
    """Invariants I5 (no slot is written twice) and I6 (tables cover computed and scheduled tokens).

    Raises:
        AssertionError: the scheduler broke one of them.
    """
    num_needed = -(-batch.seq_lens // block_size)
    for group, (table, slots) in enumerate(zip(batch.block_tables, batch.slot_mapping, strict=True)):
        assert table.shape[1] >= num_needed.max(), f"group {group}: a block table is shorter than its tokens"
        last_blocks = table[np.arange(len(table)), num_needed - 1]
        assert (last_blocks >= 0).all(), f"group {group}: a block table is shorter than its tokens"
        assert table.max() < num_blocks[group], f"group {group}: block {table.max()} of {num_blocks[group]}"
        assert slots.min() >= 0, f"group {group}: a scheduled token has no block"
        assert len(np.unique(slots)) == len(slots), f"group {group}: two rows write one slot"
