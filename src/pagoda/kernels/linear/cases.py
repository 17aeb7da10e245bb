"""Sizes of `linear` that matter, what each costs, and how far a native result may be from the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagoda.runtime.forward_batch import Float32Array
from pagoda.weights.tensor import Tensor, TensorType

# Where a block holds its half-precision scale and, if it has one, its minimum.
_SCALE_BYTES = {
    TensorType.Q4_0: (0, None),
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_0: (0, None),
    TensorType.Q5_1: (0, 2),
    TensorType.Q8_0: (0, None),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208, None),
    TensorType.IQ4_NL: (0, None),
    TensorType.IQ4_XS: (0, None),
}


class LinearInputs(NamedTuple):
    x: Float32Array
    weight: Tensor
    bias: Float32Array | None
    residual: Float32Array | None


@dataclass(frozen=True, slots=True)
class LinearCase:
    num_tokens: int
    inputs: int
    outputs: int
    weight_type: TensorType = TensorType.Q4_1
    has_bias: bool = False
    has_residual: bool = False

    @property
    def num_flops(self) -> int:
        return 2 * self.num_tokens * self.inputs * self.outputs

    @property
    def num_bytes(self) -> int:
        """Weights as the file stores them, activations read once and results written once."""
        activations = self.num_tokens * (self.inputs + self.outputs * (2 if self.has_residual else 1))
        return self.weight_type.num_bytes(self.inputs * self.outputs) + 4 * activations

    @property
    def tolerance(self) -> float:
        """Largest root mean square of the error over that of the result, with activations in 8 bits.

        Groups of 32 normal values rounded to 8 bits are off by 0.6 % of their own size; a type of 16 bits or
        more may round activations to 16 bits instead and stays under the same bound.
        """
        return 0.01

    def make_inputs(self, seed: int = 0) -> LinearInputs:
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> Float32Array:
            return rng.standard_normal(shape, np.float32)

        return LinearInputs(
            normal(self.num_tokens, self.inputs),
            random_weight(self.weight_type, self.outputs, self.inputs, seed),
            normal(self.outputs) if self.has_bias else None,
            normal(self.num_tokens, self.outputs) if self.has_residual else None,
        )


def random_weight(type: TensorType, outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """A weight of random blocks: every bit pattern of the integers, scales small and positive."""
    rng = np.random.default_rng(seed)
    if type in (TensorType.F32, TensorType.F16, TensorType.BF16):
        values = rng.standard_normal(outputs * inputs, np.float32)
        data = (
            (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
            if type is TensorType.BF16
            else values.astype(np.float16 if type is TensorType.F16 else np.float32)
        ).view(np.uint8)
    elif type is TensorType.MXFP4:
        blocks = rng.integers(0, 256, (outputs * inputs // 32, type.block_bytes), np.uint8)
        blocks[:, 0] = rng.integers(118, 122, len(blocks))  # exponents: scales of 2^-10 to 2^-7
        data = blocks.reshape(-1)
    else:
        scale_byte, minimum_byte = _SCALE_BYTES[type]
        num_blocks = outputs * inputs // type.block_elements
        blocks = rng.integers(0, 256, (num_blocks, type.block_bytes), np.uint8)
        scales = rng.uniform(0.002, 0.01, num_blocks).astype(np.float16)
        blocks[:, scale_byte : scale_byte + 2] = scales.view(np.uint8).reshape(-1, 2)
        if minimum_byte is not None:
            # K-quants subtract their minimum, the legacy types add it; either way values straddle zero.
            sign = 1 if type in (TensorType.Q4_K, TensorType.Q5_K) else -1
            middle = sign * scales * (8 if type in (TensorType.Q4_1, TensorType.Q4_K) else 16)
            blocks[:, minimum_byte : minimum_byte + 2] = (
                middle.astype(np.float16).view(np.uint8).reshape(-1, 2)
            )
        data = blocks.reshape(-1)
    return Tensor("weight", type, (outputs, inputs), data)


CASES: tuple[LinearCase, ...] = (
    # Every type, rows that do not fill a panel of 16, both fusions.
    *(LinearCase(3, 256, 40, t, has_bias=True, has_residual=True) for t in TensorType),
    # Token counts around a tile of 8, as in decode, small batches and prefill.
    *(LinearCase(m, 576, 192) for m in (1, 2, 7, 8, 9, 33)),
    # The layers of a 135M model (576 wide, 1536 in the middle) and of a 0.5B one (896, 4864).
    LinearCase(1, 576, 1536),
    LinearCase(64, 1536, 576, has_residual=True),
    LinearCase(1, 896, 1152, TensorType.Q5_0, has_bias=True),
    LinearCase(5, 4864, 896, TensorType.Q6_K, has_residual=True),
    # A head whose vocabulary does not fill its last panel.
    LinearCase(1, 576, 8197, TensorType.Q8_0),
    # The narrowest layer that a block of 32 allows, one output row.
    LinearCase(2, 32, 1, TensorType.Q8_0),
)

# One type for each way in which packed weights lie in memory.
_PACKED_TYPES = (
    TensorType.Q4_1,
    TensorType.Q5_0,
    TensorType.Q8_0,
    TensorType.Q4_K,
    TensorType.Q5_K,
    TensorType.Q6_K,
    TensorType.F16,
    TensorType.BF16,
    TensorType.F32,
)


def _layer_shapes(type: TensorType) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs in SmolLM2-135M and Qwen2.5-0.5B: K-quants need a multiple of 256 inputs."""
    shapes = ((576, 1536), (896, 4864))
    return shapes if type.block_elements <= 32 else tuple((o, i) for i, o in shapes)


# What steps of real models run: decode, a few streams, many, prefill; and heads.
STEP_CASES: tuple[LinearCase, ...] = (
    *(
        LinearCase(m, inputs, outputs, t)
        for t in _PACKED_TYPES
        for inputs, outputs in _layer_shapes(t)
        for m in (1, 4, 8, 64, 512)
    ),
    *(LinearCase(m, 576, 49152, TensorType.Q8_0) for m in (1, 8, 32)),
    *(LinearCase(m, 896, 151936, TensorType.Q8_0) for m in (1, 8)),
)
