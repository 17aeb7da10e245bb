"""`BlockPool` against a naive allocator that keeps everything in plain lists and dicts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagoda.core.block_pool import Block, BlockPool
from pagoda.core.eviction import LRULeafFirst
from pagoda.core.prefix_cache import PrefixNode


class PoolAndOracle(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.evicted: list[int] = []
        self.pool = BlockPool(num_blocks, LRULeafFirst(), self._on_evict)
        self.ref_counts = dict.fromkeys(range(num_blocks), 0)
        self.cached: set[int] = set()
        self.reusable: list[int] = []  # oldest first

    def _on_evict(self, block: Block) -> None:
        block.node = None
        self.evicted.append(block.block_id)

    def _held(self) -> list[int]:
        return [i for i, n in self.ref_counts.items() if n > 0]

    @precondition(lambda self: self.pool.num_available > 0)
    @rule()
    def allocate(self) -> None:
        free = [i for i, n in self.ref_counts.items() if n == 0 and i not in self.cached]
        self.evicted.clear()
        block_id = self.pool.allocate()
        if free:
            assert block_id in free and not self.evicted
        else:
            oldest = self.reusable.pop(0)
            self.cached.remove(oldest)
            assert block_id == oldest and self.evicted == [oldest]
        self.ref_counts[block_id] = 1

    @precondition(lambda self: self._held())
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self._held()))
        self.pool.blocks[block_id].node = PrefixNode(None, b"hash", b"", b"", 1)
        self.cached.add(block_id)

    @precondition(lambda self: self._held() or self.reusable)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self._held() + self.reusable))
        self.pool.retain(block_id)
        self.ref_counts[block_id] += 1
        if block_id in self.reusable:
            self.reusable.remove(block_id)

    @precondition(lambda self: self._held())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self._held()))
        self.pool.release(block_id)
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0 and block_id in self.cached:
            self.reusable.append(block_id)

    @precondition(lambda self: self.reusable)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.reusable))
        self.pool.forget(self.pool.blocks[block_id])
        self.reusable.remove(block_id)
        self.cached.remove(block_id)

    @invariant()
    def they_agree(self) -> None:
        if hasattr(self, "pool"):
            assert [b.ref_count for b in self.pool.blocks] == list(self.ref_counts.values())
            assert [b.block_id for b in self.pool.policy] == self.reusable
            assert self.pool.num_held == len(self._held())
            assert self.pool.num_reusable == len(self.reusable)
            assert self.pool.num_free + self.pool.num_reusable + self.pool.num_held == self.pool.num_blocks


TestPoolAndOracle = PoolAndOracle.TestCase
TestPoolAndOracle.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_second_release_is_a_bug_and_says_so() -> None:
    pool = BlockPool(2, LRULeafFirst(), lambda block: None)
    block_id = pool.allocate()
    pool.release(block_id)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(block_id)


def test_memory_that_was_never_touched_stays_untouched() -> None:
    pool = BlockPool(100, LRULeafFirst(), lambda block: None)
    for _ in range(50):
        first, second = pool.allocate(), pool.allocate()
        assert {first, second} == {0, 1}
        pool.release(second)
        pool.release(first)
