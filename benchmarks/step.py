"""How fast steps run on this machine, beside what the machine can do: make bench

Prefill and decode through `LLM`'s own engine, so scheduling, sampling and detokenising are in the figures.
Before anything is timed the model has to answer as it does in float32 (the reference's greedy text until a
close call), so that a figure of a broken build cannot be mistaken for speed. Medians of several runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from pagoda import LLM, SamplingParams, _native
from pagoda.engine.output import OutputKind
from pagoda.machine import num_usable_cores
from tests.models.nll import greedy_matches_until_gap
from tests.models.test_native_models import GOLDEN, MIN_GAP
from tests.real_models import SMOLLM2, real_models_folder

FLOORS = {"prefill 512": 1000, "decode, 1 stream": 200, "decode, 32 streams": 700}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=num_usable_cores(), help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each line (default: %(default)s)")
    args = parser.parse_args()
    path = str(real_models_folder() / f"{SMOLLM2}.gguf")
    with LLM(path, num_threads=args.threads, max_num_seqs=64, max_num_batched_tokens=512, seed=0) as llm:
        check_answers(llm)
        bytes_per_s, operations_per_s = _native.Model("", args.threads).measure_ceilings()
        print(
            f"{SMOLLM2}, {args.threads} threads, {_native.isas()[0]}; this machine reads "
            f"{bytes_per_s / 1e9:.1f} GB/s and does {operations_per_s / 1e9:.0f} GOP/s of byte dot products\n"
        )
        print(f"{'tokens a second':<34}{'median':>8}{'min':>8}{'max':>8}{'floor *':>9}")
        for name, run in workloads(llm).items():
            run()
            figures = sorted(run() for _ in range(args.runs))
            middle = statistics.median(figures)
            print(f"{name:<34}{middle:>8.0f}{figures[0]:>8.0f}{figures[-1]:>8.0f}{FLOORS.get(name, ''):>9}")
        print("\n* on two cores with AVX-512 VNNI, 913 GOP/s and 33 GB/s")


def check_answers(llm: LLM) -> None:
    golden = np.load(GOLDEN / "smollm2-135m.npz")
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(len(golden["greedy_ids"]))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, ids, gaps in zip(outputs, golden["greedy_ids"], golden["greedy_gaps"], strict=True):
        answer = output.outputs[0].token_ids
        if not greedy_matches_until_gap(answer, ids.tolist(), gaps.tolist(), MIN_GAP):
            sys.exit(f"wrong answer: {answer}; expected {ids.tolist()}")
    print(f"correct: {len(prompts)} greedy answers follow the float32 reference until a close call")


def workloads(llm: LLM) -> dict[str, Callable[[], float]]:
    """Name: a function that runs it once and returns tokens per second."""
    rng = np.random.default_rng(0)

    def prompt(num_tokens: int) -> list[int]:
        return rng.integers(3, 49000, num_tokens).tolist()  # new tokens every run: nothing is cached

    def prefill(num_tokens: int) -> float:
        ids = prompt(num_tokens)
        start = time.perf_counter()
        llm.generate([ids], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        return num_tokens / (time.perf_counter() - start)

    def decode(num_streams: int, context: int, num_tokens: int) -> float:
        """From when every stream has its first token, so that no prefill is counted."""
        engine = llm.engine
        params = SamplingParams(temperature=0, max_tokens=num_tokens + num_streams, ignore_eos=True)
        names = [f"stream-{i}" for i in range(num_streams)]
        for name in names:
            engine.add_request(name, prompt(context), params, output_kind=OutputKind.DELTA)
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in engine.step()}
        produced, start = 0, time.perf_counter()
        for _ in range(num_tokens):
            produced += sum(len(c.token_ids) for output in engine.step() for c in output.outputs)
        elapsed_s = time.perf_counter() - start
        engine.abort(names)
        return produced / elapsed_s

    return {
        "prefill 512": lambda: prefill(512),
        "prefill 2048": lambda: prefill(2048),
        "decode, 1 stream": lambda: decode(1, 16, 128),
        "decode, 1 stream, 4096 of context": lambda: decode(1, 4096, 32),
        "decode, 32 streams": lambda: decode(32, 16, 64),
    }


if __name__ == "__main__":
    main()
