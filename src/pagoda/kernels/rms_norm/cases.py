"""Sizes of `rms_norm` that matter, what each costs, and how far a native result may be from the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagoda.runtime.forward_batch import Float32Array


class RMSNormInputs(NamedTuple):
    x: Float32Array
    weight: Float32Array
    eps: float


@dataclass(frozen=True, slots=True)
class RMSNormCase:
    """`run_width` columns are normalised together: the row, or one head of it (QK-norm)."""

    num_tokens: int
    width: int
    run_width: int
    eps: float = 1e-5
    magnitude: float = 1.0
    tolerance: float = 1e-5  # largest error relative to the largest result

    @property
    def num_flops(self) -> int:
        return 4 * self.num_tokens * self.width

    @property
    def num_bytes(self) -> int:
        return 4 * (2 * self.num_tokens * self.width + self.run_width)

    def make_inputs(self, seed: int = 0) -> RMSNormInputs:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((self.num_tokens, self.width), np.float32) * np.float32(self.magnitude)
        return RMSNormInputs(x, rng.uniform(0.5, 1.5, self.run_width).astype(np.float32), self.eps)


CASES: tuple[RMSNormCase, ...] = (
    # Widths that leave a tail after vectors of 16.
    *(RMSNormCase(2, width, width) for width in (1, 15, 16, 17, 40, 130, 576, 896)),
    # QK-norm: the runs are heads.
    *(RMSNormCase(3, 4 * head_dim, head_dim) for head_dim in (40, 64, 80, 96, 112, 128, 256)),
    RMSNormCase(64, 2048, 2048, eps=1e-6),
    # eps decides when values vanish; outlier channels of real models reach thousands.
    RMSNormCase(2, 576, 576, magnitude=1e-4),
    RMSNormCase(2, 576, 576, magnitude=1e4),
)

# What steps of real models run: one token and a full step, hidden sizes and heads.
STEP_CASES: tuple[RMSNormCase, ...] = tuple(
    RMSNormCase(num_tokens, width, run_width)
    for num_tokens in (1, 512)
    for width, run_width in ((576, 576), (896, 896), (2048, 2048), (1024, 256))
)
