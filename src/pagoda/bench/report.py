"""Figures as lines of tables and as JSON."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from pagoda import __version__, machine
from pagoda.bench.kernels import Ceilings, KernelTime
from pagoda.bench.profile import StepProfile
from pagoda.bench.steps import StepTime, Workload

KERNEL_HEADER = f"{'kernel':<11}{'case':<78}{'':>4}{'us':>11}{'GB/s':>8}{'GOP/s':>8}{'share of':>12}"


def ceiling_line(ceilings: Ceilings) -> str:
    return (
        f"{ceilings.isa}, {ceilings.num_threads} threads: reads {ceilings.bytes_per_s / 1e9:.1f} GB/s, "
        f"does {ceilings.dots_per_s / 1e9:.0f} GOP/s of byte dot products"
    )


def kernel_line(time: KernelTime) -> str:
    share = "" if time.share is None else f"{time.share:>6.0%} {time.ceiling}"
    wrong = "" if time.is_right else f"  WRONG: error {time.error:.2g}, tolerance {time.tolerance:.2g}"
    return (
        f"{time.kernel:<11}{time.case:<78}{'cold' if time.is_cold else 'hot':>4}{time.time_s * 1e6:>11.1f}"
        f"{time.bytes_per_s / 1e9:>8.1f}{time.operations_per_s / 1e9:>8.1f}{share}{wrong}"
    )


def step_header(num_threads: Sequence[int], floors: Mapping[str, float]) -> str:
    columns = "".join(f"{f'{n} threads':>11}{'min':>8}{'max':>8}" for n in num_threads)
    scaling = f"{'scaling':>9}" if len(num_threads) > 1 else ""
    return f"{'tokens a second':<34}{columns}{scaling}{'floor *' if floors else '':>9}  share of"


def step_line(times: Sequence[StepTime], floors: Mapping[str, float]) -> str:
    """Medians of a workload for each number of threads, and the share of the machine with the last."""
    columns = "".join(f"{t.median:>11.0f}{t.tokens_per_s[0]:>8.0f}{t.tokens_per_s[-1]:>8.0f}" for t in times)
    scaling = f"{times[-1].median / times[0].median:>8.2f}x" if len(times) > 1 else ""
    last, floor = times[-1], floors.get(times[0].workload.name, "")
    return f"{last.workload.name:<34}{columns}{scaling}{floor:>9}{last.share:>5.0%} {last.ceiling}"


def profile_lines(workload: Workload, num_threads: int, profile: StepProfile) -> Iterator[str]:
    tokens = f"{profile.num_steps} steps of {1e3 * profile.step_s:.2f} ms"
    yield f"\n{workload.name}, {num_threads} threads: {tokens}"
    for part, seconds in profile.seconds.items():
        yield f"  {part:<20}{1e3 * seconds:>9.3f} ms{seconds / profile.step_s:>7.1%}"


def machine_facts() -> dict[str, Any]:
    """What figures depend on, beside the model."""
    return {
        "pagoda": __version__,
        "processor": _processor(),
        "num_usable_cores": machine.num_usable_cores(),
        "memory_bytes": machine.memory_limit_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def as_json(**parts: Any) -> dict[str, Any]:
    """The parts, with dataclasses as objects, under the facts of the machine."""
    return {"machine": machine_facts(), **{name: _plain(part) for name, part in parts.items()}}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
