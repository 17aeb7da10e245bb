"""`ScriptedExecutor`: an executor for tests, which answers what a script says and checks what it is given.

Its KV cache holds token ids instead of keys and values. Whatever the control plane does to blocks (share,
copy, evict, preempt), each row must still find exactly its own history there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagoda.core.step import (
    BlockCopy,
    ModelOutput,
    PromptLogprob,
    SampledToken,
    SamplingInput,
    ScheduledRequest,
    SchedulerOutput,
)
from pagoda.kernels.sample.reference import sample
from pagoda.runtime.forward_batch import Float32Array
from pagoda.runtime.prompt_logprobs import prompt_logprobs
from pagoda.runtime.sampling_batch import build_sampling_batch, sampled_tokens

Choice: TypeAlias = int | Sequence[float] | NDArray[np.float32]
Script: TypeAlias = Sequence[Choice] | Mapping[str, Sequence[Choice]] | Callable[[Sequence[int]], Choice]

CHOSEN_LOGIT = 1e4  # over zeros: certain under every temperature, penalty and bias
EMPTY = -1


class ScriptedExecutor:
    """Answers from `script` through the real sampler, so that sampling parameters keep their meaning.

    `script` is one of
    - a sequence: entry i decides output token i of every request, and its last entry all later ones;
    - a mapping from request id to such a sequence;
    - a function of all token ids so far, prompt included.
    A decision is a token id, which wins unless it is forbidden, or logits [vocab_size].

    `before_step` runs first in every step; what it raises is what the step raises. `steps` holds what
    was executed.

    Raises (from `execute`):
        AssertionError: a block table does not lead to the request's own tokens, or a slot is written
            twice in a step.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        num_blocks: Sequence[int] = (64,),
        block_size: int = 16,
        before_step: Callable[[SchedulerOutput], None] | None = None,
    ) -> None:
        self._script = script
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._before_step = before_step
        self._slots = [array("i", [EMPTY]) * (n * block_size) for n in num_blocks]
        self.num_blocks = tuple(num_blocks)
        self.steps: list[SchedulerOutput] = []
        self.closed = False

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for group, source, target in copies:
            slots, size = self._slots[group], self._block_size
            slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        self.steps.append(step)
        if self._before_step is not None:
            self._before_step(step)
        self._write(step)
        rows: list[Float32Array] = []
        inputs: dict[str, SamplingInput] = {}
        prompt: dict[str, tuple[PromptLogprob, ...]] = {}
        for r in step.requests:
            if r.num_prompt_logprobs is not None:
                prompt[r.request_id] = self._prompt_logprobs(r)
            if r.sampling is None:
                continue
            history = array("i", [*r.sampling.prompt_token_ids, *r.sampling.output_token_ids])
            self._check_history(r, history)
            rows.append(self._logits(r.request_id, history, len(r.sampling.output_token_ids)))
            inputs[r.request_id] = r.sampling
        return ModelOutput(self._sample(rows, inputs), prompt)

    def close(self) -> None:
        self.closed = True

    def _sample(self, rows: list[Float32Array], inputs: dict[str, SamplingInput]) -> dict[str, SampledToken]:
        if not rows:
            return {}
        sampling = list(inputs.values())
        tokens = sampled_tokens(sample(np.stack(rows), build_sampling_batch(sampling)), sampling)
        return dict(zip(inputs, tokens, strict=True))

    def _write(self, step: SchedulerOutput) -> None:
        written: set[tuple[int, int]] = set()
        for r in step.requests:
            assert len(r.token_ids) > 0, f"{r.request_id} is scheduled without a token"
            for group, table in enumerate(r.block_tables):
                for position, token_id in enumerate(r.token_ids, r.start):
                    slot = self._slot(table, position)
                    assert (group, slot) not in written, f"slot {slot} of group {group} is written twice"
                    written.add((group, slot))
                    self._slots[group][slot] = token_id

    def _slot(self, table: Sequence[int], position: int) -> int:
        index, offset = divmod(position, self._block_size)
        assert index < len(table), f"position {position} lies beyond a table of {len(table)} blocks"
        assert table[index] >= 0, f"position {position} has no block"
        return table[index] * self._block_size + offset

    def _check_history(self, r: ScheduledRequest, history: Sequence[int]) -> None:
        end = r.start + len(r.token_ids)
        assert len(history) == end, f"{r.request_id} samples at {end} of {len(history)} tokens"
        for group, table in enumerate(r.block_tables):
            for position in range(end):
                if table[position // self._block_size] >= 0:  # behind a window there is nothing to find
                    found = self._slots[group][self._slot(table, position)]
                    assert found == history[position], (
                        f"{r.request_id} finds token {found} at position {position} of group {group}, "
                        f"where its own is {history[position]}"
                    )

    def _prompt_logprobs(self, r: ScheduledRequest) -> tuple[PromptLogprob, ...]:
        slots, table = self._slots[0], r.block_tables[0]
        end = r.start + len(r.token_ids) - (r.next_prompt_token_id is None)
        history = array("i", [slots[self._slot(table, position)] for position in range(end)])
        rows = [self._logits(r.request_id, history[: p + 1], 0) for p in range(r.start, end)]
        return prompt_logprobs(r, np.array(rows, dtype=np.float32).reshape(len(rows), self._vocab_size))

    def _logits(self, request_id: str, history: Sequence[int], output_number: int) -> Float32Array:
        if callable(self._script):
            choice = self._script(history)
        else:
            choices = self._script[request_id] if isinstance(self._script, Mapping) else self._script
            choice = choices[min(output_number, len(choices) - 1)]
        if not isinstance(choice, (int, np.integer)):
            row = np.array(choice, dtype=np.float32)
            assert row.shape == (self._vocab_size,), f"logits of shape {row.shape}"
            return row
        row = np.zeros(self._vocab_size, dtype=np.float32)
        row[choice] = CHOSEN_LOGIT
        return row
