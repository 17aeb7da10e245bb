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
from pagoda.core.fork import Fork, Forks
from pagoda.core.prefix_cache import NO_BLOCK, PrefixCache, PrefixMiss, PrefixNode
from pagoda.core.prefix_lookup import NO_HIT, PrefixHit, PrefixLookup
from pagoda.core.prefix_pins import PrefixPins
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
        on_event: receives `BlockCached`, `BlockEvicted`, `PrefixPinned` and `PrefixUnpinned`.
        make_policy: makes the eviction policy of one pool.
        max_model_len: pins leave room for a sequence of so many tokens; None is the longest that fits.
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
        max_model_len: int | None = None,
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
        self.forks = Forks(spec, self.pools, self.prefix_cache, self.sequences)
        self.pins = PrefixPins(
            self.prefix_cache,
            self.lookup,
            spec,
            self.pools,
            self._max_pinned_blocks(max_model_len),
            clock,
            on_event,
        )
        self._publisher = PrefixPublisher(self.prefix_cache, self.lookup, self.pools, config, self._on_cached)
        self._clock = clock
        self._on_event = on_event
        self._groups = range(len(spec.groups))
        self._windowed_groups = [g for g in self._groups if spec.groups[g].window is not None]
        self._copy_sources: list[tuple[int, int]] = []  # (group, block) kept until the step is planned

    def usage(self) -> tuple[PoolUsage, ...]:
        return tuple(PoolUsage(p.num_free, p.num_reusable, p.num_held, p.num_pinned) for p in self.pools)

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

    def num_tokens_that_fit(self, request: Request, num_tokens: int, hit: PrefixHit | Fork = NO_HIT) -> int:
        """How many of the next `num_tokens` the request can get blocks for now.

        `hit` counts for a request that holds nothing yet; a running request has used its own.
        """
        sequence = self.sequences.get(request.request_id)
        if sequence is not None:
            start, num_held = request.num_computed_tokens, sequence.num_blocks
            if start + num_tokens <= num_held * self.block_size:
                return num_tokens
        else:
            start, num_held = hit.num_tokens, hit.num_blocks
        for group, pool in enumerate(self.pools):
            num_new = pool.num_available - (self._num_revived(group, hit) if sequence is None else 0)
            num_tokens = min(num_tokens, (num_held + num_new) * self.block_size - start)
        return max(0, num_tokens)

    def has_room(
        self,
        request: Request,
        hit: PrefixHit | Fork,
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
            num_shared = hit.num_blocks - self._first_hit_block(group, hit)
            num_new = max(0, self.spec.max_blocks_for(group, num_tokens) - num_shared)
            num_taken = num_new + self._num_revived(group, hit)
            if num_taken + outstanding[group] + num_spare_blocks[group] > pool.num_available:
                return False
        return True

    # Committing.

    def allocate(
        self, request: Request, num_tokens: int, hit: PrefixHit | Fork = NO_HIT
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
        if hit.has_copy:
            targets = [table[hit.num_blocks] for table in sequence.tables]
            copies = [BlockCopy(g, hit.source_block(g), targets[g]) for g in self._groups]
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
            self._publisher.publish(request, sequence, num_full, self._clock())
        position = request.num_computed_tokens
        if position == request.num_prompt_tokens and self._waits_for_forks(request):
            position -= 1  # siblings start with the last prompt token: for one step they need what it sees
        for group in self._windowed_groups:
            first = self.spec.first_visible_block(group, position)
            self._release(sequence, group, sequence.first_blocks[group], first)
            sequence.first_blocks[group] = max(first, sequence.first_blocks[group])

    def free(self, request: Request, *, failed: bool = False, keep_prompt: bool = False) -> None:
        """Give all blocks back; what is in the prefix cache stays reusable. Does nothing a second time.

        `keep_prompt` leaves the prompt's to siblings that have not started yet. After a failure, blocks
        that the request computed and nobody else uses are forgotten instead: what is in them is in doubt.
        """
        sequence = self.sequences.pop(request.request_id, None)
        if sequence is None:
            self.forks.release_unwanted(request)
            return
        self._touch(sequence.node)
        self.lookup.withdraw(request, sequence.num_published)
        if not failed:
            self._publisher.publish_tail(request, sequence)
        if keep_prompt and not failed and self.forks.keep(request, sequence):
            return
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            for index in range(len(table) - 1, sequence.first_blocks[group] - 1, -1):
                pool.release(table[index])
        if sequence.node is not None:
            if failed:
                doubtful = self._publisher.computed_by(sequence)
                self.pins.unpin_through(doubtful)
                self._publisher.forget(doubtful)
            sequence.node.num_users -= 1
            self.prefix_cache.prune(sequence.node)
        self.forks.release_unwanted(request)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds, pinned ones too. Returns how many that were."""
        num_blocks = 0
        self.pins.unpin_all()
        for pool in self.pools:
            while pool.num_reusable:
                pool.forget(pool.policy.choose())
                num_blocks += 1
        return num_blocks

    def _max_pinned_blocks(self, max_model_len: int | None) -> list[int]:
        """Pins always leave room for one sequence of the full length: whoever is first in order goes on."""
        limits = []
        for group, pool in enumerate(self.pools):
            longest = pool.num_blocks * self.block_size if max_model_len is None else max_model_len
            num_left = pool.num_blocks - self.spec.max_blocks_for(group, longest)
            limits.append(max(0, min(int(pool.num_blocks * self.config.max_pinned_share), num_left)))
        return limits

    def _waits_for_forks(self, request: Request) -> bool:
        """Not after preemption: then memory is short, and a block more could be too much."""
        return request.num_preemptions == 0 and self.forks.are_wanted(request)

    def _touch(self, node: PrefixNode | None) -> None:
        now_s = self._clock()
        while node is not None:
            node.last_use_s = now_s
            node = node.parent

    def _start(self, request: Request, hit: PrefixHit | Fork) -> SequenceBlocks:
        tables = []
        first_blocks = [self._first_hit_block(group, hit) for group in self._groups]
        for group, (pool, first) in enumerate(zip(self.pools, first_blocks, strict=True)):
            shared = list(hit.shared_blocks(group, first))
            for block_id in shared:
                pool.retain(block_id)
            tables.append(array("i", [NO_BLOCK] * first + shared))
            if hit.has_copy:
                pool.retain(hit.source_block(group))
                self._copy_sources.append((group, hit.source_block(group)))
        sequence = self.sequences[request.request_id] = SequenceBlocks(tuple(tables), first_blocks)
        if self.config.enable_prefix_caching and request.use_cache:
            self._continue_chain(request, sequence, hit)
        self.forks.release_unwanted(request)
        return sequence

    def _continue_chain(self, request: Request, sequence: SequenceBlocks, hit: PrefixHit | Fork) -> None:
        """A new sequence goes on in the prefix cache where the blocks that it shares end."""
        if isinstance(hit, Fork):
            node, num_published = hit.chain_end()
        else:
            node, num_published = hit.nodes[-1] if hit.nodes else None, hit.num_blocks
        sequence.node = node or self.prefix_cache.make_root(request.cache_root)
        sequence.node.num_users += 1
        self._touch(sequence.node)
        sequence.num_published = sequence.num_hit_blocks = num_published
        sequence.publishes = num_published == hit.num_blocks  # a chain that has ended does not go on
        if sequence.publishes:
            self.lookup.announce(request, num_published)

    def _first_hit_block(self, group: int, hit: PrefixHit | Fork) -> int:
        """First block that a table begins with. What a hit shares can always be continued at its whole
        blocks' end; a fork has all that its next token sees, and maybe no more."""
        position = hit.num_tokens if isinstance(hit, Fork) else hit.num_blocks * self.block_size
        return self.spec.first_visible_block(group, position)

    def _num_revived(self, group: int, hit: PrefixHit | Fork) -> int:
        """Blocks of the hit that are available to everybody until the request takes them."""
        blocks = self.pools[group].blocks
        taken = list(hit.shared_blocks(group, self._first_hit_block(group, hit)))
        if hit.has_copy:
            taken.append(hit.source_block(group))
        return sum(blocks[b].ref_count == 0 and blocks[b].num_pins == 0 for b in taken)

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
