"""`BlockPool`: the blocks of one layer group. Allocate, retain and release are O(1) a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagoda.core.eviction import EvictionPolicy
    from pagoda.core.prefix_cache import PrefixNode


class Block:
    """Bookkeeping of one physical block.

    A block is held (`ref_count` > 0); or it holds the content of a cached prefix (`node`) and is pinned
    (`num_pins` > 0) or reusable; or it is free.
    """

    __slots__ = ("block_id", "next", "node", "num_pins", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.num_pins = 0
        self.node: PrefixNode | None = None
        self.previous: Block | None = None  # links of the eviction policy
        self.next: Block | None = None


class BlockPool:
    """All blocks of a group. Reusable blocks are allocated once free ones have run out.

    Free ids form a stack, lowest first, so that memory which was never touched stays untouched.
    `on_evict` is told of a reusable block before it becomes free.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy, on_evict: Callable[[Block], None]) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.policy = policy
        self._on_evict = on_evict
        self._free_ids = list(range(num_blocks - 1, -1, -1))
        self.num_pinned = 0  # blocks that only pins keep: no table holds them, and they are not evicted

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free_ids)

    @property
    def num_reusable(self) -> int:
        """Blocks that no table holds and whose content may be hit or evicted."""
        return len(self.policy)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free_ids) + len(self.policy)

    @property
    def num_held(self) -> int:
        return len(self.blocks) - self.num_available - self.num_pinned

    @property
    def free_ids(self) -> tuple[int, ...]:
        return tuple(self._free_ids)

    def allocate(self) -> int:
        """Take one block, with `ref_count` 1 and no content that counts; evicts when none is free.

        The caller has planned: `num_available` is at least 1.
        """
        if not self._free_ids:
            self.forget(self.policy.choose())
        block_id = self._free_ids.pop()
        self.blocks[block_id].ref_count = 1
        return block_id

    def retain(self, block_id: int) -> None:
        block = self.blocks[block_id]
        if block.ref_count == 0:
            if block.num_pins:
                self.num_pinned -= 1
            else:
                self.policy.remove(block)
        block.ref_count += 1

    def release(self, block_id: int) -> None:
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is released twice"
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.node is None:
                self._free_ids.append(block_id)
            elif block.num_pins:
                self.num_pinned += 1
            else:
                self.policy.add(block)

    def pin(self, block: Block) -> None:
        """Keep a cached block from eviction. Pins count: as many `unpin` take it back."""
        assert block.node is not None, f"block {block.block_id} is pinned and holds nothing"
        block.num_pins += 1
        if block.num_pins == 1 and block.ref_count == 0:
            self.policy.remove(block)
            self.num_pinned += 1

    def unpin(self, block: Block) -> None:
        assert block.num_pins > 0, f"block {block.block_id} is unpinned twice"
        block.num_pins -= 1
        if block.num_pins == 0 and block.ref_count == 0:
            self.num_pinned -= 1
            self.policy.add(block)

    def forget(self, block: Block) -> None:
        """Drop the cached content of a reusable block, which becomes free."""
        self._on_evict(block)
        assert block.node is None and block.ref_count == 0
        self.policy.remove(block)
        self._free_ids.append(block.block_id)
