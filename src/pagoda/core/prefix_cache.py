"""The prefix cache: a tree of token blocks whose keys and values are in the pools, found by block hash."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from pagoda.core import block_hash
from pagoda.core.block_hash import TOKEN_BYTES

NO_BLOCK = -1

NodeKey: TypeAlias = tuple[bytes, bytes]  # tokens and encoded extra keys


class PrefixNode:
    """One block's worth of tokens after a given prefix, and the block of each group that holds it.

    A full node is in the hash index. A tail has fewer tokens, no hash, and is only ever copied from.
    """

    __slots__ = (
        "block_hash", "block_ids", "child_keys", "children", "extra", "last_use_s", "num_users", "parent",
        "token_bytes",
    )  # fmt: skip

    def __init__(
        self, parent: PrefixNode | None, hash_: bytes, token_bytes: bytes, extra: bytes, num_groups: int
    ) -> None:
        self.parent = parent
        self.block_hash = hash_
        self.token_bytes = token_bytes
        self.extra = extra
        self.block_ids = [NO_BLOCK] * num_groups
        self.children: dict[NodeKey, PrefixNode] = {}
        self.child_keys: list[NodeKey] = []  # sorted: neighbours share the longest beginnings
        self.num_users = 0  # running sequences that continue this node
        self.last_use_s = 0.0  # when a request last took, computed or gave back its block

    @property
    def key(self) -> NodeKey:
        return self.token_bytes, self.extra

    @property
    def num_tokens(self) -> int:
        return len(self.token_bytes) // TOKEN_BYTES

    @property
    def is_cached(self) -> bool:
        """In every group, so that the whole block can be copied."""
        return NO_BLOCK not in self.block_ids


class MissReason(str, Enum):
    """Why the rest of a prompt was not cached."""

    NEVER_SEEN = "never_seen"  # nothing cached continues the matched tokens
    DIVERGED = "diverged"  # cached prompts go on with another token
    EVICTED = "evicted"  # it was cached and its block has been reused since
    SALT = "salt"  # cached, but under another cache_salt or adapter
    PARTIAL_BLOCK = "partial_block"  # it goes on inside a block that could not be copied
    DISABLED = "disabled"  # the cache is off, or the request bypasses it


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """`position` is the first prompt position that was not found, `prompt_token_id` the token there and
    `cached_token_id` the one that the nearest cached prompt has instead, when there is one.

    SALT tells that another tenant has sent the same tokens: for operators, not for the client.
    """

    reason: MissReason
    num_matched_tokens: int
    position: int = 0
    prompt_token_id: int | None = None
    cached_token_id: int | None = None


@dataclass(slots=True)
class PrefixCacheStats:
    """Counters over requests that asked the cache, each once, when it was first scheduled.

    Hits count tokens, copied parts of blocks included. A request that bypasses the cache is only in
    `num_misses[DISABLED]`.
    """

    num_queries: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_misses: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))


class PrefixCache:
    """Tree, hash index, and a memory of hashes that were evicted lately.

    The caller owns the blocks: it sets `PrefixNode.block_ids`, and clears them through `detach`. A node
    stays while it has a block, a child or a user.
    """

    def __init__(self, num_groups: int, block_size: int, namespace: str, max_evicted_hashes: int) -> None:
        self.block_size = block_size
        self._num_groups = num_groups
        self._namespace = namespace
        self._max_evicted_hashes = max_evicted_hashes
        self._roots: dict[bytes, PrefixNode] = {}
        self._index: dict[bytes, PrefixNode] = {}
        self._evicted: dict[bytes, None] = {}  # oldest first
        self._first_blocks: dict[NodeKey, int] = {}  # key of a first block -> roots that have it

    def __len__(self) -> int:
        return len(self._index)

    def root(self, extra: bytes) -> PrefixNode | None:
        """Where cached prompts with these extra keys (salt, adapter) start, if there are any."""
        return self._roots.get(extra)

    def make_root(self, extra: bytes) -> PrefixNode:
        root = self._roots.get(extra)
        if root is None:
            root = self._roots[extra] = PrefixNode(None, self.root_hash(extra), b"", extra, self._num_groups)
        return root

    def root_hash(self, extra: bytes) -> bytes:
        return block_hash.root_hash(self._namespace, self.block_size, extra)

    def find(self, parent: PrefixNode, hash_: bytes, token_bytes: bytes, extra: bytes) -> PrefixNode | None:
        """The full node with this hash, provided that it really continues `parent` with these tokens."""
        node = self._index.get(hash_)
        if node is None or not _is(node, parent, token_bytes, extra):
            return None
        return node

    def get(self, hash_: bytes) -> PrefixNode | None:
        """The full node with this hash, whatever its tokens."""
        return self._index.get(hash_)

    def add(self, parent: PrefixNode, hash_: bytes, token_bytes: bytes, extra: bytes) -> PrefixNode | None:
        """Find or make a full node; None when its hash already stands for something else."""
        self._evicted.pop(hash_, None)
        node = self._index.get(hash_)
        if node is not None:
            return node if _is(node, parent, token_bytes, extra) else None
        node = self._insert(PrefixNode(parent, hash_, token_bytes, extra, self._num_groups))
        self._index[hash_] = node
        if parent.parent is None:
            self._first_blocks[node.key] = self._first_blocks.get(node.key, 0) + 1
        return node

    def add_tail(self, parent: PrefixNode, token_bytes: bytes, extra: bytes) -> PrefixNode | None:
        """Make a node of fewer tokens than a block; None when a cached block begins with them already."""
        nearest, num_common = self.nearest(parent, token_bytes, extra)
        if nearest is not None and num_common * TOKEN_BYTES == len(token_bytes):
            return None
        return self._insert(PrefixNode(parent, b"", token_bytes, extra, self._num_groups))

    def nearest(self, parent: PrefixNode, token_bytes: bytes, extra: bytes) -> tuple[PrefixNode | None, int]:
        """The continuation of `parent` that shares the most first tokens, and how many they are."""
        best, most = None, -1
        index = bisect_left(parent.child_keys, (token_bytes, extra))
        for key in parent.child_keys[max(0, index - 1) : index + 1]:
            node = parent.children[key]
            num_common = _num_common_tokens(node.token_bytes, token_bytes) if node.extra == extra else 0
            if num_common > most:
                best, most = node, num_common
        return best, max(most, 0)

    def detach(self, node: PrefixNode, group: int) -> None:
        """The block of a group is gone; forget the node once nothing needs it."""
        node.block_ids[group] = NO_BLOCK
        if node.block_hash:
            self._evicted.pop(node.block_hash, None)
            self._evicted[node.block_hash] = None
            while len(self._evicted) > self._max_evicted_hashes:
                del self._evicted[next(iter(self._evicted))]
        self.prune(node)

    def prune(self, node: PrefixNode) -> None:
        """Remove the node, and then its parents, as far as nothing needs them."""
        while not node.children and not node.num_users and all(b == NO_BLOCK for b in node.block_ids):
            parent = node.parent
            if parent is None:
                self._roots.pop(node.extra, None)
                return
            del parent.children[node.key]
            del parent.child_keys[bisect_left(parent.child_keys, node.key)]
            if node.block_hash:
                del self._index[node.block_hash]
                if parent.parent is None:
                    self._first_blocks[node.key] -= 1
                    if not self._first_blocks[node.key]:
                        del self._first_blocks[node.key]
            node = parent

    def was_evicted(self, hash_: bytes) -> bool:
        return hash_ in self._evicted

    def is_first_block(self, token_bytes: bytes, extra: bytes) -> bool:
        """Whether a prompt starts with this block, under any salt and adapter."""
        return (token_bytes, extra) in self._first_blocks

    def roots(self) -> list[PrefixNode]:
        return list(self._roots.values())

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node, parents first, roots included."""
        for root in self.roots():
            yield from self.subtree(root)

    def subtree(self, node: PrefixNode) -> Iterator[PrefixNode]:
        """The node and all that continues it, parents first."""
        pending = [node]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(reversed(node.children.values()))

    def full_nodes(self) -> Iterator[tuple[bytes, PrefixNode]]:
        """The hash index."""
        return iter(self._index.items())

    def _insert(self, node: PrefixNode) -> PrefixNode:
        assert node.parent is not None
        node.parent.children[node.key] = node
        insort(node.parent.child_keys, node.key)
        return node


def _is(node: PrefixNode, parent: PrefixNode, token_bytes: bytes, extra: bytes) -> bool:
    return node.parent is parent and node.token_bytes == token_bytes and node.extra == extra


def _num_common_tokens(a: bytes, b: bytes) -> int:
    num_bytes = min(len(a), len(b))
    for start in range(0, num_bytes, TOKEN_BYTES):
        if a[start : start + TOKEN_BYTES] != b[start : start + TOKEN_BYTES]:
            return start // TOKEN_BYTES
    return num_bytes // TOKEN_BYTES
