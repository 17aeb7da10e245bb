"""Times of the cases of every kernel folder on one instruction set, beside the machine's ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from pagoda import _native
from pagoda.bench import kernel_runs
from pagoda.bench.kernel_runs import PreparedCase
from pagoda.kernels.activation import cases as activation
from pagoda.kernels.attention import cases as attention
from pagoda.kernels.embed import cases as embed
from pagoda.kernels.experts import cases as experts
from pagoda.kernels.layer_norm import cases as layer_norm
from pagoda.kernels.linear import cases as linear
from pagoda.kernels.quantize import cases as quantize
from pagoda.kernels.rms_norm import cases as rms_norm
from pagoda.kernels.rope import cases as rope
from pagoda.kernels.sample import cases as sample

MIN_SAMPLE_S = 0.02  # a sample repeats a case until it takes this long
MAX_SAMPLE_S = 1.0  # what takes longer is timed once: noise is small then, and patience too


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel folder: cases that test its edges, cases that steps run, and how to run one of either."""

    cases: Sequence[Any]
    step_cases: Sequence[Any]
    prepare: Callable[[Any, str, int], PreparedCase]


KERNELS: dict[str, Kernel] = {
    "linear": Kernel(linear.CASES, linear.STEP_CASES, kernel_runs.prepare_linear),
    "attention": Kernel(attention.CASES, attention.STEP_CASES, kernel_runs.prepare_attention),
    "experts": Kernel(experts.CASES, experts.STEP_CASES, kernel_runs.prepare_experts),
    "sample": Kernel(sample.CASES, sample.STEP_CASES, kernel_runs.prepare_sample),
    "layer_norm": Kernel(layer_norm.CASES, layer_norm.STEP_CASES, kernel_runs.prepare_layer_norm),
    "rms_norm": Kernel(rms_norm.CASES, rms_norm.STEP_CASES, kernel_runs.prepare_rms_norm),
    "rope": Kernel(rope.CASES, rope.STEP_CASES, kernel_runs.prepare_rope),
    "activation": Kernel(activation.CASES, activation.STEP_CASES, kernel_runs.prepare_gated),
    "quantize": Kernel(quantize.CASES, quantize.STEP_CASES, kernel_runs.prepare_quantize),
    "embed": Kernel(embed.CASES, embed.STEP_CASES, kernel_runs.prepare_embed),
}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What all threads together reach at best on one instruction set, by the kernels' own primitives."""

    isa: str
    num_threads: int
    bytes_per_s: float  # read from memory
    dots_per_s: float  # multiplications and additions of byte dot products, on registers

    def share(self, time_s: float, *, num_bytes: float, num_dots: float) -> tuple[float, str]:
        """The least time that either ceiling allows over `time_s`, and the ceiling's name.

        The roofline model (Williams, Waterman & Patterson 2009) with two roofs.
        """
        bounds = {"memory": num_bytes / self.bytes_per_s, "dot products": num_dots / self.dots_per_s}
        name = max(bounds, key=lambda bound: bounds[bound])
        return bounds[name] / time_s, name


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The median time of one execution of a case. `share` is None where no measured ceiling applies."""

    kernel: str
    case: str
    isa: str
    num_threads: int
    is_cold: bool
    time_s: float
    bytes_per_s: float
    operations_per_s: float
    share: float | None
    ceiling: str | None
    error: float
    tolerance: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance


def measure_ceilings(isa: str, num_threads: int) -> Ceilings:
    bytes_per_s, dots_per_s = _native.Model(isa, num_threads).measure_ceilings()
    return Ceilings(isa, num_threads, bytes_per_s, dots_per_s)


def measure_kernels(
    names: Sequence[str],
    ceilings: Ceilings,
    *,
    num_samples: int = 5,
    match: str = "",
    edge_cases: bool = False,
) -> Iterator[KernelTime]:
    """Run and time the step cases of kernels, and their `edge_cases` if asked, one after the other.

    Only cases whose description holds `match` are run. Wrong results are reported, not raised.
    """
    for name in names:
        kernel = KERNELS[name]
        for case in (*kernel.step_cases, *(kernel.cases if edge_cases else ())):
            if match in describe(case) and _is_native(case):
                yield measure_case(name, case, ceilings, num_samples)


def measure_case(name: str, case: Any, ceilings: Ceilings, num_samples: int = 5) -> KernelTime:
    prepared = KERNELS[name].prepare(case, ceilings.isa, ceilings.num_threads)
    once_s = prepared.measure(1)
    num_times = max(1, min(1000, int(MIN_SAMPLE_S / max(once_s, 1e-9))))
    samples = [once_s]
    if once_s < MAX_SAMPLE_S:
        samples = [prepared.measure(num_times) / num_times for _ in range(num_samples)]
    time_s = statistics.median(samples) / prepared.num_executions
    share, ceiling = None, None
    if prepared.is_cold or prepared.counts_dots:
        share, ceiling = ceilings.share(
            time_s,
            num_bytes=case.num_bytes if prepared.is_cold else 0,
            num_dots=case.num_flops if prepared.counts_dots else 0,
        )
    return KernelTime(
        kernel=name,
        case=describe(case),
        isa=ceilings.isa,
        num_threads=ceilings.num_threads,
        is_cold=prepared.is_cold,
        time_s=time_s,
        bytes_per_s=case.num_bytes / time_s,
        operations_per_s=case.num_flops / time_s,
        share=share,
        ceiling=ceiling,
        error=prepared.error,
        tolerance=case.tolerance,
    )


def describe(case: Any) -> str:
    """What tells a case from others: `tokens 8, inputs 576, outputs 1536, Q4_1`.

    Fields without a default, shapes, and what differs from its default.
    """
    parts = []
    for field in fields(case):
        value = getattr(case, field.name)
        is_told = field.default is MISSING or field.name in _ALWAYS_TOLD or value != field.default
        if is_told and field.name != "tolerance":
            label = "" if field.name in _TOLD_BY_VALUE else field.name.removeprefix("num_") + " "
            parts.append(label + _text(value))
    return ", ".join(parts)


_TOLD_BY_VALUE = ("weight_type", "kind", "name")
_ALWAYS_TOLD = (*_TOLD_BY_VALUE, "num_heads", "num_kv_heads", "head_dim")


def _text(value: object) -> str:
    if isinstance(value, tuple) and len(value) > 1 and len(set(value)) == 1:
        return f"{len(value)} x {value[0]}"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "name", value))


def _is_native(case: Any) -> bool:
    """Native attention has blocks of 16 tokens or multiples; the reference takes any."""
    return getattr(case, "block_size", 16) % 16 == 0
