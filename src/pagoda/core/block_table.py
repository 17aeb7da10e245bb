"""Block tables: which block holds which positions of a sequence, for each layer group."""

from __future__ import annotations

from array import array

from pagoda.core.prefix_cache import PrefixNode


class SequenceBlocks:
    """Block tables of one running request; those of all groups have the same length.

    `first_blocks[group]` is where a table's blocks start: a windowed group has let go of those before.
    `node` is the last of its blocks in the prefix cache, None when the request is no part of that.
    `publishes` turns false where the rest of its blocks cannot be named.
    `has_run` turns true with the first step: until then a block copied from a hit may be empty.
    """

    __slots__ = ("first_blocks", "has_run", "node", "num_hit_blocks", "num_published", "publishes", "tables")

    def __init__(self, tables: tuple[array[int], ...], first_blocks: list[int]) -> None:
        self.tables = tables
        self.first_blocks = first_blocks
        self.node: PrefixNode | None = None
        self.publishes = False
        self.has_run = False
        self.num_hit_blocks = self.num_published = len(tables[0])

    @property
    def num_blocks(self) -> int:
        return len(self.tables[0])
