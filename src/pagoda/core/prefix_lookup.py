"""What the prefix cache has of a request's tokens, and why not more."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.config import CacheConfig
from pagoda.core import block_hash
from pagoda.core.block_hash import TOKEN_BYTES, content_keys
from pagoda.core.cost import KVCacheSpec
from pagoda.core.prefix_cache import NO_BLOCK, MissReason, PrefixCache, PrefixMiss, PrefixNode
from pagoda.core.request import Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Whole blocks to share, and a block to copy tokens from.

    `awaits` is the hash of the next block when a running request is computing it right now.
    """

    nodes: Sequence[PrefixNode] = ()
    source: PrefixNode | None = None
    num_tokens: int = 0
    awaits: bytes | None = None

    @property
    def num_blocks(self) -> int:
        """Whole blocks to share."""
        return len(self.nodes)

    @property
    def has_copy(self) -> bool:
        return self.source is not None

    def shared_blocks(self, group: int, first: int) -> Sequence[int]:
        """From the `first` whole block on."""
        return [node.block_ids[group] for node in self.nodes[first:]]

    def source_block(self, group: int) -> int:
        assert self.source is not None
        return self.source.block_ids[group]

    def without_copy(self, block_size: int) -> PrefixHit:
        """Whole blocks only: the block to copy from takes room while the step is planned."""
        return PrefixHit(self.nodes, None, len(self.nodes) * block_size, self.awaits)


NO_HIT = PrefixHit()


class PrefixLookup:
    """Looks requests up in a prefix cache, and knows which blocks are being computed right now."""

    def __init__(self, cache: PrefixCache, spec: KVCacheSpec, config: CacheConfig) -> None:
        self._cache = cache
        self._spec = spec
        self._config = config
        groups = range(len(spec.groups))
        self._full_groups = [g for g in groups if spec.groups[g].window is None]
        self._windowed_groups = [g for g in groups if spec.groups[g].window is not None]
        self.pending: dict[bytes, str] = {}  # hash of a block -> request that computes it

    def find(self, request: Request) -> PrefixHit:
        """The longest cached prefix that leaves at least the last token to compute. Changes nothing."""
        if not self.is_eligible(request):
            return NO_HIT
        size = self._spec.block_size
        num_usable = request.num_tokens - 1
        num_whole = min(num_usable // size, self.num_cacheable_blocks(request))
        hashes = self.block_hashes(request)
        tokens = request.token_ids.tobytes()
        nodes = self._walk(request, hashes[:num_whole], tokens)
        awaits = hashes[len(nodes)] if len(nodes) < num_whole else None
        if awaits not in self.pending:
            awaits = None
        del nodes[self._num_visible(nodes) :]
        num_tokens = len(nodes) * size
        source, num_copied = None, 0
        if self._config.enable_partial_block_reuse and len(nodes) < self.num_cacheable_blocks(request):
            wanted = tokens[num_tokens * TOKEN_BYTES : min(num_tokens + size, num_usable) * TOKEN_BYTES]
            source, num_copied = self._nearest(request, nodes, wanted)
            if source is None or num_copied == 0 or NO_BLOCK in source.block_ids:
                source, num_copied = None, 0
        return PrefixHit(nodes, source, num_tokens + num_copied, awaits)

    def cached_nodes(self, request: Request) -> list[PrefixNode]:
        """The longest run of the request's whole blocks that another one could share, its last included."""
        if not self.is_eligible(request):
            return []
        hashes = self.block_hashes(request)[: self.num_cacheable_blocks(request)]
        nodes = self._walk(request, hashes, request.token_ids.tobytes())
        return nodes[: self._num_visible(nodes)]

    def chain(self, hash_: bytes) -> list[PrefixNode]:
        """The blocks of the prefix that ends with this one, as far as they could be shared."""
        node, nodes = self._cache.get(hash_), []
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        for index, node in enumerate(nodes):
            if any(node.block_ids[g] == NO_BLOCK for g in self._full_groups):
                del nodes[index:]
                break
        return nodes[: self._num_visible(nodes)]

    def num_cached_blocks(self, request: Request) -> int:
        """About how many of its blocks are cached, from a few look-ups: hashes have their prefix in them."""
        if not self.is_eligible(request):
            return 0
        hashes = self.block_hashes(request)
        return bisect_left(hashes, True, key=lambda hash_: self._cache.get(hash_) is None)

    def explain(self, request: Request, hit: PrefixHit) -> PrefixMiss | None:
        """Why `hit` ends where it ends; None when it covers all it may."""
        if not self.is_eligible(request):
            return PrefixMiss(MissReason.DISABLED, 0, 0, request.token_ids[0])
        num_usable = request.num_tokens - 1
        if hit.num_tokens >= num_usable:
            return None
        size, index = self._spec.block_size, len(hit.nodes)
        tokens = request.token_ids[index * size : min((index + 1) * size, num_usable)].tobytes()
        nearest, num_common = self._nearest(request, hit.nodes, tokens)
        position = index * size + num_common
        cached_token_id = None
        if nearest is not None and num_common < nearest.num_tokens:
            cached_token_id = array("i", nearest.token_bytes)[num_common]
            if cached_token_id == request.token_ids[position]:
                cached_token_id = None  # the last token, which is computed even where it is cached
        hashes = self.block_hashes(request)
        if index < len(hashes) and self._cache.was_evicted(hashes[index]):
            reason = MissReason.EVICTED
        elif position > hit.num_tokens:
            reason = MissReason.PARTIAL_BLOCK
        elif position > 0 and cached_token_id is not None:
            reason = MissReason.DIVERGED
        elif index == 0 and self._cache.is_first_block(tokens, self.extra(request, 0)):
            reason = MissReason.SALT
        else:
            reason = MissReason.NEVER_SEEN
        return PrefixMiss(reason, hit.num_tokens, position, request.token_ids[position], cached_token_id)

    def is_eligible(self, request: Request) -> bool:
        return self._config.enable_prefix_caching and request.reads_cache

    def block_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the request's full blocks so far, kept on the request."""
        hashes, size = request.block_hashes, self._spec.block_size
        num_full = request.num_tokens // size
        if len(hashes) < num_full:
            done = len(hashes)
            tokens = request.token_ids[done * size : num_full * size].tobytes()
            parent = hashes[-1] if hashes else self._cache.root_hash(request.cache_root)
            for start in range(0, len(tokens), size * TOKEN_BYTES):
                block_tokens = tokens[start : start + size * TOKEN_BYTES]
                parent = block_hash.hash_block(parent, block_tokens, self.extra(request, len(hashes)))
                hashes.append(parent)
        return hashes

    def extra(self, request: Request, index: int) -> bytes:
        """Encoded extra keys of the request's block `index`."""
        if not request.content_spans:
            return b""
        size = self._spec.block_size
        return content_keys(request.content_spans, index * size, (index + 1) * size)

    def num_cacheable_blocks(self, request: Request) -> int:
        """Blocks before the first content that nothing identifies."""
        unknown = [span.start for span in request.content_spans if span.digest is None]
        return min(unknown) // self._spec.block_size if unknown else request.num_tokens

    def announce(self, request: Request, num_done_blocks: int) -> None:
        """The request computes its blocks from this one on: others may wait for them."""
        for hash_ in self.block_hashes(request)[num_done_blocks : self.num_cacheable_blocks(request)]:
            self.pending.setdefault(hash_, request.request_id)

    def withdraw(self, request: Request, first: int, end: int | None = None) -> None:
        """The request has computed these blocks, or will not."""
        for hash_ in request.block_hashes[first:end]:
            if self.pending.get(hash_) == request.request_id:
                del self.pending[hash_]

    def _walk(self, request: Request, hashes: Sequence[bytes], tokens: bytes) -> list[PrefixNode]:
        """Verified whole blocks that every full-attention group still has."""
        nodes: list[PrefixNode] = []
        parent = self._cache.root(request.cache_root)
        if parent is None:
            return nodes
        num_bytes = self._spec.block_size * TOKEN_BYTES
        for index, hash_ in enumerate(hashes):
            block_tokens = tokens[index * num_bytes : (index + 1) * num_bytes]
            node = self._cache.find(parent, hash_, block_tokens, self.extra(request, index))
            if node is None:
                break
            block_ids = node.block_ids
            if any(block_ids[g] == NO_BLOCK for g in self._full_groups):
                break
            nodes.append(node)
            parent = node
        return nodes

    def _num_visible(self, nodes: Sequence[PrefixNode]) -> int:
        """The most blocks after which each windowed group has every block that its window still covers."""
        if not self._windowed_groups:
            return len(nodes)
        runs = [self._run_lengths(nodes, g) for g in self._windowed_groups]
        for n in range(len(nodes), 0, -1):
            position = n * self._spec.block_size
            if all(
                run[n] >= n - self._spec.first_visible_block(g, position)
                for g, run in zip(self._windowed_groups, runs, strict=True)
            ):
                return n
        return 0

    def _run_lengths(self, nodes: Sequence[PrefixNode], group: int) -> list[int]:
        """Entry n: how many blocks in a row the group has that end with the n-th."""
        runs = [0]
        for node in nodes:
            runs.append(0 if node.block_ids[group] == NO_BLOCK else runs[-1] + 1)
        return runs

    def _nearest(
        self, request: Request, nodes: Sequence[PrefixNode], tokens: bytes
    ) -> tuple[PrefixNode | None, int]:
        parent = nodes[-1] if nodes else self._cache.root(request.cache_root)
        if parent is None or not tokens:
            return None, 0
        return self._cache.nearest(parent, tokens, self.extra(request, len(nodes)))
