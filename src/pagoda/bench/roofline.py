"""What a step of a model has to read and to multiply at least, and which share of the machine it reached."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.backends.cpu import CPUBackend
from pagoda.backends.lowering import FLOAT_TYPES
from pagoda.bench.kernels import Ceilings
from pagoda.core.cost import KVCacheSpec
from pagoda.models import build_program
from pagoda.runtime.program import Experts, Linear, Logits
from pagoda.weights.checkpoint import Checkpoint
from pagoda.weights.tensor import TensorOutline


@dataclass(frozen=True, slots=True)
class StepCost:
    """Bytes and operations of one model. Attention and row ops are not among the operations.

    `weight_bytes` are the matrices that each step reads, as the file stores them; `expert_bytes` those of
    routed experts, of which a token reads `expert_share`. `dots_per_token` are multiplications and additions
    of quantised layers, `dots_per_head_row` those of a quantised head for a row whose logits are wanted.
    """

    weight_bytes: int
    expert_bytes: int
    expert_share: float
    dots_per_token: float
    dots_per_head_row: int
    spec: KVCacheSpec

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> StepCost:
        layers, heads, experts = set[str](), set[str](), set[str]()
        expert_share = 0.0
        for op in build_program(checkpoint.config).ops:
            match op:
                case Linear():
                    layers.add(op.weight)
                case Logits():
                    heads.add(op.weight)
                case Experts():
                    experts.update(op.gates, op.ups, op.downs)
                    expert_share = op.num_active / len(op.gates)
        tensors = {name: checkpoint.outlines[name] for name in layers | heads | experts}
        return cls(
            weight_bytes=sum(tensors[name].num_bytes for name in layers | heads),
            expert_bytes=sum(tensors[name].num_bytes for name in experts),
            expert_share=expert_share,
            dots_per_token=sum(_num_dots(tensors[name]) for name in layers)
            + expert_share * sum(_num_dots(tensors[name]) for name in experts),
            dots_per_head_row=sum(_num_dots(tensors[name]) for name in heads),
            spec=checkpoint.config.kv_cache_spec(dtype=CPUBackend.default_kv_dtype),
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
        `num_streams` sequences of `num_context_tokens`. Experts are taken to be read by one token each
        until all are.
        """
        kv_bytes = num_streams * self.spec.sequence_bytes(num_context_tokens)
        expert_bytes = self.expert_bytes * min(1.0, self.expert_share * num_tokens / num_steps)
        return ceilings.share(
            time_s,
            num_bytes=num_steps * (self.weight_bytes + expert_bytes + kv_bytes),
            num_dots=num_tokens * self.dots_per_token + num_head_rows * self.dots_per_head_row,
        )


def _num_dots(tensor: TensorOutline) -> int:
    """Operations of one row; none of float layers, which the ceiling of byte dot products is not for."""
    rows, cols = tensor.shape
    return 0 if tensor.type in FLOAT_TYPES else 2 * rows * cols
