"""Where the time of a step goes: kinds of native stages, the sampler, and Python around them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from pagoda.backends.base import CompiledModel
from pagoda.bench.steps import StepBench, Workload, native_model, run_workload
from pagoda.core.step import BlockCopy
from pagoda.engine.engine import Engine
from pagoda.runtime.forward_batch import Float32Array, ForwardBatch, SampleResult, SamplingBatch
from pagoda.runtime.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Seconds of one step, by part, the mean over `num_steps`; they add up to the step.

    Parts are the kinds of native stages in one thread, "wait" (for the others), "between stages" (the rest of
    the native call), "sampler", and "python": scheduling, arrays, detokenising.
    """

    num_steps: int
    seconds: dict[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


def profile_steps(bench: StepBench, num_threads: int) -> Iterator[tuple[Workload, StepProfile]]:
    """One profiled run of each workload; reading clocks slows its steps a little."""
    engine = bench.llms[num_threads].engine
    for workload in bench.workloads:
        yield workload, profile_workload(engine, workload, bench.rng)


def profile_workload(engine: Engine, workload: Workload, rng: np.random.Generator) -> StepProfile:
    native = native_model(engine).native
    runner = cast("ModelRunner", engine.executor)
    timed = _TimedModel(runner.model)

    def start_over() -> None:
        native.take_profile()
        timed.forward_s = timed.sample_s = 0.0

    native.set_profile(True)
    runner.model = timed
    try:
        run = run_workload(engine, workload, rng, on_start=start_over)
    finally:
        runner.model = timed.model
        native.set_profile(False)
    stages = dict(native.take_profile())
    del stages["steps"]
    seconds = {
        **stages,
        "between stages": timed.forward_s - sum(stages.values()),
        "sampler": timed.sample_s,
        "python": run.time_s - timed.forward_s - timed.sample_s,
    }
    return StepProfile(run.num_steps, {part: s / run.num_steps for part, s in seconds.items()})


class _TimedModel:
    """A compiled model that adds up the seconds of its calls."""

    def __init__(self, model: CompiledModel) -> None:
        self.model = model
        self.forward_s = self.sample_s = 0.0

    def forward(self, batch: ForwardBatch) -> Float32Array:
        start_s = time.perf_counter()
        logits = self.model.forward(batch)
        self.forward_s += time.perf_counter() - start_s
        return logits

    def sample(self, logits: Float32Array, batch: SamplingBatch) -> SampleResult:
        start_s = time.perf_counter()
        result = self.model.sample(logits, batch)
        self.sample_s += time.perf_counter() - start_s
        return result

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.model.copy_blocks(copies)

    def kv_bytes_resident(self) -> int:
        return self.model.kv_bytes_resident()

    def close(self) -> None:
        self.model.close()
