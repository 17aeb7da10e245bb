"""Sizes of `embed` that matter, what each costs, and how far a native result may be from the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagoda.kernels.linear.cases import random_weight
from pagoda.runtime.forward_batch import Int32Array
from pagoda.weights.tensor import Tensor, TensorType


class EmbedInputs(NamedTuple):
    token_ids: Int32Array
    weight: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class EmbedCase:
    num_tokens: int
    vocab_size: int
    width: int
    weight_type: TensorType = TensorType.Q8_0
    scale: float = 1.0
    tolerance: float = 1e-6  # largest error relative to the largest result

    @property
    def num_flops(self) -> int:
        return self.num_tokens * self.width

    @property
    def num_bytes(self) -> int:
        rows = self.num_tokens * self.width
        return self.weight_type.num_bytes(rows) + 4 * rows

    def make_inputs(self, seed: int = 0) -> EmbedInputs:
        """Random ids that include the first and the last of the vocabulary."""
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, self.vocab_size, self.num_tokens).astype(np.int32)
        ids[0], ids[-1] = 0, self.vocab_size - 1
        return EmbedInputs(
            ids, random_weight(self.weight_type, self.vocab_size, self.width, seed), self.scale
        )


CASES: tuple[EmbedCase, ...] = (
    # Every type, with a vocabulary that does not fill its last panel of 16 rows.
    *(EmbedCase(7, 1003, 256, t) for t in TensorType),
    EmbedCase(64, 4096, 576),
    EmbedCase(5, 301, 640, TensorType.Q8_0, scale=640**0.5),
    EmbedCase(1, 17, 896, TensorType.Q5_0),
)

# What steps of real models run: one token and a full step.
STEP_CASES: tuple[EmbedCase, ...] = tuple(
    EmbedCase(num_tokens, vocab_size, width, scale=scale)
    for num_tokens in (1, 512)
    for vocab_size, width, scale in ((49152, 576, 1.0), (151936, 896, 1.0), (262144, 640, 640**0.5))
)
