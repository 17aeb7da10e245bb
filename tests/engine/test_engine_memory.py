"""How many KV blocks are reserved: what memory pays for, and never more than can be in use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.core.cost import KVCacheSpec, LayerGroup
from pagoda.engine.memory import RUNTIME_BYTES, default_kv_bytes, longest_sequence, plan_num_blocks
from pagoda.errors import CapacityError

SPECS = st.builds(
    lambda windows, size: KVCacheSpec(
        tuple(LayerGroup((i,), 2, 8 * (i + 1), window) for i, window in enumerate(windows)), size
    ),
    st.lists(st.sampled_from([None, 1, 7, 16, 100]), min_size=1, max_size=3),
    st.sampled_from([1, 4, 16]),
)


def num_bytes(spec: KVCacheSpec, num_blocks: tuple[int, ...]) -> int:
    return sum(n * spec.block_bytes(group) for group, n in enumerate(num_blocks))


@settings(deadline=None)
@given(
    spec=SPECS,
    kv_bytes=st.integers(0, 1 << 20),
    max_num_seqs=st.integers(1, 40),
    max_model_len=st.integers(1, 300),
)
def test_a_plan_holds_one_sequence_stays_in_its_memory_and_wastes_none(
    spec: KVCacheSpec, kv_bytes: int, max_num_seqs: int, max_model_len: int
) -> None:
    """E17: the same function of `core/cost.py` for planning and for allocation."""
    groups = range(len(spec.groups))
    one = tuple(spec.max_blocks_for(group, max_model_len) for group in groups)
    limits = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "max_num_batched_tokens": 32}
    if num_bytes(spec, one) > kv_bytes:
        with pytest.raises(CapacityError):
            plan_num_blocks(spec, kv_bytes, **limits)
        return
    num_blocks = plan_num_blocks(spec, kv_bytes, **limits)
    assert num_bytes(spec, num_blocks) <= kv_bytes
    num_chunk_blocks = -(-32 // spec.block_size)
    for group in groups:
        most = one[group] * max_num_seqs
        most += 0 if spec.groups[group].window is None else num_chunk_blocks
        assert one[group] <= num_blocks[group] <= most
    plenty = plan_num_blocks(spec, 1 << 40, **limits)
    left = kv_bytes - num_bytes(spec, num_blocks)
    assert num_blocks == plenty or left < sum(spec.block_bytes(group) for group in groups)


@settings(deadline=None)
@given(spec=SPECS, kv_bytes=st.integers(0, 1 << 18), max_num_tokens=st.integers(1, 500))
def test_the_longest_sequence_fits_and_one_more_token_does_not(
    spec: KVCacheSpec, kv_bytes: int, max_num_tokens: int
) -> None:
    def fits(num_tokens: int) -> bool:
        blocks = tuple(spec.max_blocks_for(group, num_tokens) for group in range(len(spec.groups)))
        return num_bytes(spec, blocks) <= kv_bytes

    longest = longest_sequence(spec, kv_bytes, max_num_tokens)
    assert fits(longest)
    assert longest == max_num_tokens or not fits(longest + 1)


def test_the_default_is_a_share_of_what_is_left() -> None:
    gib = 1 << 30
    assert default_kv_bytes(8 * gib + RUNTIME_BYTES, 2 * gib) == 3 * gib
    assert default_kv_bytes(gib, 2 * gib) == 0
