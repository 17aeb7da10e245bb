"""How computed blocks get into the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagoda.config import CacheConfig
from pagoda.core.block_pool import BlockPool
from pagoda.core.block_table import SequenceBlocks
from pagoda.core.prefix_cache import NO_BLOCK, PrefixCache, PrefixNode
from pagoda.core.prefix_lookup import PrefixLookup
from pagoda.core.request import Request


class PrefixPublisher:
    """Publishes blocks of running sequences; `on_cached(group, block_id, block_hash)` hears of each."""

    def __init__(
        self,
        cache: PrefixCache,
        lookup: PrefixLookup,
        pools: Sequence[BlockPool],
        config: CacheConfig,
        on_cached: Callable[[int, int, bytes], None],
    ) -> None:
        self._cache = cache
        self._lookup = lookup
        self._pools = pools
        self._config = config
        self._block_size = cache.block_size
        self._groups = range(len(pools))
        self._on_cached = on_cached

    def publish(self, request: Request, sequence: SequenceBlocks, num_full: int, now_s: float) -> None:
        """Put the request's new full blocks into the prefix cache.

        Where another request has published the same block, this one shares that block and gives its own
        back, so that a prefix is held once and its chain is held by all who continue it.
        """
        hashes = self._lookup.block_hashes(request)
        end = min(num_full, self._lookup.num_cacheable_blocks(request))
        size, node = self._block_size, sequence.node
        for index in range(sequence.num_published, end):
            assert node is not None
            tokens = request.token_ids[index * size : (index + 1) * size].tobytes()
            child = self._cache.add(node, hashes[index], tokens, self._lookup.extra(request, index))
            if child is None:  # the hash stands for something else: this chain ends here
                end = index
                break
            for group in self._groups:
                self._attach(child, group, sequence, index)
            child.last_use_s = now_s
            child.num_users += 1
            node.num_users -= 1
            sequence.node = node = child
        sequence.publishes = end == num_full
        self._lookup.withdraw(request, sequence.num_published, end if sequence.publishes else None)
        sequence.num_published = end

    def _attach(self, node: PrefixNode, group: int, sequence: SequenceBlocks, index: int) -> None:
        pool, table = self._pools[group], sequence.tables[group]
        published, own = node.block_ids[group], table[index]
        if published == NO_BLOCK:
            node.block_ids[group] = own
            pool.blocks[own].node = node
            if node.block_hash:
                self._on_cached(group, own, node.block_hash)
        elif published != own:
            pool.retain(published)
            table[index] = published
            pool.release(own)

    def publish_tail(self, request: Request, sequence: SequenceBlocks) -> None:
        """Keep the last, partly filled block of a request that ends, for others to copy from."""
        index, num_tail = divmod(request.num_computed_tokens, self._block_size)
        if (
            sequence.node is None
            or not sequence.publishes
            or not sequence.has_run
            or num_tail == 0
            or index >= self._lookup.num_cacheable_blocks(request)
            or not self._config.enable_partial_block_reuse
        ):
            return
        start = index * self._block_size
        tokens = request.token_ids[start : start + num_tail].tobytes()
        tail = self._cache.add_tail(sequence.node, tokens, self._lookup.extra(request, index))
        if tail is not None:
            for group in self._groups:
                self._attach(tail, group, sequence, index)

    def computed_by(self, sequence: SequenceBlocks) -> list[PrefixNode]:
        """What the request has published itself and all that continues it, parents first."""
        if sequence.num_published == sequence.num_hit_blocks:
            return []
        node = sequence.node
        for _ in range(sequence.num_published - sequence.num_hit_blocks - 1):
            assert node is not None
            node = node.parent
        assert node is not None
        return list(self._cache.subtree(node))

    def forget(self, nodes: Sequence[PrefixNode]) -> None:
        """Forget what these nodes, parents first, stand for, except what a table holds."""
        for doubtful in reversed(nodes):
            for group, block_id in enumerate(doubtful.block_ids):
                if block_id != NO_BLOCK and self._pools[group].blocks[block_id].ref_count == 0:
                    self._pools[group].forget(self._pools[group].blocks[block_id])
