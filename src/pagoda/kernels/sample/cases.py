"""Sizes of the sampler that matter, what each costs, and how far native log-probabilities may be off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagoda.runtime.forward_batch import Float32Array, SamplingBatch


class SampleInputs(NamedTuple):
    logits: Float32Array
    batch: SamplingBatch


@dataclass(frozen=True, slots=True)
class SampleCase:
    """Rows of bell-shaped logits with `num_likely` tokens that stand out, as a language model's do."""

    name: str
    vocab_size: int
    num_rows: int = 8
    num_likely: int = 40
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_history: int = 0
    num_logprobs: int = -1
    tolerance: float = 1e-6  # of log-probabilities: the rounding of one logarithm; token ids are exact

    @property
    def num_bytes(self) -> int:
        """Bytes that have to be read: each logit once."""
        return self.num_rows * self.vocab_size * 4

    @property
    def num_flops(self) -> int:
        """One comparison a logit, and about 25 operations for each weight that the filters need."""
        needs_all_weights = (self.temperature > 0 and self.top_k == 0) or self.num_logprobs >= 0
        return self.num_rows * self.vocab_size * (26 if needs_all_weights else 1)

    def make_inputs(self, seed: int = 0) -> SampleInputs:
        """Logits float32 [num_rows, vocab_size] and their batch."""
        rng = np.random.default_rng(seed)
        logits = rng.normal(0.0, 2.5, (self.num_rows, self.vocab_size)).astype(np.float32)
        for row in logits:
            likely = rng.choice(self.vocab_size, min(self.num_likely, self.vocab_size), replace=False)
            row[likely] += rng.gamma(2.0, 4.0, len(likely)).astype(np.float32)
        history = [
            np.sort(rng.choice(self.vocab_size, self.num_history, replace=False))
            for _ in range(self.num_rows)
        ]
        batch = make_batch(
            self.num_rows,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=1.1 if self.num_history else 1.0,
            seed=rng.integers(0, 2**64, self.num_rows, dtype=np.uint64),
            history=[{int(t): 1 for t in row} for row in history],
            num_logprobs=self.num_logprobs,
        )
        return SampleInputs(logits, batch)


CASES: tuple[SampleCase, ...] = (
    SampleCase("greedy-49k", 49152),
    SampleCase("greedy-262k", 262144),
    SampleCase("greedy-262k-penalties", 262144, num_history=1000),
    SampleCase("temperature-49k", 49152, temperature=0.8),
    SampleCase("temperature-262k", 262144, temperature=0.8),
    SampleCase("flat-151k", 151936, temperature=2.0, num_likely=0),
    SampleCase("top-k-262k", 262144, temperature=1.0, top_k=64, top_p=0.95),
    SampleCase("top-p-151k", 151936, temperature=0.7, top_p=0.9),
    SampleCase("min-p-151k", 151936, temperature=1.0, min_p=0.05),
    SampleCase("logprobs-49k", 49152, num_logprobs=20),
    SampleCase("odd-vocab", 32003, temperature=1.0, top_p=0.95, num_history=50),
)

# What steps sample: one stream and many, the vocabularies of SmolLM2 and Gemma 3.
STEP_CASES: tuple[SampleCase, ...] = (
    *(SampleCase("greedy", v, n) for v in (49152, 262144) for n in (1, 32)),
    *(SampleCase("temperature", v, n, temperature=0.8) for v in (49152, 262144) for n in (1, 32)),
    *(SampleCase("top-p", v, n, temperature=0.7, top_p=0.95) for v in (49152, 262144) for n in (1, 32)),
    *(
        SampleCase("top-k, top-p", v, n, temperature=1.0, top_k=64, top_p=0.95)
        for v in (49152, 262144)
        for n in (1, 32)
    ),
    SampleCase("penalties", 262144, 32, num_history=1000),
    SampleCase("logprobs", 262144, 32, num_logprobs=20),
)


def make_batch(
    num_rows: int,
    *,
    temperature: float | Float32Array = 1.0,
    top_k: int | NDArray[np.int32] = 0,
    top_p: float | Float32Array = 1.0,
    min_p: float | Float32Array = 0.0,
    repetition_penalty: float | Float32Array = 1.0,
    presence_penalty: float | Float32Array = 0.0,
    frequency_penalty: float | Float32Array = 0.0,
    seed: int | NDArray[np.uint64] = 0,
    counter: int | NDArray[np.uint64] = 0,
    history: Sequence[Mapping[int, int]] | None = None,
    bias: Sequence[Mapping[int, float]] | None = None,
    num_logprobs: int | NDArray[np.int32] = -1,
    allowed_mask: NDArray[np.uint32] | None = None,
) -> SamplingBatch:
    """A batch from one value for all rows or an array [num_rows] of each field.

    `history` holds for each row {token id: count in the output}, `bias` {token id: value}.
    """

    def per_row(value: object, dtype: type[np.generic]) -> NDArray[np.generic]:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(value, dtype), num_rows))

    def ragged(rows: Sequence[Mapping[int, float]] | None) -> tuple[object, object, list[float]]:
        filled = [{}] * num_rows if rows is None else rows
        start_loc = np.cumsum([0, *(len(row) for row in filled)]).astype(np.int32)
        token_ids = np.array([t for row in filled for t in row], np.int32)
        return start_loc, token_ids, [value for row in filled for value in row.values()]

    history_start_loc, history_token_ids, counts = ragged(history)
    bias_start_loc, bias_token_ids, values = ragged(bias)
    fields: dict[str, object] = {
        "temperature": per_row(temperature, np.float32),
        "top_k": per_row(top_k, np.int32),
        "top_p": per_row(top_p, np.float32),
        "min_p": per_row(min_p, np.float32),
        "repetition_penalty": per_row(repetition_penalty, np.float32),
        "presence_penalty": per_row(presence_penalty, np.float32),
        "frequency_penalty": per_row(frequency_penalty, np.float32),
        "seed": per_row(seed, np.uint64),
        "counter": per_row(counter, np.uint64),
        "history_start_loc": history_start_loc,
        "history_token_ids": history_token_ids,
        "history_output_counts": np.array(counts, np.int32),
        "bias_start_loc": bias_start_loc,
        "bias_token_ids": bias_token_ids,
        "bias_values": np.array(values, np.float32),
        "num_logprobs": per_row(num_logprobs, np.int32),
        "allowed_mask": allowed_mask,
    }
    return SamplingBatch(**fields)  # type: ignore[arg-type]
