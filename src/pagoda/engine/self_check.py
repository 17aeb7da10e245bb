"""One short step at load, so that a model which loads and answers nonsense is refused, not served."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from pagoda.backends.base import CompiledModel
from pagoda.core.cost import KVCacheSpec
from pagoda.core.step import ScheduledRequest, SchedulerOutput
from pagoda.errors import ModelFileError
from pagoda.runtime.build_batch import build_forward_batch

SENTENCE = "The capital of France is Paris, and the capital of"
MAX_TOKENS = 8
MIN_SPREAD = 1e-5  # of one row's logits; a random model of a few channels has more


def check_logits(model: CompiledModel, spec: KVCacheSpec, token_ids: Sequence[int]) -> None:
    """Run up to `MAX_TOKENS` tokens through the model; the first blocks of the pools hold their KV.

    Raises:
        ModelFileError: a logit is not finite, or a row's logits are all alike.
    """
    token_ids = array("i", token_ids[:MAX_TOKENS])
    num_blocks = -(-len(token_ids) // spec.block_size)
    request = ScheduledRequest(
        "self-check",
        0,
        token_ids,
        tuple(array("i", range(num_blocks)) for _ in spec.groups),
        sampling=None,
        num_prompt_logprobs=0,  # of every row, the last one too
        next_prompt_token_id=0,
    )
    logits = model.forward(build_forward_batch(SchedulerOutput((request,)), spec.block_size))
    hint = "the file may be damaged or badly converted; fetch or convert it again"
    if not np.isfinite(logits).all():
        raise ModelFileError("the model's logits are not finite numbers", hint=hint)
    spread = float((logits.max(axis=1) - logits.min(axis=1)).min())
    if spread < MIN_SPREAD:
        raise ModelFileError(
            f"the model's logits are flat: they differ by {spread:.1e} over the vocabulary, "
            "so every token is as likely as any other",
            hint=hint,
        )
