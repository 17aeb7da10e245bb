"""`ModelRunner`: the `Executor` that runs a compiled model. It keeps no state of any request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagoda.backends.base import CompiledModel
from pagoda.core.cost import KVCacheSpec
from pagoda.core.step import (
    BlockCopy,
    ModelOutput,
    PromptLogprob,
    SampledToken,
    SamplingInput,
    SchedulerOutput,
)
from pagoda.runtime.build_batch import build_forward_batch, check_forward_batch, num_prompt_logprob_rows
from pagoda.runtime.forward_batch import Float32Array, ForwardBatch
from pagoda.runtime.prompt_logprobs import prompt_logprobs
from pagoda.runtime.sampling_batch import build_sampling_batch, sampled_tokens


class ModelRunner:
    """Turns a `SchedulerOutput` into arrays, runs the model, samples, and hands back plain values.

    `check_batches` verifies every batch against invariants I5 and I6 before it runs (tests, debugging).
    """

    def __init__(
        self,
        model: CompiledModel,
        spec: KVCacheSpec,
        num_blocks: Sequence[int],
        *,
        check_batches: bool = False,
    ) -> None:
        self.model = model
        self._spec = spec
        self._num_blocks = tuple(num_blocks)
        self._check_batches = check_batches

    @property
    def num_blocks(self) -> tuple[int, ...]:
        return self._num_blocks

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.model.copy_blocks(copies)

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        if not step.requests:
            return ModelOutput({})
        batch = build_forward_batch(step, self._spec.block_size)
        if self._check_batches:
            check_forward_batch(batch, self._spec.block_size, self._num_blocks)
        logits = self.model.forward(batch)
        # Prompt log-probabilities come first: sampling may write to the logits.
        prompt = _prompt_logprobs(step, batch, logits)
        inputs = {r.request_id: r.sampling for r in step.requests if r.sampling is not None}
        if not inputs:
            return ModelOutput({}, prompt)
        if len(inputs) < len(logits):
            logits = logits[_sampled_rows(step, batch)]
        return ModelOutput(self._sample(logits, inputs), prompt)

    def _sample(self, logits: Float32Array, inputs: dict[str, SamplingInput]) -> dict[str, SampledToken]:
        rows = list(inputs.values())
        tokens = sampled_tokens(self.model.sample(logits, build_sampling_batch(rows)), rows)
        return dict(zip(inputs, tokens, strict=True))

    def close(self) -> None:
        """Give the model's memory back: nothing may refer to it any more, so this does not either."""
        self.model.close()
        del self.model


def _sampled_rows(step: SchedulerOutput, batch: ForwardBatch) -> NDArray[np.intp]:
    """Rows of the logits that are sampled, when others are there for prompt log-probabilities only."""
    samples = np.array([r.sampling is not None for r in step.requests])
    rows: NDArray[np.intp] = np.searchsorted(batch.logits_rows, batch.query_start_loc[1:][samples] - 1)
    return rows


def _prompt_logprobs(
    step: SchedulerOutput, batch: ForwardBatch, logits: Float32Array
) -> dict[str, tuple[PromptLogprob, ...]]:
    results = {}
    for r, first_row in zip(step.requests, batch.query_start_loc[:-1].tolist(), strict=True):
        if r.num_prompt_logprobs is not None:
            first = int(np.searchsorted(batch.logits_rows, first_row))
            results[r.request_id] = prompt_logprobs(r, logits[first : first + num_prompt_logprob_rows(r)])
    return results
