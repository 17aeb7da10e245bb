"""Sizes of `quantize` that matter, what each costs, and how far a native result may be from the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagoda.runtime.forward_batch import Float32Array


class QuantizeInputs(NamedTuple):
    x: Float32Array


@dataclass(frozen=True, slots=True)
class QuantizeCase:
    num_tokens: int
    width: int
    # Largest error relative to the largest value: one step of 127, where a tie was rounded the other way.
    tolerance: float = 0.008

    @property
    def num_flops(self) -> int:
        """Counted as 6 per value: magnitude, comparison, scaling, rounding, and two sums."""
        return 6 * self.num_tokens * self.width

    @property
    def num_bytes(self) -> int:
        """Floats read, bytes and a scale a group written."""
        return self.num_tokens * (4 * self.width + self.width + 4 * self.width // 32)

    def make_inputs(self, seed: int = 0) -> QuantizeInputs:
        return QuantizeInputs(
            np.random.default_rng(seed).standard_normal((self.num_tokens, self.width), np.float32)
        )


CASES: tuple[QuantizeCase, ...] = tuple(QuantizeCase(3, width) for width in (32, 96, 576, 4864))

# What steps of real models run: one token and a full step, inputs of layers and of down projections.
STEP_CASES: tuple[QuantizeCase, ...] = tuple(
    QuantizeCase(num_tokens, width) for num_tokens in (1, 512) for width in (576, 1536, 4864)
)
