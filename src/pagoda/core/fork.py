"""Choices of one request share its prompt: one of them computes it, the others fork the blocks.

Whole blocks are shared and the partly filled one is copied before anybody writes to it (copy-on-write).
The last prompt token is left to each choice, because its row is what the first output token is sampled from.
Nothing here needs the prefix cache, so it works with caching off and for prompts shorter than a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pagoda.core.block_pool import BlockPool
from pagoda.core.block_table import SequenceBlocks
from pagoda.core.cost import KVCacheSpec
from pagoda.core.prefix_cache import PrefixCache, PrefixNode
from pagoda.core.request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class Fork:
    """The first `num_tokens` of another choice's sequence: `num_blocks` to share, and a rest to copy."""

    sequence: SequenceBlocks
    num_blocks: int
    num_tokens: int
    has_copy: bool

    def shared_blocks(self, group: int, first: int) -> Sequence[int]:
        return self.sequence.tables[group][first : self.num_blocks]

    def source_block(self, group: int) -> int:
        return self.sequence.tables[group][self.num_blocks]

    def chain_end(self) -> tuple[PrefixNode | None, int]:
        """The last shared block that is in the prefix cache, and how many blocks that makes."""
        node, depth = self.sequence.node, self.sequence.num_published
        while node is not None and depth > self.num_blocks:
            node, depth = node.parent, depth - 1
        return node, depth


class Forks:
    """Finds who has computed the prompt of a request's siblings.

    A choice that ends while others have not started leaves its prompt's blocks here for them. They go when
    the last has started or ended, or when a running request needs the room.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        pools: Sequence[BlockPool],
        cache: PrefixCache,
        sequences: Mapping[str, SequenceBlocks],
    ) -> None:
        self.kept: dict[int, SequenceBlocks] = {}  # by identity of the list of siblings
        self._spec = spec
        self._pools = pools
        self._cache = cache
        self._sequences = sequences

    def find(self, request: Request) -> Fork | None:
        """All of the prompt that `request` has not to compute itself, when a sibling has computed it."""
        num_tokens = self._num_shareable(request)
        if num_tokens == 0:
            return None
        for sibling, sequence in self._running(request):
            if self._has_computed(sibling, sequence, num_tokens) and self._covers(sequence, num_tokens):
                return self._fork(sequence, num_tokens)
        kept = self.kept.get(id(request.siblings))
        return None if kept is None else self._fork(kept, num_tokens)

    def is_coming(self, request: Request) -> bool:
        """Whether a sibling is computing the prompt right now."""
        num_tokens = self._num_shareable(request)
        return num_tokens > 0 and any(
            not self._has_computed(sibling, sequence, num_tokens)
            for sibling, sequence in self._running(request)
        )

    def are_wanted(self, request: Request) -> bool:
        """Whether a sibling has not started yet."""
        return any(s.status is RequestStatus.WAITING for s in request.siblings if s is not request)

    def keep(self, request: Request, sequence: SequenceBlocks) -> bool:
        """Take over the prompt's blocks of a request that ends, if a sibling is going to need them.

        The rest of its blocks is given back. False, and nothing has changed, when nobody needs them.
        """
        num_prompt = request.num_prompt_tokens
        if (
            num_prompt < 2
            or request.num_computed_tokens < num_prompt
            or id(request.siblings) in self.kept
            or not self.are_wanted(request)
            or not self._covers(sequence, num_prompt - 1)
            or any(self._has_computed(*other, num_prompt) for other in self._running(request))
        ):
            return False
        num_blocks = -(-num_prompt // self._spec.block_size)
        for group, (pool, table) in enumerate(zip(self._pools, sequence.tables, strict=True)):
            first = max(num_blocks, sequence.first_blocks[group])
            for index in range(len(table) - 1, first - 1, -1):
                pool.release(table[index])
        # A step that is under way still reads the tables it was given: cut copies, not those.
        sequence.tables = tuple(table[:num_blocks] for table in sequence.tables)
        self.kept[id(request.siblings)] = sequence
        return True

    def release_unwanted(self, request: Request) -> None:
        """The request has started or ended: it may have been the last that needed its siblings' prompt."""
        if id(request.siblings) in self.kept and not self.are_wanted(request):
            self._release(id(request.siblings))

    def release_all(self) -> bool:
        """Make room; False when there was nothing to give. Siblings look elsewhere, or compute again."""
        kept = list(self.kept)
        for key in kept:
            self._release(key)
        return bool(kept)

    def _release(self, key: int) -> None:
        sequence = self.kept.pop(key)
        for group, (pool, table) in enumerate(zip(self._pools, sequence.tables, strict=True)):
            for index in range(len(table) - 1, sequence.first_blocks[group] - 1, -1):
                pool.release(table[index])
        if sequence.node is not None:
            sequence.node.num_users -= 1
            self._cache.prune(sequence.node)

    def _num_shareable(self, request: Request) -> int:
        """Prompt tokens a sibling could have computed for it. Rows of prompt logprobs have to be computed."""
        if len(request.siblings) < 2 or request.needs_prompt_logprobs:
            return 0
        return min(request.num_prompt_tokens, request.num_tokens - 1)

    def _running(self, request: Request) -> Iterator[tuple[Request, SequenceBlocks]]:
        for sibling in request.siblings:
            if sibling.status is RequestStatus.RUNNING and sibling is not request:
                yield sibling, self._sequences[sibling.request_id]

    def _has_computed(self, sibling: Request, sequence: SequenceBlocks, num_tokens: int) -> bool:
        return sequence.has_run and sibling.num_computed_tokens >= num_tokens

    def _covers(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """Whether no window has let go of a block that the next query still sees."""
        return all(
            first <= self._spec.first_visible_block(group, num_tokens)
            for group, first in enumerate(sequence.first_blocks)
        )

    def _fork(self, sequence: SequenceBlocks, num_tokens: int) -> Fork:
        num_blocks, num_rest = divmod(num_tokens, self._spec.block_size)
        return Fork(sequence, num_blocks, num_tokens, num_rest > 0)
