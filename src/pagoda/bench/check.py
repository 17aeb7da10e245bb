"""Whether a model answers rightly before its speed is told: figures of a broken build look like speed."""

from __future__ import annotations

import math
from array import array

import numpy as np

from pagoda import machine
from pagoda.backends.reference import ReferenceBackend
from pagoda.core.step import ScheduledRequest, SchedulerOutput
from pagoda.engine.llm import LLM
from pagoda.engine.self_check import SENTENCE
from pagoda.errors import PagodaError
from pagoda.models import build_program
from pagoda.runtime.build_batch import build_forward_batch
from pagoda.sampling_params import SamplingParams
from pagoda.weights.checkpoint import Checkpoint, load_checkpoint

NUM_TOKENS = 32
MAX_GAP = 0.3  # how far a logit may be behind the best where rounding may have chosen


def check_answer(llm: LLM, path: str) -> str:
    """Compare a greedy answer with the reference backend, which computes in float32. Returns what was found.

    The reference reads the answer in one step: each of its tokens has to be the likeliest, or as good as.
    A model whose float32 weights would take more than half of the available memory is not checked.

    Raises:
        PagodaError: the answer is another.
    """
    with load_checkpoint(path) as checkpoint:
        shapes = build_program(checkpoint.config).weight_shapes().values()
        reference_bytes = sum(4 * math.prod(shape) for shape in shapes)
        if 2 * reference_bytes > machine.memory_available_bytes():
            return f"answers not checked: the reference needs {reference_bytes / 2**30:.1f} GiB of weights"
        assert llm.engine.tokenizer is not None
        prompt = llm.engine.tokenizer.encode(SENTENCE)
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        answer = list(llm.generate([prompt], params)[0].outputs[0].token_ids)
        logits = _reference_logits(checkpoint, [*prompt, *answer])[len(prompt) - 1 : -1]
    behind = logits.max(axis=1) - logits[np.arange(len(answer)), answer]
    if not (behind < MAX_GAP).all():
        place = int(np.argmax(~(behind < MAX_GAP)))
        raise PagodaError(
            f"wrong answer: token {place} of a greedy answer is {answer[place]}, whose logit is "
            f"{behind[place]:.2f} behind that of {int(logits[place].argmax())} in the reference backend"
        )
    return f"correct: {len(answer)} greedy tokens are the likeliest in float32, or within {MAX_GAP} of it"


def _reference_logits(
    checkpoint: Checkpoint, token_ids: list[int]
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Logits of every position, float32 [len(token_ids), vocab_size]."""
    spec = checkpoint.config.kv_cache_spec(dtype=ReferenceBackend.default_kv_dtype)
    num_blocks = [-(-len(token_ids) // spec.block_size)] * len(spec.groups)
    model = ReferenceBackend().compile(build_program(checkpoint.config), checkpoint, spec, num_blocks)
    request = ScheduledRequest(
        "check",
        0,
        array("i", token_ids),
        tuple(array("i", range(n)) for n in num_blocks),
        sampling=None,
        num_prompt_logprobs=0,  # of every row
        next_prompt_token_id=0,
    )
    logits = model.forward(build_forward_batch(SchedulerOutput((request,)), spec.block_size))
    model.close()
    return logits
