"""Attention over a paged KV cache (Kwon et al. 2023, arXiv 2309.06180)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagoda.kernels.activation.reference import softcap as apply_softcap
from pagoda.runtime.forward_batch import Float32Array, Int32Array

KVArray: TypeAlias = NDArray[np.float16 | np.float32]


def fixed_point(x: Float32Array) -> Float32Array:
    """What the KV type i16 keeps of vectors: integers up to 4095 times a scale for each vector (last axis).

    The native backend rounds keys, values and queries so, that their products are exact in 32-bit integers.
    """
    largest = np.abs(x).max(axis=-1, keepdims=True)
    scale = np.where(largest > 0, largest / np.float32(4095), np.float32(1))
    rounded: Float32Array = np.rint(x / scale) * scale
    return rounded


def write_kv(
    k: Float32Array, v: Float32Array, k_cache: KVArray, v_cache: KVArray, slot_mapping: Int32Array
) -> None:
    """Store each token's key and value in its slot, rounded to the type of the cache.

    Args:
        k: float32 [num_tokens, num_kv_heads * head_dim], already rotated.
        v: float32 [num_tokens, num_kv_heads * head_dim].
        k_cache: float16 or float32 [num_blocks, block_size, num_kv_heads, head_dim], written in place.
        v_cache: the same for values.
        slot_mapping: int32 [num_tokens]; slot s is token s % block_size of block s // block_size.
    """
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache[blocks, offsets] = k.reshape(-1, num_kv_heads, head_dim)
    v_cache[blocks, offsets] = v.reshape(-1, num_kv_heads, head_dim)


def attention(
    q: Float32Array,
    k_cache: KVArray,
    v_cache: KVArray,
    query_start_loc: Int32Array,
    seq_lens: Int32Array,
    block_table: Int32Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float32Array:
    """out = softmax(softcap(scale * q . k)) . v for every row, causal, over its latest `window` positions.

    Query head h reads KV head h * num_kv_heads // num_heads: equal numbers are MHA, fewer KV heads GQA
    (Ainslie et al. 2023), one is MQA. Only slots of visible positions are read, so whatever a fresh
    block holds, NaN included, leaves no trace, and entries behind the window may be -1.

    Args:
        q: float32 [num_tokens, num_heads * head_dim], already rotated.
        k_cache: float16 or float32 [num_blocks, block_size, num_kv_heads, head_dim].
        v_cache: the same for values.
        query_start_loc: int32 [num_requests + 1]; request r owns rows [r] to [r + 1].
        seq_lens: int32 [num_requests]; the last row of request r is at position seq_lens[r] - 1.
        block_table: int32 [num_requests, max_blocks], the block of each `block_size` positions.
        scale: multiplies q . k, usually 1 / sqrt(head_dim).
        window: positions that a row sees, itself included; None is all.
        softcap: bound of the scores (Gemma 2); None is none.

    Returns:
        float32 [num_tokens, num_heads * head_dim].

    Raises:
        ValueError: the block of a visible position is missing from the table.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    out = np.empty_like(q)
    for r, seq_len in enumerate(seq_lens):
        rows = slice(query_start_loc[r], query_start_loc[r + 1])
        num_rows = rows.stop - rows.start
        if num_rows == 0:
            continue
        query_positions = np.arange(seq_len - num_rows, seq_len)
        first = 0 if window is None else max(0, int(query_positions[0]) - window + 1)
        key_positions = np.arange(first, seq_len)
        keys = _read(k_cache, block_table[r], key_positions)
        values = _read(v_cache, block_table[r], key_positions)

        # [kv head, query heads that share it, row, head_dim], so that both products are batched by head.
        grouped = q[rows].reshape(num_rows, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
        scores = apply_softcap(np.float32(scale) * (grouped @ keys.transpose(1, 2, 0)[:, None]), softcap)
        distance = query_positions[:, None] - key_positions
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores[:, :, hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[rows] = (weights @ values.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(num_rows, -1)
    return out


def _read(cache: KVArray, block_table: Int32Array, positions: NDArray[np.int64]) -> Float32Array:
    """Keys or values at `positions`: float32 [len(positions), num_kv_heads, head_dim]."""
    block_size = cache.shape[1]
    blocks = block_table[positions // block_size]
    if blocks.min() < 0:
        missing = positions[np.argmax(blocks < 0)]
        raise ValueError(f"position {missing} is visible, but its entry in the block table is -1")
    read: Float32Array = cache[blocks, positions % block_size].astype(np.float32)
    return read
