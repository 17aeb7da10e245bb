"""What a KV cache costs in bytes. The planner, the allocator, metrics and docs all call this file.

Bytes of a sequence = 2 (keys and values) x layers x KV heads x tokens x (head dim x bytes per value + bytes
of a scale, where the type has one for each key and each value of a head).
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_VALUE = {"i16": 2, "f16": 2, "bf16": 2, "f32": 4}
BYTES_PER_SCALE = {"i16": 4}
CPU_KV_DTYPE = "i16"  # the type of the cpu backend, which plans have to know without its native code


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one attention span, so with one pool of blocks and one block table a request.

    `window` is the number of latest positions a query attends to, itself included; None is all of them.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of a model's KV cache: its layer groups, the tokens in a block and the type of a value."""

    groups: tuple[LayerGroup, ...]
    block_size: int = 16
    dtype: str = "f16"

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of a group: keys and values of `block_size` tokens in all its layers."""
        g = self.groups[group]
        vectors = 2 * len(g.layers) * g.num_kv_heads * self.block_size
        return vectors * (g.head_dim * BYTES_PER_VALUE[self.dtype] + BYTES_PER_SCALE.get(self.dtype, 0))

    def num_blocks_for(self, group: int, num_tokens: int) -> int:
        """Blocks of a group that a sequence of `num_tokens` holds at its end.

        A windowed group keeps the blocks that the next query can still see: its window, plus the part of
        a block that the window's start cuts through.
        """
        last_block = -(-num_tokens // self.block_size)
        return last_block - min(self.first_visible_block(group, num_tokens), last_block)

    def max_blocks_for(self, group: int, num_tokens: int) -> int:
        """Most blocks of a group held at once while a sequence grows to `num_tokens`, token by token.

        A step that computes several tokens holds their blocks beside the window; where the pool is short
        of them the scheduler takes a smaller step, so this is what a sequence cannot do without.
        """
        window = self.groups[group].window
        num_all = -(-num_tokens // self.block_size)
        if window is None:
            return num_all
        return min(num_all, -(-(window - 1) // self.block_size) + 1)

    def first_visible_block(self, group: int, position: int) -> int:
        """Index in a block table of the first block that the query at `position` can see."""
        window = self.groups[group].window
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def sequence_bytes(self, num_tokens: int) -> int:
        """Bytes of KV that a sequence of `num_tokens` holds, over all groups."""
        return sum(self.num_blocks_for(i, num_tokens) * self.block_bytes(i) for i in range(len(self.groups)))

    def bytes_per_token(self, group: int) -> float:
        return self.block_bytes(group) / self.block_size
