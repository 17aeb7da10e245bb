"""Sizes of `gated` that matter, what each costs, and how far a native result may be from the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagoda.kernels.activation.reference import ActivationKind
from pagoda.runtime.forward_batch import Float32Array


class GatedInputs(NamedTuple):
    gate: Float32Array
    up: Float32Array
    kind: ActivationKind


@dataclass(frozen=True, slots=True)
class GatedCase:
    num_tokens: int
    width: int
    kind: ActivationKind = "silu"
    magnitude: float = 3.0
    tolerance: float = 1e-5  # largest error relative to the largest result

    @property
    def num_flops(self) -> int:
        """Counted as 10 per value, of which most are the exponential."""
        return 10 * self.num_tokens * self.width

    @property
    def num_bytes(self) -> int:
        return 4 * 3 * self.num_tokens * self.width

    def make_inputs(self, seed: int = 0) -> GatedInputs:
        rng = np.random.default_rng(seed)
        gate, up = rng.standard_normal((2, self.num_tokens, self.width), np.float32)
        return GatedInputs(gate * np.float32(self.magnitude), up, self.kind)


CASES: tuple[GatedCase, ...] = (
    *(GatedCase(2, width, "silu") for width in (1, 15, 16, 17, 96, 130, 1536, 4864)),
    *(GatedCase(2, width, "gelu_tanh") for width in (1, 15, 16, 17, 130, 2048)),
    # Beyond 88 a float32 exponential overflows; the activation must not.
    GatedCase(2, 130, "silu", magnitude=1000.0),
    GatedCase(2, 130, "gelu_tanh", magnitude=1000.0),
)

# What steps of real models run: one token and a full step.
STEP_CASES: tuple[GatedCase, ...] = tuple(
    case
    for num_tokens in (1, 512)
    for case in (
        GatedCase(num_tokens, 1536),
        GatedCase(num_tokens, 4864),
        GatedCase(num_tokens, 2048, "gelu_tanh"),
    )
)
