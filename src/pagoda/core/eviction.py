"""Which reusable block goes first when a pool needs room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from pagoda.core.block_pool import Block


class EvictionPolicy(Protocol):
    """Keeps the blocks that hold a cached prefix and that no table holds."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]:
        """Blocks in the order in which they would be evicted."""

    def add(self, block: Block) -> None:
        """The last table has let the block go."""

    def remove(self, block: Block) -> None:
        """A table holds the block again, or its content is gone."""

    def choose(self) -> Block:
        """The block to evict next; it stays until `remove`."""


class LRULeafFirst:
    """Least recently used first, and of one prefix the end before its beginning.

    An intrusive doubly linked list, every operation O(1). Leaves come first without any search: a table
    that holds a block holds all blocks before it and gives them back last to first, so a block is never
    older in this list than one that continues it.
    """

    def __init__(self) -> None:
        self._ends = Block(-1)
        self._ends.previous = self._ends.next = self._ends
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        block = self._ends.next
        while block is not None and block is not self._ends:
            yield block
            block = block.next

    def add(self, block: Block) -> None:
        last = self._ends.previous
        assert last is not None
        last.next = self._ends.previous = block
        block.previous, block.next = last, self._ends
        self._num_blocks += 1

    def remove(self, block: Block) -> None:
        previous, following = block.previous, block.next
        assert previous is not None and following is not None
        previous.next, following.previous = following, previous
        block.previous = block.next = None
        self._num_blocks -= 1

    def choose(self) -> Block:
        oldest = self._ends.next
        assert oldest is not None and oldest is not self._ends, "there is no reusable block"
        return oldest
