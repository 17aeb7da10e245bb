"""Pins, which keep a cached prefix until it is unpinned or its time is up, and a list of what is cached."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from pagoda.core.block_hash import TOKEN_BYTES
from pagoda.core.block_pool import BlockPool
from pagoda.core.cost import KVCacheSpec
from pagoda.core.events import EventSink, PrefixPinned, PrefixUnpinned, UnpinReason
from pagoda.core.prefix_cache import NO_BLOCK, PrefixCache, PrefixNode
from pagoda.core.prefix_lookup import PrefixLookup
from pagoda.core.request import Request
from pagoda.errors import CapacityError, RequestError
from pagoda.sampling_params import SamplingParams

PREVIEW_TOKENS = 32
PREVIEW_BYTES = PREVIEW_TOKENS * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class PrefixInfo:
    """A cached prefix, named by the hash of its last whole block.

    `ref_count` is how many block tables hold its last block, `last_use_s` a time on the scheduler's clock,
    and `ttl_s` the seconds that its pin has left, None when it is not pinned or pinned for good.
    `first_token_ids` are at most `PREVIEW_TOKENS`.
    """

    block_hash: bytes
    num_tokens: int
    ref_count: int
    last_use_s: float
    pinned: bool
    ttl_s: float | None
    first_token_ids: tuple[int, ...]

    @property
    def hash(self) -> str:
        return self.block_hash.hex()


@dataclass(slots=True)
class Pin:
    """The blocks that one pinned prefix needs to be hit, as (group, block id)."""

    nodes: tuple[PrefixNode, ...]
    blocks: tuple[tuple[int, int], ...]
    expires_s: float  # infinity: never


class PrefixPins:
    """Pins by the hash of their prefix's last block. Prefixes that share blocks share their cost, too.

    `max_blocks` bounds the pinned blocks of each pool.
    """

    def __init__(
        self,
        cache: PrefixCache,
        lookup: PrefixLookup,
        spec: KVCacheSpec,
        pools: Sequence[BlockPool],
        max_blocks: Sequence[int],
        clock: Callable[[], float],
        on_event: EventSink | None = None,
    ) -> None:
        self.max_blocks = tuple(max_blocks)
        self.num_blocks = [0] * len(pools)  # pinned, whether a table holds them or not, by group
        self._cache = cache
        self._lookup = lookup
        self._spec = spec
        self._pools = pools
        self._clock = clock
        self._on_event = on_event
        self._pins: dict[bytes, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def pin(self, prefix: Request | bytes, ttl_s: float | None = None) -> PrefixInfo:
        """Keep a cached prefix until it is unpinned or `ttl_s` seconds have passed.

        That is the longest of whole blocks of a request's tokens, or the one that ends with the block of a
        hash; the result says how long it is. A second call sets its time anew.

        Raises:
            RequestError: nothing of it is cached, or `ttl_s` is not positive.
            CapacityError: more blocks would be pinned than may be; nothing has changed.
        """
        if ttl_s is not None and not ttl_s > 0:
            raise RequestError(f"ttl_s is {ttl_s!r}; it must be a positive number", param="ttl_s")
        self.expire()
        nodes = self._find(prefix)
        if not nodes:
            raise RequestError(
                "no whole block of this prefix is cached",
                param="block_hash" if isinstance(prefix, bytes) else "prompt",
                hint=f"send a request that starts with it first; a block has {self._spec.block_size} tokens",
            )
        block_hash = nodes[-1].block_hash
        expires_s = inf if ttl_s is None else self._clock() + ttl_s
        pin = self._pins.get(block_hash)
        if pin is None:
            blocks = self._blocks_of(nodes)
            self._require_room(blocks)
            for group, block_id in blocks:
                block = self._pools[group].blocks[block_id]
                self.num_blocks[group] += block.num_pins == 0
                self._pools[group].pin(block)
            pin = self._pins[block_hash] = Pin(tuple(nodes), blocks, expires_s)
        pin.expires_s = expires_s
        num_tokens = len(nodes) * self._spec.block_size
        if self._on_event is not None:
            self._on_event(PrefixPinned(self._clock(), block_hash, num_tokens, ttl_s))
        return self._info(nodes[-1], num_tokens, _preview(nodes))

    def unpin(self, prefix: Request | bytes) -> bool:
        """Take back the pin with this hash, or the longest along a request's tokens; False: there is none.

        Blocks that no other pin keeps are ordinary cached blocks again, used just now.
        """
        self.expire()
        hashes = [prefix] if isinstance(prefix, bytes) else [n.block_hash for n in self._find(prefix)]
        pinned = [h for h in hashes if h in self._pins]
        if pinned:
            self._drop(pinned[-1], "asked")
        return bool(pinned)

    def _drop(self, block_hash: bytes, reason: UnpinReason) -> None:
        pin = self._pins.pop(block_hash)
        for group, block_id in reversed(pin.blocks):  # of a prefix the end is to be evicted first
            block = self._pools[group].blocks[block_id]
            self._pools[group].unpin(block)
            self.num_blocks[group] -= block.num_pins == 0
        if self._on_event is not None:
            self._on_event(PrefixUnpinned(self._clock(), block_hash, reason))

    def expire(self) -> None:
        """Unpin what has outlived its time."""
        if self._pins:
            now_s = self._clock()
            for block_hash in [h for h, pin in self._pins.items() if pin.expires_s <= now_s]:
                self._drop(block_hash, "expired")

    def unpin_all(self) -> None:
        for block_hash in list(self._pins):
            self._drop(block_hash, "reset")

    def unpin_through(self, nodes: Sequence[PrefixNode]) -> None:
        """Unpin every prefix that goes through one of these nodes: their content is in doubt."""
        doubtful = {id(node) for node in nodes}
        for block_hash, pin in list(self._pins.items()):
            if any(id(node) in doubtful for node in pin.nodes):
                self._drop(block_hash, "failed")

    def list_prefixes(self) -> list[PrefixInfo]:
        """The longest cached prefixes, and all that are pinned, latest use first."""
        self.expire()
        size = self._spec.block_size
        infos = []
        pending = [(root, 0, b"") for root in self._cache.roots()]
        while pending:
            node, num_tokens, preview = pending.pop()
            is_end = True
            for child in node.children.values():
                if child.block_hash:
                    is_end = False
                    longer = preview + child.token_bytes if len(preview) < PREVIEW_BYTES else preview
                    pending.append((child, num_tokens + size, longer))
            if node.block_hash and (is_end or node.block_hash in self._pins):
                infos.append(self._info(node, num_tokens, preview))
        infos.sort(key=lambda info: (-info.last_use_s, info.block_hash))
        return infos

    def _find(self, prefix: Request | bytes) -> list[PrefixNode]:
        return self._lookup.chain(prefix) if isinstance(prefix, bytes) else self._lookup.cached_nodes(prefix)

    def _info(self, node: PrefixNode, num_tokens: int, preview: bytes) -> PrefixInfo:
        pin = self._pins.get(node.block_hash)
        ttl_s = None if pin is None or pin.expires_s == inf else pin.expires_s - self._clock()
        held = [self._pools[g].blocks[b].ref_count for g, b in enumerate(node.block_ids) if b != NO_BLOCK]
        first_token_ids = tuple(array("i", preview[:PREVIEW_BYTES]))
        return PrefixInfo(
            node.block_hash,
            num_tokens,
            max(held, default=0),
            node.last_use_s,
            pin is not None,
            ttl_s,
            first_token_ids,
        )

    def _blocks_of(self, nodes: Sequence[PrefixNode]) -> tuple[tuple[int, int], ...]:
        """What a request needs that goes on after `nodes`: behind a window it needs nothing."""
        position = len(nodes) * self._spec.block_size
        return tuple(
            (group, node.block_ids[group])
            for group in range(len(self._pools))
            for node in nodes[self._spec.first_visible_block(group, position) :]
        )

    def _require_room(self, blocks: Sequence[tuple[int, int]]) -> None:
        for group, (pool, limit) in enumerate(zip(self._pools, self.max_blocks, strict=True)):
            num_new = sum(pool.blocks[b].num_pins == 0 for g, b in blocks if g == group)
            if self.num_blocks[group] + num_new > limit:
                raise CapacityError(
                    f"the prefix needs {num_new} more pinned blocks; {self.num_blocks[group]} of at most "
                    f"{limit} are pinned, and the pool has {pool.num_blocks}",
                    hint="unpin another prefix, or raise max_pinned_share or --kv-cache-memory-bytes; "
                    "one sequence of max_model_len always keeps its room",
                )


def named_prefix(
    token_ids: Sequence[int] | None, block_hash: bytes | None, cache_salt: str | None, adapter: str | None
) -> Request | bytes:
    """What `PrefixPins` looks for.

    Raises:
        RequestError: it is named by both or neither, or by something that is no prompt.
    """
    if (token_ids is None) == (block_hash is None):
        raise RequestError("a prefix is named by its token ids or by its hash, one of them", param="prompt")
    if block_hash is not None:
        return block_hash
    assert token_ids is not None
    params = SamplingParams(max_tokens=0)
    return Request("", token_ids, params, seed=0, cache_salt=cache_salt, adapter=adapter)


def _preview(nodes: Sequence[PrefixNode]) -> bytes:
    return b"".join(node.token_bytes for node in nodes[:PREVIEW_TOKENS])
