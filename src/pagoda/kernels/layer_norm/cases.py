"""Sizes of `layer_norm` that matter, what each costs, and how far a native result may be off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagoda.runtime.forward_batch import Float32Array


class LayerNormInputs(NamedTuple):
    x: Float32Array
    weight: Float32Array
    bias: Float32Array
    eps: float


@dataclass(frozen=True, slots=True)
class LayerNormCase:
    """Rows lie around `mean`; the further it is from 0, the more digits the variance loses."""

    num_tokens: int
    width: int
    mean: float = 0.0
    eps: float = 1e-5
    tolerance: float = 1e-5  # largest error relative to the largest result

    @property
    def num_flops(self) -> int:
        return 7 * self.num_tokens * self.width

    @property
    def num_bytes(self) -> int:
        return 4 * (2 * self.num_tokens + 2) * self.width

    def make_inputs(self, seed: int = 0) -> LayerNormInputs:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((self.num_tokens, self.width), np.float32) + np.float32(self.mean)
        weight, bias = rng.standard_normal((2, self.width), np.float32)
        return LayerNormInputs(x, weight, bias, self.eps)


CASES: tuple[LayerNormCase, ...] = (
    *(LayerNormCase(2, width) for width in (1, 2, 15, 16, 17, 96, 130, 768, 1600)),
    LayerNormCase(3, 768, mean=100.0, tolerance=1e-4),
)

# What steps of GPT-2 run: one token and a full step.
STEP_CASES: tuple[LayerNormCase, ...] = tuple(LayerNormCase(num_tokens, 768) for num_tokens in (1, 512))
