"""Sizes of `experts` that matter, what each costs, and how far a native result may be from the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagoda.kernels.linear.cases import random_weight
from pagoda.runtime.forward_batch import Float32Array
from pagoda.weights.tensor import Tensor, TensorType


class ExpertsInputs(NamedTuple):
    x: Float32Array
    router: Float32Array
    gates: list[Tensor]
    ups: list[Tensor]
    downs: list[Tensor]


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """`favourite`: scores of one expert are so high that every token goes there."""

    num_tokens: int
    num_experts: int
    num_active: int
    width: int = 64
    ffn_size: int = 96
    weight_type: TensorType = TensorType.F32
    normalised: bool = True
    favourite: int | None = None
    tolerance: float = 1e-5  # root mean square of the error relative to that of the result

    @property
    def num_flops(self) -> int:
        return 6 * self.num_tokens * self.num_active * self.width * self.ffn_size

    @property
    def num_bytes(self) -> int:
        """Every expert that can be used is read once."""
        used = min(self.num_experts, self.num_tokens * self.num_active)
        return used * self.weight_type.num_bytes(3 * self.width * self.ffn_size)

    def make_inputs(self, seed: int = 0) -> ExpertsInputs:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((self.num_tokens, self.width), np.float32)
        router = rng.standard_normal((self.num_tokens, self.num_experts), np.float32) * np.float32(2)
        if self.favourite is not None:
            router[:, self.favourite] += 20
        shapes = ((self.ffn_size, self.width), (self.ffn_size, self.width), (self.width, self.ffn_size))
        gates, ups, downs = (
            [random_weight(self.weight_type, *shape, seed + 10 * e + i) for e in range(self.num_experts)]
            for i, shape in enumerate(shapes)
        )
        return ExpertsInputs(x, router, gates, ups, downs)


CASES: tuple[ExpertsCase, ...] = (
    *(ExpertsCase(num_tokens, 8, 2) for num_tokens in (1, 2, 7, 33, 150)),
    ExpertsCase(5, 17, 3, normalised=False),
    ExpertsCase(4, 128, 8, width=32, ffn_size=32),
    ExpertsCase(9, 4, 4),
    ExpertsCase(9, 1, 1),
    ExpertsCase(70, 6, 2, favourite=5),
    # 17 and 40 do not fill a panel.
    ExpertsCase(6, 4, 2, width=40, ffn_size=17),
    ExpertsCase(33, 8, 2, weight_type=TensorType.Q4_0, tolerance=2e-2),
    ExpertsCase(6, 8, 2, width=256, ffn_size=512, weight_type=TensorType.Q4_K, tolerance=2e-2),
)

# What steps of Granite 3.1 1B-A400M run: one stream, a few, many, prefill.
STEP_CASES: tuple[ExpertsCase, ...] = tuple(
    ExpertsCase(m, 32, 8, width=1024, ffn_size=512, weight_type=TensorType.Q4_K, tolerance=2e-2)
    for m in (1, 4, 8, 64, 512)
)
