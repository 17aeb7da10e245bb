"""Sizes of paged attention that matter, what each costs, and how far a native result may be off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pagoda.runtime.forward_batch import Float32Array, Int32Array


class AttentionInputs(NamedTuple):
    """A step over caches whose blocks lie in random order and hold NaN wherever no token was written.

    `k` and `v` are this step's, not yet in the caches; earlier positions are.
    """

    q: Float32Array
    k: Float32Array
    v: Float32Array
    k_cache: Float32Array  # [num_blocks, block_size, num_kv_heads, head_dim], values exact in float16
    v_cache: Float32Array
    query_start_loc: Int32Array
    seq_lens: Int32Array
    block_table: Int32Array
    slot_mapping: Int32Array
    positions: Int32Array


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`requests` lists (tokens already in the cache, tokens of this step) of each request.

    The first `num_shared` positions of every request lie in the same blocks.
    """

    requests: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    num_shared: int = 0
    window: int | None = None
    softcap: float | None = None
    query_scale: float = 2.0  # size of q: larger makes the softmax sharper
    # Largest error relative to the largest result. Both sides round queries, keys and values to 13 bits;
    # native code also rounds probabilities, to 12 bits of the largest of 128 keys, which shows where values
    # of many keys average out.
    tolerance: float = 2e-3

    def __post_init__(self) -> None:
        if self.num_shared % self.block_size or self.num_shared > min(start for start, _ in self.requests):
            raise ValueError(f"num_shared is {self.num_shared}; it must be whole blocks of every cache")

    @property
    def num_visible(self) -> int:
        """Pairs of a row and a position it attends to."""
        span = self.window or 1 << 62
        return sum(min(p + 1, span) for start, n in self.requests for p in range(start, start + n))

    @property
    def num_flops(self) -> int:
        return 4 * self.num_heads * self.head_dim * self.num_visible

    @property
    def num_bytes(self) -> int:
        """Keys and values in 16 bits, shared ones once, others once a request; queries and results once."""
        num_rows = sum(n for _, n in self.requests)
        firsts = [max(0, start - self.window + 1) if self.window else 0 for start, _ in self.requests]
        num_keys = max(0, self.num_shared - min(firsts)) + sum(
            start + n - max(first, self.num_shared)
            for (start, n), first in zip(self.requests, firsts, strict=True)
        )
        kv = 2 * 2 * num_keys * self.num_kv_heads * self.head_dim
        return kv + 2 * 4 * num_rows * self.num_heads * self.head_dim

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def make_inputs(self, seed: int = 0) -> AttentionInputs:
        rng = np.random.default_rng(seed)
        starts, counts = (np.asarray(column, np.int32) for column in zip(*self.requests, strict=True))
        seq_lens = starts + counts
        blocks_of = -(-seq_lens // self.block_size)
        num_blocks = int(blocks_of.sum()) + 3
        order = rng.permutation(num_blocks).astype(np.int32)
        table = np.full((len(starts), blocks_of.max()), -1, np.int32)
        cache_shape = (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        k_cache, v_cache = np.full((2, *cache_shape), np.nan, np.float32)

        def rows(count: int, num_heads: int) -> Float32Array:
            values = rng.standard_normal((count, num_heads * self.head_dim), np.float32)
            return values.astype(np.float16).astype(np.float32)

        taken = 0
        for r, (start, num_own) in enumerate(zip(starts.tolist(), blocks_of.tolist(), strict=True)):
            table[r, :num_own] = order[taken : taken + num_own]
            taken += num_own
            table[r, : self.num_shared // self.block_size] = order[: self.num_shared // self.block_size]
            first = 0 if self.window is None else max(0, start - self.window + 1)
            first_block = first // self.block_size
            table[r, :first_block] = -1
            earlier = np.arange(min(first_block * self.block_size, start), start)
            slots = (table[r, earlier // self.block_size], earlier % self.block_size)
            for cache in (k_cache, v_cache):
                cache[slots] = rows(len(earlier), self.num_kv_heads).reshape(-1, *cache_shape[2:])
        query_start_loc = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        positions = np.concatenate([np.arange(s, s + n) for s, n in self.requests]).astype(np.int32)
        blocks = table[np.repeat(np.arange(len(starts)), counts), positions // self.block_size]
        num_rows = int(query_start_loc[-1])
        return AttentionInputs(
            q=rows(num_rows, self.num_heads) * np.float32(self.query_scale),
            k=rows(num_rows, self.num_kv_heads),
            v=rows(num_rows, self.num_kv_heads),
            k_cache=k_cache,
            v_cache=v_cache,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens.astype(np.int32),
            block_table=table,
            slot_mapping=(blocks * self.block_size + positions % self.block_size).astype(np.int32),
            positions=positions,
        )


_MIXED = ((0, 5), (37, 1), (16, 16), (31, 2), (0, 1))  # first chunks, a later chunk, single tokens

CASES: tuple[AttentionCase, ...] = (
    # Head dims that leave tails after vectors of 8, 16 and 32.
    *(AttentionCase(_MIXED, head_dim=d) for d in (16, 24, 40, 64, 80, 96, 112, 128, 256)),
    # MHA, GQA of the test models, MQA, groups that are no power of two.
    *(
        AttentionCase(_MIXED, num_heads=h, num_kv_heads=kv)
        for h, kv in ((4, 4), (9, 3), (14, 2), (5, 1), (1, 1))
    ),
    # Lengths around a block, and around tiles of 64 and 128 keys.
    *(AttentionCase(((n, 1),)) for n in (0, 14, 15, 16, 17, 62, 63, 64, 65, 126, 127, 128, 129, 300)),
    # Chunks that begin and end inside blocks.
    *(
        AttentionCase(((start, n),))
        for start, n in ((0, 130), (1, 127), (15, 2), (16, 15), (17, 64), (63, 130))
    ),
    *(AttentionCase(_MIXED, block_size=b) for b in (1, 8, 32, 128)),
    # Windows shorter than a block, cut inside a block, equal to a block, longer than the sequence; chunks
    # longer than the window.
    *(
        AttentionCase(((0, 70), (90, 1), (100, 33), (15, 1)), window=w)
        for w in (1, 5, 16, 17, 32, 33, 64, 500)
    ),
    # Soft caps small enough to matter.
    AttentionCase(_MIXED, softcap=1.0),
    AttentionCase(((0, 70), (100, 33)), softcap=5.0, window=20),
    # A softmax so sharp that one position takes almost everything.
    AttentionCase(_MIXED, query_scale=15.0),
    # A prefix that requests share, single tokens beside chunks; with a window that hides some of it.
    *(
        AttentionCase(
            ((700, 1), (701, 40), (660, 1), (767, 2), (767, 1)), h, kv, num_shared=656, window=window
        )
        for h, kv in ((4, 4), (9, 3), (14, 2))
        for window in (None, 700)
    ),
    # Decode far into a context, alone and in company.
    AttentionCase(((4095, 1),), num_heads=9, num_kv_heads=3),
    AttentionCase(tuple((37 * i, 1) for i in range(32)), num_heads=9, num_kv_heads=3),
)


def _heads(num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None) -> dict[str, Any]:
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "window": window,
    }


# What steps of real models run, in the shapes of SmolLM2-135M, Qwen2.5-0.5B and Gemma-3-270M.
STEP_CASES: tuple[AttentionCase, ...] = tuple(
    AttentionCase(requests, **heads)
    for heads in (_heads(9, 3, 64), _heads(14, 2, 64), _heads(4, 1, 256), _heads(4, 1, 256, window=512))
    for requests in (
        ((511, 1),),
        ((4095, 1),),
        ((127, 1),) * 32,
        ((0, 512),),
        ((1536, 512),),
        ((3584, 512),),
    )
) + tuple(
    AttentionCase(((1419, 1),) * 32, **heads, num_shared=1344)
    for heads in (_heads(9, 3, 64), _heads(14, 2, 64), _heads(4, 1, 256))
)
