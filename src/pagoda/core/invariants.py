"""What must hold after every step, as checks that tests and the simulator call.

I1 free + held + reusable + pinned = total. I2 `ref_count` = number of tables holding the block. I3 hashed
=> full and unchanged. I4 hash index and blocks agree. I5 no slot is written by two rows of a step. I6
tables cover computed + scheduled tokens. I7 a refused allocation changed nothing. I8 budgets hold. I9
each accepted request ends once. I10 no request waits for ever. I11 idle => nothing held. I12 same trace and
seed => same schedule.

I7 and I12 compare two states or two runs: `snapshot` gives a comparable state, and events compare equal.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from pagoda.core import block_hash
from pagoda.core.block_hash import TOKEN_BYTES
from pagoda.core.events import Event, RequestAdded, RequestFinished
from pagoda.core.kv_cache_manager import KVCacheManager
from pagoda.core.prefix_cache import NO_BLOCK, PrefixNode
from pagoda.core.request import RequestStatus
from pagoda.core.scheduler import Scheduler
from pagoda.core.step import SchedulerOutput


class InvariantViolation(AssertionError):
    """The control plane has contradicted itself. The message starts with the invariant's number."""


def check_state(scheduler: Scheduler) -> None:
    """I1 to I4, I6 and I11, between two steps or between `schedule` and `update`.

    Raises:
        InvariantViolation: one does not hold.
    """
    kv = scheduler.kv
    for group in range(len(kv.pools)):
        _check_pool(kv, group)
    _check_tree(kv)
    _check_tables(scheduler)
    if not scheduler.requests:
        _check_idle(kv)


def check_step(scheduler: Scheduler, step: SchedulerOutput) -> None:
    """I5, I6 and I8 of a step that was planned and not yet updated.

    Raises:
        InvariantViolation: one does not hold.
    """
    config, kv = scheduler.config, scheduler.kv
    if not 0 < step.num_scheduled_tokens <= config.max_num_batched_tokens:
        _fail("I8", f"{step.num_scheduled_tokens} tokens in a budget of {config.max_num_batched_tokens}")
    if scheduler.num_running > config.max_num_seqs:
        _fail("I8", f"{scheduler.num_running} requests run; max_num_seqs is {config.max_num_seqs}")
    if len({r.request_id for r in step.requests}) != len(step.requests):
        _fail("I8", "a request is in the step twice")
    writers: dict[tuple[int, int], str] = {}
    for r in step.requests:
        end = r.start + len(r.token_ids)
        for group, table in enumerate(r.block_tables):
            first_seen = kv.spec.first_visible_block(group, r.start)
            last = (end - 1) // kv.block_size
            if len(table) <= last or NO_BLOCK in table[first_seen : last + 1]:
                _fail("I6", f"{r.request_id} computes [{r.start}, {end}) with table {list(table)}")
            for block_id in table[r.start // kv.block_size : last + 1]:
                other = writers.setdefault((group, block_id), r.request_id)
                block = kv.pools[group].blocks[block_id]
                if other != r.request_id:
                    _fail("I5", f"{other} and {r.request_id} write block {block_id} of group {group}")
                if block.ref_count != 1 or block.node is not None:
                    _fail("I5", f"{r.request_id} writes block {block_id}, which is shared or cached")
    targets = [(group, target) for group, _, target in step.block_copies]
    if len(set(targets)) != len(targets) or not writers.keys() >= set(targets):
        _fail("I5", f"copies {step.block_copies} go to blocks that the step does not write")


def snapshot(kv: KVCacheManager) -> tuple[object, ...]:
    """All that an allocation may change, as values (I7)."""
    return (
        tuple(pool.free_ids for pool in kv.pools),
        tuple(tuple((b.ref_count, id(b.node)) for b in pool.blocks) for pool in kv.pools),
        tuple(tuple(b.block_id for b in pool.policy) for pool in kv.pools),
        tuple((request_id, [list(t) for t in s.tables]) for request_id, s in kv.sequences.items()),
        tuple(hash_ for hash_, _ in kv.prefix_cache.full_nodes()),
        tuple(kv.lookup.pending.items()),
    )


class LifecycleChecker:
    """I9, fed with every event. `check_ended` adds that nothing accepted is still open."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.num_ended = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestAdded):
            if event.request_id in self.open:
                _fail("I9", f"{event.request_id} is added while it runs")
            self.open.add(event.request_id)
        elif isinstance(event, RequestFinished):
            if event.request_id not in self.open:
                _fail("I9", f"{event.request_id} ends twice, or was never accepted")
            self.open.remove(event.request_id)
            self.num_ended += 1

    def check_ended(self) -> None:
        if self.open:
            _fail("I9", f"{sorted(self.open)} never ended")


class ProgressChecker:
    """I10, fed with every step: a step is planned whenever there is work, and the request that is first in
    order gets ahead within `max_idle_steps`."""

    def __init__(self, max_idle_steps: int = 1000) -> None:
        self._max_idle_steps = max_idle_steps
        self._first: tuple[str, int, int] | None = None
        self._num_idle_steps = 0

    def __call__(self, scheduler: Scheduler, step: SchedulerOutput | None) -> None:
        if not scheduler.requests:
            self._first = None
            return
        if step is None:
            _fail("I10", f"nothing is scheduled while {len(scheduler.requests)} requests wait")
        request = min(scheduler.requests.values(), key=lambda r: r.queue_key)
        state = (request.request_id, request.num_computed_tokens, request.num_tokens)
        self._num_idle_steps = self._num_idle_steps + 1 if state == self._first else 0
        self._first = state
        if self._num_idle_steps > self._max_idle_steps:
            _fail("I10", f"{request.request_id} has not moved for {self._num_idle_steps} steps")


def _check_pool(kv: KVCacheManager, group: int) -> None:
    pool = kv.pools[group]
    free, reusable = set(pool.free_ids), {b.block_id for b in pool.policy}
    held = {b.block_id for b in pool.blocks if b.ref_count > 0}
    pinned = {b.block_id for b in pool.blocks if b.num_pins and not b.ref_count}
    counts = (pool.num_free, pool.num_reusable, pool.num_held, pool.num_pinned)
    if counts != (len(free), len(reusable), len(held), len(pinned)):
        _fail("I1", f"group {group} counts {pool.num_free} free, {pool.num_reusable} reusable blocks wrongly")
    if len(free | reusable | held | pinned) != pool.num_blocks or sum(counts) != pool.num_blocks:
        _fail("I1", f"group {group}: free {free}, reusable {reusable}, held {held}, pinned {pinned}")
    tables = [s.tables[group] for s in (*kv.sequences.values(), *kv.forks.kept.values())]
    holders = Counter(block_id for table in tables for block_id in table if block_id != NO_BLOCK)
    _check_pins(kv, group)
    for block in pool.blocks:
        if block.ref_count != holders[block.block_id]:
            _fail(
                "I2", f"block {block.block_id} counts {block.ref_count} of {holders[block.block_id]} tables"
            )
        if block.block_id in free and block.node is not None:
            _fail("I4", f"free block {block.block_id} of group {group} can be hit")
        if block.block_id in reusable and block.node is None:
            _fail("I4", f"reusable block {block.block_id} of group {group} holds nothing")
        if block.node is not None and block.node.block_ids[group] != block.block_id:
            _fail("I4", f"block {block.block_id} of group {group} names a node that has another block")


def _check_pins(kv: KVCacheManager, group: int) -> None:
    """Part of I1 and I4: pinned blocks hold what they were pinned for, and are no more than may be."""
    pool = kv.pools[group]
    pins = Counter(block_id for pin in kv.pins for g, block_id in pin.blocks if g == group)
    if {b.block_id: b.num_pins for b in pool.blocks if b.num_pins} != dict(pins):
        _fail("I1", f"group {group} has other pinned blocks than {sorted(pins)}")
    if len(pins) != kv.pins.num_blocks[group] or len(pins) > kv.pins.max_blocks[group]:
        _fail("I8", f"group {group} has {len(pins)} pinned blocks of at most {kv.pins.max_blocks[group]}")
    nodes = {id(node) for pin in kv.pins for node in pin.nodes}
    if any(id(pool.blocks[block_id].node) not in nodes for block_id in pins):
        _fail("I4", f"a pinned block of group {group} holds something else now")


def _check_tree(kv: KVCacheManager) -> None:
    index = dict(kv.prefix_cache.full_nodes())
    eviction_order = [{b.block_id: i for i, b in enumerate(pool.policy)} for pool in kv.pools]
    num_full = 0
    for node in kv.prefix_cache.nodes():
        if sorted(node.children) != node.child_keys:
            _fail("I4", "children of a node are out of order")
        if node.parent is None:
            continue
        if node.block_hash:
            num_full += 1
            _check_full_node(kv, node, index)
        elif node.children or not 0 < node.num_tokens < kv.block_size:
            _fail("I3", f"a tail of {node.num_tokens} tokens has children or is full")
        for group, block_id in enumerate(node.block_ids):
            if block_id != NO_BLOCK and kv.pools[group].blocks[block_id].node is not node:
                _fail("I4", f"the cache finds block {block_id} of group {group}, which is something else now")
        if node.parent.parent is not None:
            _check_leaf_first(kv, node, node.parent, eviction_order)
    if num_full != len(index):
        _fail("I4", f"the hash index has {len(index)} blocks, the tree {num_full}")


def _check_leaf_first(
    kv: KVCacheManager, node: PrefixNode, parent: PrefixNode, eviction_order: list[dict[int, int]]
) -> None:
    """Of one prefix the end is evicted before its beginning. Behind a window the beginning goes first."""
    for group, order in enumerate(eviction_order):
        own, before = node.block_ids[group], parent.block_ids[group]
        if kv.spec.groups[group].window is not None or own == NO_BLOCK:
            continue
        num_blocks = kv.pools[group].num_blocks  # stands for blocks that are held
        if before == NO_BLOCK or order.get(before, num_blocks) < order.get(own, num_blocks):
            _fail("I4", f"block {own} of group {group} would outlive block {before}, which it continues")


def _check_full_node(kv: KVCacheManager, node: PrefixNode, index: dict[bytes, PrefixNode]) -> None:
    assert node.parent is not None
    if len(node.token_bytes) != kv.block_size * TOKEN_BYTES:
        _fail("I3", f"a hashed block has {node.num_tokens} tokens of {kv.block_size}")
    if index.get(node.block_hash) is not node:
        _fail("I4", "a cached block is not what the hash index finds")
    if node.block_hash != block_hash.hash_block(node.parent.block_hash, node.token_bytes, node.extra):
        _fail("I3", "a hash does not belong to its block's tokens")


def _check_tables(scheduler: Scheduler) -> None:
    kv = scheduler.kv
    running = {i for i, r in scheduler.requests.items() if r.status is RequestStatus.RUNNING}
    if running != set(kv.sequences):
        _fail("I6", f"{running} run and {set(kv.sequences)} hold blocks")
    for request_id, request in scheduler.requests.items():
        if request_id not in running and request.num_computed_tokens:
            _fail("I6", f"{request_id} has no blocks for its {request.num_computed_tokens} tokens")
    for siblings in kv.forks.kept:
        if not any(id(r.siblings) == siblings for r in scheduler.requests.values()):
            _fail("I11", "a prompt is kept for choices, and none of them is left")
    if not set(kv.lookup.pending.values()) <= running:
        _fail("I10", "requests wait for a block that nobody is computing")
    for request_id, sequence in kv.sequences.items():
        num_computed = scheduler.requests[request_id].num_computed_tokens
        if sequence.num_blocks * kv.block_size < num_computed:
            _fail("I6", f"{request_id} has {sequence.num_blocks} blocks for {num_computed} tokens")
        for first, table in zip(sequence.first_blocks, sequence.tables, strict=True):
            if set(table[:first]) - {NO_BLOCK} or NO_BLOCK in table[first:]:
                _fail("I6", f"table {list(table)} of {request_id} should start at {first}")


def _check_idle(kv: KVCacheManager) -> None:
    if kv.sequences or kv.forks.kept or kv.lookup.pending or any(pool.num_held for pool in kv.pools):
        _fail("I11", "blocks are held, and no request is there to hold them")
    if any(node.num_users for node in kv.prefix_cache.nodes()):
        _fail("I11", "cached prefixes are in use, and no request is there to use them")
    for node in kv.prefix_cache.nodes():
        if not node.children and all(block_id == NO_BLOCK for block_id in node.block_ids):
            _fail("I11", "the prefix cache keeps a prefix of which nothing is left")


def _fail(invariant: str, message: str) -> NoReturn:
    raise InvariantViolation(f"{invariant}: {message}")
