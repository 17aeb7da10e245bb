"""Tokens per second of whole steps: prefill and decode through the engine, with scheduling and sampling.

A workload runs through `Engine.step`, the loop that `LLM` and the server drive. Prompts are random tokens,
new in every run, so that nothing is served from the prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import numpy as np

from pagoda.backends.cpu import CPUModel
from pagoda.bench.kernels import measure_ceilings
from pagoda.bench.roofline import StepCost
from pagoda.engine.engine import Engine
from pagoda.engine.llm import LLM
from pagoda.engine.output import OutputKind
from pagoda.errors import UnsupportedError
from pagoda.runtime.model_runner import ModelRunner
from pagoda.sampling_params import SamplingParams
from pagoda.weights.checkpoint import load_checkpoint

MAX_NUM_BATCHED_TOKENS = 512
SHORTEST_MODEL_LEN = 256  # room to check an answer


@dataclass(frozen=True, slots=True)
class Workload:
    """Streams that start with prompts of one length. `num_decode_tokens` 0 times the prompts, else the rest.

    Decode is timed from when every stream has its first token, so no prefill is in it.
    """

    name: str
    num_prompt_tokens: int
    num_decode_tokens: int = 0
    num_streams: int = 1

    @property
    def max_tokens(self) -> int:
        """Of each stream. None may end before the timed steps do; another one starts with every step."""
        return self.num_decode_tokens + self.num_streams if self.num_decode_tokens else 1

    @property
    def max_model_len(self) -> int:
        return self.num_prompt_tokens + self.max_tokens


WORKLOADS: tuple[Workload, ...] = (
    Workload("prefill 512", 512),
    Workload("prefill 2048", 2048),
    Workload("decode, 1 stream", 16, 128),
    Workload("decode, 1 stream, 4096 of context", 4096, 32),
    Workload("decode, 32 streams", 16, 64, 32),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload: tokens of the timed steps, prompt tokens in prefill and outputs in decode."""

    num_tokens: int
    num_steps: int
    time_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.time_s


@dataclass(frozen=True, slots=True)
class StepTime:
    """All runs of a workload on one number of threads, sorted, and the median's share of the machine."""

    workload: Workload
    num_threads: int
    tokens_per_s: tuple[float, ...]
    share: float
    ceiling: str

    @property
    def median(self) -> float:
        return self.tokens_per_s[len(self.tokens_per_s) // 2]


class StepBench:
    """One model, loaded once for each number of threads; the copies run in turns.

        with StepBench(path, (1, 2)) as bench:
            for times in bench.measure(num_runs=5):
                print([t.median for t in times])

    Raises:
        PagodaError: the model cannot be found, read or held in memory, or has too few positions.
    """

    def __init__(self, path: str, num_threads: tuple[int, ...]) -> None:
        self.rng = np.random.default_rng()
        self._stack = ExitStack()
        with load_checkpoint(path) as checkpoint:
            self.cost = StepCost.of(checkpoint)
            max_position = checkpoint.config.max_position
        if max_position < SHORTEST_MODEL_LEN:
            raise UnsupportedError(
                f"the model has {max_position} positions; measuring it needs {SHORTEST_MODEL_LEN}"
            )
        self.workloads = tuple(w for w in WORKLOADS if w.max_model_len <= max_position)
        self.left_out = tuple(w for w in WORKLOADS if w.max_model_len > max_position)
        with ExitStack() as stack:
            self.llms = {n: stack.enter_context(self._load(path, n)) for n in num_threads}
            self._stack = stack.pop_all()
        self.ceilings = {
            n: measure_ceilings(native_model(llm.engine).native.isa, n) for n, llm in self.llms.items()
        }

    def _load(self, path: str, num_threads: int) -> LLM:
        """An engine whose KV memory is sized for the workloads: copies must not take half of what is left."""
        spec, workloads = self.cost.spec, self.workloads
        longest = max(SHORTEST_MODEL_LEN, *(w.max_model_len for w in workloads))
        kv_bytes = max(w.num_streams * spec.sequence_bytes(w.max_model_len) for w in workloads)
        kv_bytes = max(kv_bytes, spec.sequence_bytes(longest))
        return LLM(
            path,
            num_threads=num_threads,
            max_model_len=longest,
            kv_cache_memory_bytes=4 * kv_bytes,  # so that layer groups of any spans find room
            max_num_seqs=64,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            seed=0,
        )

    def measure(self, num_runs: int) -> Iterator[tuple[StepTime, ...]]:
        """Times of each workload, one a number of threads."""
        for workload in self.workloads:
            runs: dict[int, list[Run]] = {n: [] for n in self.llms}
            for number in range(num_runs + 1):
                for n, llm in self.llms.items():
                    run = run_workload(llm.engine, workload, self.rng)
                    if number > 0:  # the first one grows buffers
                        runs[n].append(run)
            yield tuple(self._time(workload, n, runs[n]) for n in self.llms)

    def _time(self, workload: Workload, num_threads: int, runs: list[Run]) -> StepTime:
        runs = sorted(runs, key=lambda run: run.tokens_per_s)
        median = runs[len(runs) // 2]
        is_decode = workload.num_decode_tokens > 0
        share, ceiling = self.cost.share(
            self.ceilings[num_threads],
            median.time_s,
            num_steps=median.num_steps,
            num_tokens=median.num_tokens,
            num_head_rows=median.num_tokens if is_decode else workload.num_streams,
            num_context_tokens=workload.num_prompt_tokens if is_decode else 0,
            num_streams=workload.num_streams,
        )
        return StepTime(workload, num_threads, tuple(run.tokens_per_s for run in runs), share, ceiling)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> StepBench:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def native_model(engine: Engine) -> CPUModel:
    """The compiled model that an engine of the cpu backend runs."""
    model = cast("ModelRunner", engine.executor).model
    assert isinstance(model, CPUModel)
    return model


def run_workload(
    engine: Engine,
    workload: Workload,
    rng: np.random.Generator,
    on_start: Callable[[], None] = lambda: None,
) -> Run:
    """One run on new random prompts. `on_start` is called when the time starts."""
    params = SamplingParams(temperature=0, max_tokens=workload.max_tokens, ignore_eos=True)
    names = [f"stream-{i}" for i in range(workload.num_streams)]
    prompts = rng.integers(0, engine.vocab_size, (workload.num_streams, workload.num_prompt_tokens)).tolist()
    is_decode = workload.num_decode_tokens > 0
    num_tokens = num_steps = 0
    if not is_decode:
        on_start()
    start_s = time.perf_counter()
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, params, output_kind=OutputKind.DELTA)
    waiting = set(names)
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
        num_steps += 1
    num_tokens = workload.num_streams * workload.num_prompt_tokens
    if is_decode:
        on_start()
        num_tokens, num_steps, start_s = 0, workload.num_decode_tokens, time.perf_counter()
        for _ in range(num_steps):
            num_tokens += sum(len(c.token_ids) for output in engine.step() for c in output.outputs)
    time_s = time.perf_counter() - start_s
    engine.abort(names)
    return Run(num_tokens, num_steps, time_s)
