"""What a step of a model has to read and to multiply at least, and which share of the machine it reached."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.backends.cpu import FLOAT_TYPES
from pagoda.bench.kernels import Ceilings
from pagoda.core.cost import CPU_KV_DTYPE, KVCacheSpec
from pagoda.models import build_program
from pagoda.runtime.program import Linear, Logits
from pagoda.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class StepCost:
    """Bytes and operations of one model. Attention and row ops are not among the operations.

    `weight_bytes` are the matrices that each step reads, as the file stores them. `dots_per_token` are
    multiplications and additions of quantised layers, `dots_per_head_row` those of a quantised head for a row
    whose logits are wanted.
    """

    weight_bytes: int
    dots_per_token: int
    dots_per_head_row: int
    spec: KVCacheSpec

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> StepCost:
        layers: set[str] = set()
        heads: set[str] = set()
        for op in build_program(checkpoint.config).ops:
            if isinstance(op, Linear):
                layers.add(op.weight)
            elif isinstance(op, Logits):
                heads.add(op.weight)
        return cls(
            weight_bytes=sum(checkpoint.outlines[name].num_bytes for name in layers | heads),
            dots_per_token=sum(_num_dots(checkpoint, name) for name in layers),
            dots_per_head_row=sum(_num_dots(checkpoint, name) for name in heads),
            spec=checkpoint.config.kv_cache_spec(dtype=CPU_KV_DTYPE),
        )

    def share(
        self,
        ceilings: Ceilings,
        time_s: float,
        *,
        num_steps: int,
        num_tokens: int,
        num_head_rows: int,
        num_context_tokens: int,
        num_streams: int,
    ) -> tuple[float, str]:
        """The share of the machine that steps reached, and the ceiling that is nearest.

        `num_tokens` were computed in `num_steps` steps. Each step read the weights, and the KV of
        `num_streams` sequences of `num_context_tokens`.
        """
        kv_bytes = num_streams * self.spec.sequence_bytes(num_context_tokens)
        return ceilings.share(
            time_s,
            num_bytes=num_steps * (self.weight_bytes + kv_bytes),
            num_dots=num_tokens * self.dots_per_token + num_head_rows * self.dots_per_head_row,
        )


def _num_dots(checkpoint: Checkpoint, name: str) -> int:
    """Operations of one row; none of float layers, which the ceiling of byte dot products is not for."""
    tensor = checkpoint.outlines[name]
    rows, cols = tensor.shape
    return 0 if tensor.type in FLOAT_TYPES else 2 * rows * cols
