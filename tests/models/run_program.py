"""Drive a compiled model from token ids, on any backend, the way the engine would but in any order.

    paged = PagedModel.compile(backend, program, weights, num_tokens=300)
    logits = run_chunked(paged, [prompt_a, prompt_b], chunk=7)       # one [num_tokens, vocab] a prompt
    answers = greedy(paged, [prompt_a], num_new_tokens=64, chunk=16)

Physical blocks are handed out in random order, and windowed groups give back what falls behind their
window, so a backend that ignores its block table or reads a block it let go gives other logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pagoda.backends.base import Backend, CompiledModel
from pagoda.core.cost import KVCacheSpec
from pagoda.runtime.forward_batch import Float32Array, ForwardBatch, Int32Array
from pagoda.runtime.program import Program
from pagoda.weights.tensor import WeightSource


@dataclass
class RunningSequence:
    """One request's tokens in the KV cache, and its block table of each layer group."""

    num_computed_tokens: int = 0
    block_tables: list[list[int]] = field(default_factory=list)


class Chunk(NamedTuple):
    """Tokens to compute next for a sequence, and which of their rows need logits."""

    sequence: RunningSequence
    token_ids: Sequence[int]
    logits: str = "all"  # "all", "last" or "none"


class PagedModel:
    """A compiled model plus the block tables of the sequences that run on it."""

    def __init__(
        self, model: CompiledModel, spec: KVCacheSpec, num_blocks: Sequence[int], *, seed: int = 0
    ) -> None:
        self.model = model
        self.spec = spec
        rng = np.random.default_rng(seed)
        self.free_blocks = [rng.permutation(n).tolist() for n in num_blocks]

    @classmethod
    def compile(
        cls,
        backend: Backend,
        program: Program,
        weights: WeightSource,
        *,
        num_tokens: int,
        block_size: int = 16,
        kv_dtype: str | None = None,
        seed: int = 0,
    ) -> PagedModel:
        """Compile with KV for about `num_tokens`, over all running sequences, in the backend's type."""
        dtype = kv_dtype or backend.default_kv_dtype
        spec = program.config.kv_cache_spec(block_size=block_size, dtype=dtype)
        num_blocks = [-(-num_tokens // block_size) + 40 for _ in spec.groups]
        return cls(backend.compile(program, weights, spec, num_blocks), spec, num_blocks, seed=seed)

    def start(self) -> RunningSequence:
        return RunningSequence(block_tables=[[] for _ in self.spec.groups])

    def finish(self, sequence: RunningSequence) -> None:
        """Give a sequence's blocks back, for others to reuse as they are."""
        for free, table in zip(self.free_blocks, sequence.block_tables, strict=True):
            free.extend(block for block in table if block >= 0)
            table.clear()
        sequence.num_computed_tokens = 0

    def step(self, chunks: Sequence[Chunk]) -> list[Float32Array]:
        """One forward pass over all chunks. Returns each chunk's logits [its wanted rows, vocab]."""
        for chunk in chunks:
            self._allocate(chunk)
        batch, rows_per_chunk = self._batch(chunks)
        logits = self.model.forward(batch).copy()
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += len(chunk.token_ids)
        ends = np.cumsum(rows_per_chunk).tolist()
        return [logits[end - rows : end] for end, rows in zip(ends, rows_per_chunk, strict=True)]

    def _allocate(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        end = sequence.num_computed_tokens + len(chunk.token_ids)
        for group, free, table in zip(self.spec.groups, self.free_blocks, sequence.block_tables, strict=True):
            if group.window is not None:
                first_visible = max(0, sequence.num_computed_tokens - group.window + 1)
                for index in range(min(first_visible // self.spec.block_size, len(table))):
                    if table[index] >= 0:
                        free.insert(0, table[index])
                        table[index] = -1
            while len(table) * self.spec.block_size < end:
                table.append(free.pop())

    def _batch(self, chunks: Sequence[Chunk]) -> tuple[ForwardBatch, list[int]]:
        lengths = [len(c.token_ids) for c in chunks]
        starts = [c.sequence.num_computed_tokens for c in chunks]
        query_start_loc = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths, strict=True)])
        wanted = [
            {"all": n, "last": min(n, 1), "none": 0}[c.logits] for c, n in zip(chunks, lengths, strict=True)
        ]
        rows = [end - n + np.arange(n) for end, n in zip(query_start_loc[1:], wanted, strict=True)]
        tables, slots = [], []
        for g in range(len(self.spec.groups)):
            own = [np.asarray(c.sequence.block_tables[g]) for c in chunks]
            table = np.full((len(chunks), max(len(t) for t in own)), -1)
            for row, blocks in zip(table, own, strict=True):
                row[: len(blocks)] = blocks
            block_of_token = table[
                np.repeat(np.arange(len(chunks)), lengths), positions // self.spec.block_size
            ]
            tables.append(_int32(table))
            slots.append(_int32(block_of_token * self.spec.block_size + positions % self.spec.block_size))
        batch = ForwardBatch(
            token_ids=_int32(np.concatenate([np.asarray(c.token_ids) for c in chunks])),
            positions=_int32(positions),
            query_start_loc=_int32(query_start_loc),
            seq_lens=_int32(np.add(starts, lengths)),
            block_tables=tuple(tables),
            slot_mapping=tuple(slots),
            logits_rows=_int32(np.concatenate(rows)),
        )
        return batch, wanted


def _int32(values: object) -> Int32Array:
    return np.ascontiguousarray(values, dtype=np.int32)


def run_chunked(
    paged: PagedModel, prompts: Sequence[Sequence[int]], chunk: int | None = None, *, alone: bool = False
) -> list[Float32Array]:
    """Logits of every position of every prompt, `chunk` tokens of each a step (None: all at once).

    The prompts share each step, unless `alone`: then they run one after the other. Prompts of different
    lengths mix chunks in the middle of a prompt with single tokens.
    """
    if alone:
        return [run_chunked(paged, [prompt], chunk)[0] for prompt in prompts]
    sequences = [paged.start() for _ in prompts]
    parts: list[list[Float32Array]] = [[] for _ in prompts]
    while True:
        pending = [
            (i, Chunk(s, p[s.num_computed_tokens :][: chunk or len(p)]))
            for i, (s, p) in enumerate(zip(sequences, prompts, strict=True))
            if s.num_computed_tokens < len(p)
        ]
        if not pending:
            break
        for (i, _), logits in zip(pending, paged.step([c for _, c in pending]), strict=True):
            parts[i].append(logits)
    for sequence in sequences:
        paged.finish(sequence)
    return [np.concatenate(p) for p in parts]


def greedy(
    paged: PagedModel, prompts: Sequence[Sequence[int]], num_new_tokens: int, chunk: int | None = None
) -> list[list[int]]:
    """The most likely continuation of each prompt (ties: lowest id), all prompts decoding together."""
    sequences = [paged.start() for _ in prompts]
    answers: list[list[int]] = []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        logits: list[Float32Array] = []
        for start in range(0, len(prompt), chunk or len(prompt)):
            logits = paged.step([Chunk(sequence, prompt[start : start + (chunk or len(prompt))], "last")])
        answers.append([int(logits[0][-1].argmax())])
    for _ in range(num_new_tokens - 1):
        steps = paged.step([Chunk(s, a[-1:], "last") for s, a in zip(sequences, answers, strict=True)])
        for answer, row in zip(answers, steps, strict=True):
            answer.append(int(row[-1].argmax()))
    for sequence in sequences:
        paged.finish(sequence)
    return answers
