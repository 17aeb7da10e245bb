"""Requests that read a common prefix together get the bits that each would have got on its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda import _native
from pagoda.bench.native_ops import NativeOps, run_attention
from pagoda.kernels.attention.cases import AttentionCase, AttentionInputs
from pagoda.runtime.forward_batch import Float32Array

ISAS = _native.isas()
CHUNK = 128  # keys that are read together


def attend(
    case: AttentionCase, inputs: AttentionInputs, sharing: str, isa: str = "", num_threads: int = 1
) -> tuple[Float32Array, int]:
    """The result, and how many tiles of several requests it took."""
    ops = NativeOps(isa, num_threads)
    ops.model.set_prefix_sharing(sharing)
    result = run_attention(ops, case, inputs)
    return result, ops.model.num_shared_tiles[0]


def assert_same_bits(a: Float32Array, b: Float32Array) -> None:
    assert np.isfinite(a).all()
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def with_common_blocks(
    case: AttentionCase, inputs: AttentionInputs, common: list[tuple[int, int]]
) -> AttentionInputs:
    """Request r gets the first common[r][1] blocks of request common[r][0], as far as both are past them."""
    table = inputs.block_table.copy()
    for r, (other, num_blocks) in enumerate(common):
        past = min(case.requests[r][0], case.requests[other][0]) // case.block_size
        blocks = table[other, : min(num_blocks, past)]
        table[r, : len(blocks)] = np.where(blocks >= 0, blocks, table[r, : len(blocks)])
    return inputs._replace(block_table=table)


@st.composite
def steps(draw: st.DrawFn) -> tuple[AttentionCase, AttentionInputs]:
    """Single tokens and short and long chunks, whose tables make a tree of common blocks."""
    near_chunks = st.builds(lambda c, off: max(0, c * CHUNK + off), st.integers(0, 5), st.integers(-3, 3))
    start = st.integers(0, 700) | near_chunks
    num_tokens = st.just(1) | st.integers(1, 5) | st.integers(1, 40)
    requests = draw(st.lists(st.tuples(start, num_tokens), min_size=2, max_size=9))
    num_kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (3, 3), (2, 7), (1, 16), (1, 48)]))
    case = AttentionCase(
        tuple(requests),
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        block_size=draw(st.sampled_from([16, 32, 256])),
        window=draw(st.none() | st.integers(1, 800)),
        softcap=draw(st.sampled_from([None, 2.0])),
    )
    common = [(0, 0)]
    for r in range(1, len(requests)):
        blocks = st.integers(0, 50) | st.just(50)
        common.append(draw(st.tuples(st.integers(0, r - 1), blocks)))
    return case, with_common_blocks(case, case.make_inputs(draw(st.integers(0, 99))), common)


@settings(deadline=None, max_examples=150)
@given(step=steps(), num_threads=st.integers(1, 3), isa=st.sampled_from(ISAS))
def test_sharing_changes_no_bit(
    step: tuple[AttentionCase, AttentionInputs], num_threads: int, isa: str
) -> None:
    case, inputs = step
    apart, num_shared = attend(case, inputs, "never")
    assert num_shared == 0
    for sharing in ("always", "auto"):
        assert_same_bits(apart, attend(case, inputs, sharing, isa, num_threads)[0])


MANY = AttentionCase(((650, 1),) * 12, num_heads=3, num_kv_heads=1, head_dim=16, num_shared=512)


@pytest.mark.parametrize(
    ("case", "num_shared"),
    [
        (MANY, 1),
        (replace(MANY, requests=((650, 1),) * 40), 3),  # 48 rows are 16 tokens
        (replace(MANY, num_shared=112), 0),  # less than a chunk
        (replace(MANY, num_shared=128), 0),  # too little to be worth it
        (replace(MANY, num_heads=7), 0),  # a token by itself keeps the processor as busy
        (replace(MANY, window=651), 1),  # longer than what anyone has seen
        (replace(MANY, window=400), 0),
        (replace(MANY, requests=((650, 16),) * 12), 0),  # every request fills a tile
        (replace(MANY, requests=((650, 1),)), 0),
    ],
)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_is_shared(case: AttentionCase, num_shared: int, num_threads: int) -> None:
    inputs = case.make_inputs()
    result, found = attend(case, inputs, "auto", num_threads=num_threads)
    assert found == num_shared
    assert_same_bits(attend(case, inputs, "never")[0], result)


def test_a_longer_prefix_of_some_is_shared_beyond_that_of_all() -> None:
    case = replace(MANY, requests=((1300, 1),) * 12, num_shared=0)
    common = [(0, 0), *((0, 60),) * 5, *((0, 30),) * 6]
    inputs = with_common_blocks(case, case.make_inputs(), common)
    result, num_shared = attend(case, inputs, "auto")
    assert num_shared == 2
    assert_same_bits(attend(case, inputs, "never")[0], result)


def test_the_order_of_requests_does_not_matter() -> None:
    """Requests of two prefixes, one after the other in turns."""
    case = replace(MANY, num_shared=0)
    inputs = with_common_blocks(case, case.make_inputs(), [(r % 2, 32) for r in range(12)])
    result, num_shared = attend(case, inputs, "auto")
    assert num_shared == 2
    assert_same_bits(attend(case, inputs, "never")[0], result)
