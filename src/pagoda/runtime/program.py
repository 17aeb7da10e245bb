"""`Program`: a model as a flat list of about a dozen ops, recorded by running its Python function once.

A value is a float32 matrix [num_tokens, width]; ops name values by index. The numpy backend is the
meaning of a program, and every other backend has to agree with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from pagoda.models.config import ModelConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class Value:
    """Index of a matrix [num_tokens, width] within one program."""

    index: int
    width: int


@dataclass(frozen=True, slots=True)
class Embed:
    """out = weight[token_ids] * scale"""

    out: Value
    weight: str
    scale: float


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """out = x / sqrt(mean(x^2) + eps) * weight, over each run of `width` columns (Zhang & Sennrich 2019).

    `width` is the row, or the head dim for QK-norm.
    """

    x: Value
    out: Value
    weight: str
    eps: float
    width: int


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, over rows (Ba et al. 2016)."""

    x: Value
    out: Value
    weight: str
    bias: str
    eps: float


@dataclass(frozen=True, slots=True)
class AddPosition:
    """out = x + weight[positions], for models that learned an embedding of each position."""

    x: Value
    out: Value
    weight: str


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x @ weight.T + bias + residual; weight is (outputs, inputs)."""

    x: Value
    out: Value
    weight: str
    bias: str | None
    residual: Value | None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate the first `rotary_dim` columns of each head by the token's position."""

    x: Value
    out: Value
    head_dim: int
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class Attention:
    """Write k and v to the KV cache, then attend over the cache through the block table.

    score = softcap(scale * q . k), causal, over the latest `window` positions; query head h reads KV head
    h * num_kv_heads // num_heads, which covers MHA, GQA and MQA.
    """

    q: Value
    k: Value
    v: Value
    out: Value
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """out = activation(gate) * up; "silu" is SwiGLU, "gelu_tanh" is GeGLU (Shazeer 2020)."""

    gate: Value
    up: Value
    out: Value
    kind: Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Add:
    a: Value
    b: Value
    out: Value


@dataclass(frozen=True, slots=True)
class Scale:
    """out = x * factor"""

    x: Value
    out: Value
    factor: float


@dataclass(frozen=True, slots=True)
class Activation:
    """out = activation(x), in feed-forward layers without a gate."""

    x: Value
    out: Value
    kind: Literal["gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Experts:
    """Feed-forward of the best few experts of each token (Shazeer et al. 2017, Jiang et al. 2024).

    p = softmax(router); the `num_active` largest (ties: lowest index) are kept and, if `normalised`, divided
    by their sum; out = sum over them, largest first, of p_e * down_e @ (silu(gate_e @ x) * (up_e @ x)).
    Each of gates, ups and downs names one weight an expert.
    """

    x: Value
    router: Value  # [num_tokens, number of experts]
    out: Value
    gates: tuple[str, ...]
    ups: tuple[str, ...]
    downs: tuple[str, ...]
    ffn_size: int
    num_active: int
    normalised: bool


@dataclass(frozen=True, slots=True)
class Logits:
    """The result: softcap(x[logits_rows] @ weight.T), only for rows whose logits are needed."""

    x: Value
    weight: str
    softcap: float | None


Op: TypeAlias = (
    Embed
    | AddPosition
    | RMSNorm
    | LayerNorm
    | Linear
    | Rope
    | Attention
    | GatedActivation
    | Activation
    | Experts
    | Add
    | Scale
    | Logits
)


def inputs_of(op: Op) -> list[Value]:
    """The values that an op reads."""
    named = ((field.name, getattr(op, field.name)) for field in fields(op))
    return [value for name, value in named if isinstance(value, Value) and name != "out"]


@dataclass(frozen=True, slots=True)
class Program:
    config: ModelConfig
    ops: tuple[Op, ...]
    num_values: int

    def weight_names(self) -> Iterator[str]:
        """Every tensor the program reads, in order of first use, without repeats."""
        return iter(self.weight_shapes())

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the program reads, by name, in order of first use."""
        vocab_size = self.config.vocab_size
        shapes: dict[str, tuple[int, ...]] = {}
        for op in self.ops:
            if isinstance(op, Embed):
                shapes[op.weight] = (vocab_size, op.out.width)
            elif isinstance(op, RMSNorm):
                shapes[op.weight] = (op.width,)
            elif isinstance(op, LayerNorm):
                shapes[op.weight] = shapes[op.bias] = (op.x.width,)
            elif isinstance(op, AddPosition):
                shapes[op.weight] = (self.config.max_position, op.out.width)
            elif isinstance(op, Experts):
                shapes |= dict.fromkeys((*op.gates, *op.ups), (op.ffn_size, op.x.width))
                shapes |= dict.fromkeys(op.downs, (op.out.width, op.ffn_size))
            elif isinstance(op, Linear):
                shapes[op.weight] = (op.out.width, op.x.width)
                if op.bias is not None:
                    shapes[op.bias] = (op.out.width,)
            elif isinstance(op, Logits):
                shapes[op.weight] = (vocab_size, op.x.width)
        return shapes


def last_uses(program: Program) -> dict[int, int]:
    """Index of the last op that reads each value, by index of the value."""
    return {value.index: i for i, op in enumerate(program.ops) for value in inputs_of(op)}


class ProgramBuilder:
    """Records ops. Methods read like eager code and return the value that the op writes."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._ops: list[Op] = []
        self._num_values = 0

    def _value(self, width: int) -> Value:
        value = Value(self._num_values, width)
        self._num_values += 1
        return value

    def embed(self, weight: str, *, scale: float = 1.0) -> Value:
        out = self._value(self.config.hidden_size)
        self._ops.append(Embed(out, weight, scale))
        return out

    def rms_norm(self, x: Value, weight: str, *, head_dim: int | None = None) -> Value:
        out = self._value(x.width)
        self._ops.append(RMSNorm(x, out, weight, self.config.norm_eps, head_dim or x.width))
        return out

    def layer_norm(self, x: Value, weight: str, bias: str) -> Value:
        out = self._value(x.width)
        self._ops.append(LayerNorm(x, out, weight, bias, self.config.norm_eps))
        return out

    def add_position(self, x: Value, weight: str) -> Value:
        out = self._value(x.width)
        self._ops.append(AddPosition(x, out, weight))
        return out

    def linear(
        self,
        x: Value,
        weight: str,
        width: int,
        *,
        bias: str | None = None,
        residual: Value | None = None,
    ) -> Value:
        out = self._value(width)
        self._ops.append(Linear(x, out, weight, bias, residual))
        return out

    def rope(self, x: Value, *, layer: int) -> Value:
        out = self._value(x.width)
        self._ops.append(Rope(x, out, self.config.head_dim, self.config.ropes[layer]))
        return out

    def attention(self, q: Value, k: Value, v: Value, *, layer: int) -> Value:
        c = self.config
        out = self._value(q.width)
        self._ops.append(
            Attention(
                q, k, v, out, layer, c.num_heads, c.num_kv_heads, c.head_dim,
                c.attention_scale, c.windows[layer], c.attention_softcap,
            )
        )  # fmt: skip
        return out

    def gated(self, gate: Value, up: Value, kind: Literal["silu", "gelu_tanh"]) -> Value:
        out = self._value(gate.width)
        self._ops.append(GatedActivation(gate, up, out, kind))
        return out

    def add(self, a: Value, b: Value) -> Value:
        out = self._value(a.width)
        self._ops.append(Add(a, b, out))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        """x * factor; nothing is recorded where that is x."""
        if factor == 1.0:
            return x
        out = self._value(x.width)
        self._ops.append(Scale(x, out, factor))
        return out

    def activation(self, x: Value, kind: Literal["gelu_tanh"]) -> Value:
        out = self._value(x.width)
        self._ops.append(Activation(x, out, kind))
        return out

    def experts(
        self, x: Value, router: Value, gates: Sequence[str], ups: Sequence[str], downs: Sequence[str]
    ) -> Value:
        e = self.config.experts
        assert e is not None, "the model has no experts"
        out = self._value(x.width)
        self._ops.append(
            Experts(
                x, router, out, tuple(gates), tuple(ups), tuple(downs), e.ffn_size, e.num_active, e.normalised
            )
        )
        return out

    def logits(self, x: Value, weight: str) -> None:
        self._ops.append(Logits(x, weight, self.config.final_softcap))

    def build(self) -> Program:
        return Program(self.config, tuple(self._ops), self._num_values)
