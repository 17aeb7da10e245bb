"""`KVCacheManager`: which request holds which block, over all layer groups. KV memory itself is elsewhere.

A call that takes blocks plans first and then commits: one that is refused has changed nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from pagoda.config import CacheConfig
from pagoda.core.block_pool import Block, BlockPool
from pagoda.core.block_table import SequenceBlocks
from pagoda.core.cost import KVCacheSpec
from pagoda.core.events import BlockCached, BlockEvicted, EventSink, PoolUsage
from pagoda.core.eviction import EvictionPolicy, LRULeafFirst
from pagoda.core.prefix_cache import NO_BLOCK, PrefixCache, PrefixMiss
from pagoda.core.prefix_lookup import NO_HIT, PrefixHit, PrefixLookup
from pagoda.core.prefix_publisher import PrefixPublisher
from pagoda.core.request import Request
from pagoda.core.step import BlockCopy


class KVCacheManager:
    """Pools, prefix cache and block tables.

    Args:
        spec: shape of the cache; each of its groups has one pool, and one table a request.
        num_blocks: blocks of each pool.
        config: whether and how prefixes are shared.
        clock: time of the events, in seconds.
        on_event: receives `BlockCached` and `BlockEvicted`.
        make_policy: makes the eviction policy of one pool.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: Sequence[int],
        config: CacheConfig,
        *,
        clock: Callable[[], float],
        on_event: EventSink | None = None,
        make_policy: Callable[[], EvictionPolicy] = LRULeafFirst,
    ) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.config = config
        self.pools = tuple(
            BlockPool(n, make_policy(), self._evictor(group)) for group, n in enumerate(num_blocks)
        )
        self.prefix_cache = PrefixCache(
            len(spec.groups), spec.block_size, config.cache_namespace, 2 * sum(num_blocks) + 1024
        )
        self.lookup = PrefixLookup(self.prefix_cache, spec, config)
        self.sequences: dict[str, SequenceBlocks] = {}
        self._publisher = PrefixPublisher(self.prefix_cache, self.lookup, self.pools, config, self._on_cached)
        self._clock = clock
        self._on_event = on_event
        self._groups = range(len(spec.groups))
        self._windowed_groups = [g for g in self._groups if spec.groups[g].window is not None]
        self._copy_sources: list[tuple[int, int]] = []  # (group, block) kept until the step is planned

    def usage(self) -> tuple[PoolUsage, ...]:
        return tuple(PoolUsage(p.num_free, p.num_reusable, p.num_held) for p in self.pools)

    def max_sequence_tokens(self) -> int | None:
        """Tokens of the longest sequence that the pools can hold; None: they hold any."""
        size = self.block_size
        return min(
            (
                pool.num_blocks * size
                for group, pool in enumerate(self.pools)
                if self.spec.max_blocks_for(group, (pool.num_blocks + 1) * size) > pool.num_blocks
            ),
            default=None,
        )

    def block_tables(self, request: Request) -> tuple[array[int], ...]:
        """Live tables, valid until the request is scheduled again; released ones stay as they were."""
        return self.sequences[request.request_id].tables

    # Planning: what could be taken. Nothing here changes anything.

    def find_hit(self, request: Request) -> PrefixHit:
        return self.lookup.find(request)

    def explain_miss(self, request: Request, hit: PrefixHit) -> PrefixMiss | None:
        return self.lookup.explain(request, hit)

    def is_pending(self, block_hash: bytes) -> bool:
        """Whether a running request is computing this block right now."""
        return block_hash in self.lookup.pending

    def num_tokens_that_fit(self, request: Request, num_tokens: int, hit: PrefixHit = NO_HIT) -> int:
        """How many of the next `num_tokens` the request can get blocks for now.

        `hit` counts for a request that holds nothing yet; a running request has used its own.
        """
        sequence = self.sequences.get(request.request_id)
        if sequence is not None:
            start, num_held = request.num_computed_tokens, sequence.num_blocks
            if start + num_tokens <= num_held * self.block_size:
                return num_tokens
        else:
            start, num_held = hit.num_tokens, len(hit.nodes)
        for group, pool in enumerate(self.pools):
            num_new = pool.num_available - (self._num_revived(group, hit) if sequence is None else 0)
            num_tokens = min(num_tokens, (num_held + num_new) * self.block_size - start)
        return max(0, num_tokens)

    def has_room(
        self,
        request: Request,
        hit: PrefixHit,
        num_tokens: int,
        running: Iterable[Request],
        num_spare_blocks: Sequence[int],
    ) -> bool:
        """Whether `num_tokens` of a new sequence fit beside what running requests are still going to need
        for the tokens they have now, and `num_spare_blocks` of each group."""
        outstanding = [0] * len(self.pools)
        for other in running:
            sequence = self.sequences[other.request_id]
            if sequence.num_blocks * self.block_size < other.num_tokens:
                for group in self._groups:
                    num_held = sequence.num_blocks - sequence.first_blocks[group]
                    num_missing = self.spec.max_blocks_for(group, other.num_tokens) - num_held
                    outstanding[group] += max(0, num_missing)
        for group, pool in enumerate(self.pools):
            num_shared = len(hit.nodes) - self._first_hit_block(group, hit)
            num_new = max(0, self.spec.max_blocks_for(group, num_tokens) - num_shared)
            num_taken = num_new + self._num_revived(group, hit)
            if num_taken + outstanding[group] + num_spare_blocks[group] > pool.num_available:
                return False
        return True

    # Committing.

    def allocate(
        self, request: Request, num_tokens: int, hit: PrefixHit = NO_HIT
    ) -> tuple[BlockCopy, ...] | None:
        """Give the request blocks for its next `num_tokens`; a request without any starts with `hit`.

        Returns the block copies to make before the step, or None, and nothing has changed, when there is
        no room.
        """
        if self.num_tokens_that_fit(request, num_tokens, hit) < num_tokens:
            return None
        sequence = self.sequences.get(request.request_id)
        copies: list[BlockCopy] = []
        if sequence is None:
            sequence = self._start(request, hit)
            end = hit.num_tokens + num_tokens
        else:
            hit = NO_HIT
            end = request.num_computed_tokens + num_tokens
        num_new = -(-end // self.block_size) - sequence.num_blocks
        if num_new > 0:
            for pool, table in zip(self.pools, sequence.tables, strict=True):
                table.extend([pool.allocate() for _ in range(num_new)])
        if hit.source is not None:
            index = len(hit.nodes)
            copies = [BlockCopy(g, hit.source.block_ids[g], sequence.tables[g][index]) for g in self._groups]
        return tuple(copies)

    def end_planning(self) -> None:
        """No more blocks are taken before the step runs: sources of its copies may be evicted after it."""
        for group, block_id in self._copy_sources:
            self.pools[group].release(block_id)
        self._copy_sources.clear()

    def commit(self, request: Request) -> None:
        """Tokens up to `num_computed_tokens` have been computed: publish full blocks in the prefix cache,
        then let go of blocks that have fallen behind a window."""
        sequence = self.sequences[request.request_id]
        sequence.has_run = True
        num_full = request.num_computed_tokens // self.block_size
        if sequence.publishes and sequence.num_published < num_full:
            self._publisher.publish(request, sequence, num_full)
        for group in self._windowed_groups:
            first = self.spec.first_visible_block(group, request.num_computed_tokens)
            self._release(sequence, group, sequence.first_blocks[group], first)
            sequence.first_blocks[group] = max(first, sequence.first_blocks[group])

    def free(self, request: Request, *, failed: bool = False) -> None:
        """Give all blocks back; what is in the prefix cache stays reusable. Does nothing a second time.

        After a failure, blocks that the request computed and nobody else uses are forgotten instead: what
        is in them is in doubt.
        """
        sequence = self.sequences.pop(request.request_id, None)
        if sequence is None:
            return
        self.lookup.withdraw(request, sequence.num_published)
        if not failed:
            self._publisher.publish_tail(request, sequence)
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            for index in range(len(table) - 1, sequence.first_blocks[group] - 1, -1):
                pool.release(table[index])
        if sequence.node is not None:
            if failed:
                self._publisher.forget_computed(sequence)
            sequence.node.num_users -= 1
            self.prefix_cache.prune(sequence.node)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds. Returns how many blocks that were."""
        num_blocks = 0
        for pool in self.pools:
            while pool.num_reusable:
                pool.forget(pool.policy.choose())
                num_blocks += 1
        return num_blocks

    def _start(self, request: Request, hit: PrefixHit) -> SequenceBlocks:
        tables = []
        first_blocks = [self._first_hit_block(group, hit) for group in self._groups]
        for group, (pool, first) in enumerate(zip(self.pools, first_blocks, strict=True)):
            shared = [node.block_ids[group] for node in hit.nodes[first:]]
            for block_id in shared:
                pool.retain(block_id)
            tables.append(array("i", [NO_BLOCK] * first + shared))
            if hit.source is not None:
                pool.retain(hit.source.block_ids[group])
                self._copy_sources.append((group, hit.source.block_ids[group]))
        sequence = self.sequences[request.request_id] = SequenceBlocks(tuple(tables), first_blocks)
        if self.config.enable_prefix_caching and request.use_cache:
            sequence.node = hit.nodes[-1] if hit.nodes else self.prefix_cache.make_root(request.cache_root)
            sequence.node.num_users += 1
            sequence.publishes = True
            self.lookup.announce(request, len(hit.nodes))
        return sequence

    def _first_hit_block(self, group: int, hit: PrefixHit) -> int:
        return self.spec.first_visible_block(group, len(hit.nodes) * self.block_size)

    def _num_revived(self, group: int, hit: PrefixHit) -> int:
        """Blocks of the hit that are available to everybody until the request takes them."""
        blocks = self.pools[group].blocks
        nodes = hit.nodes[self._first_hit_block(group, hit) :]
        num_revived = sum(blocks[node.block_ids[group]].ref_count == 0 for node in nodes)
        if hit.source is not None:
            num_revived += blocks[hit.source.block_ids[group]].ref_count == 0
        return num_revived

    def _release(self, sequence: SequenceBlocks, group: int, first: int, end: int) -> None:
        table = sequence.tables[group]
        for index in range(first, end):
            self.pools[group].release(table[index])
            table[index] = NO_BLOCK

    def _on_cached(self, group: int, block_id: int, block_hash: bytes) -> None:
        if self._on_event is not None:
            self._on_event(BlockCached(self._clock(), group, block_id, block_hash))

    def _evictor(self, group: int) -> Callable[[Block], None]:
        def evict(block: Block) -> None:
            node = block.node
            assert node is not None and node.block_ids[group] == block.block_id
            block.node = None
            self.prefix_cache.detach(node, group)
            if self._on_event is not None:
                self._on_event(BlockEvicted(self._clock(), group, block.block_id, node.block_hash))

        return evict
