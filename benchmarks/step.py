"""How fast steps of SmolLM2 run on this machine, beside what the machine can do: make bench

`pagoda bench step`, after the answers were found to be those of transformers in float32 (the golden greedy
text until a close call), so that a figure of a broken build cannot be mistaken for speed. Then the time from
the start of a process to its end after one token, of the real models that are on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from pagoda import LLM, SamplingParams
from pagoda.bench.profile import profile_steps
from pagoda.bench.report import ceiling_line, profile_lines, step_header, step_line
from pagoda.bench.steps import StepBench
from pagoda.machine import num_usable_cores
from tests.models.nll import greedy_matches_until_gap
from tests.models.test_native_models import GOLDEN, MIN_GAP
from tests.real_models import QWEN2_5_CODER, SMOLLM2, real_models_folder

FLOORS = {
    "prefill 512": 2400,
    "prefill 2048": 2000,
    "decode, 1 stream": 290,
    "decode, 1 stream, 4096 of context": 150,
    "decode, 32 streams": 1200,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[num_usable_cores()], help="default: %(default)s"
    )
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each line (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="also where the time of a step goes")
    args = parser.parse_args()
    with StepBench(str(model_path(SMOLLM2)), tuple(args.threads)) as bench:
        check_answers(bench.llms[args.threads[0]])
        for ceilings in bench.ceilings.values():
            print(f"{SMOLLM2}; {ceiling_line(ceilings)}")
        print("\n" + step_header(args.threads, FLOORS))
        for times in bench.measure(args.runs):
            print(step_line(times, FLOORS), flush=True)
        for num_threads in args.threads if args.profile else ():
            for workload, profile in profile_steps(bench, num_threads):
                print("\n".join(profile_lines(workload, num_threads, profile)), flush=True)
    print("\n* on two cores with AVX-512 VNNI, 913 GOP/s and 33 GB/s")
    for name in (SMOLLM2, QWEN2_5_CODER):
        if model_path(name).exists():
            process_s(model_path(name))  # reads the file into the page cache
            times_s = sorted(process_s(model_path(name)) for _ in range(args.runs))
            median_s = statistics.median(times_s)
            print(f"process with one token, {name}: {median_s:.2f} s ({times_s[0]:.2f} to {times_s[-1]:.2f})")


def model_path(name: str) -> Path:
    return real_models_folder() / f"{name}.gguf"


def check_answers(llm: LLM) -> None:
    golden = np.load(GOLDEN / "smollm2-135m.npz")
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(len(golden["greedy_ids"]))]
    outputs = llm.generate(prompts, params)
    for output, ids, gaps in zip(outputs, golden["greedy_ids"], golden["greedy_gaps"], strict=True):
        answer = output.outputs[0].token_ids
        if not greedy_matches_until_gap(answer, ids.tolist(), gaps.tolist(), MIN_GAP):
            sys.exit(f"wrong answer: {answer}; expected {ids.tolist()}")
    print(f"correct: {len(prompts)} greedy answers follow the float32 reference until a close call")


def process_s(path: Path) -> float:
    """Seconds of a whole process that starts, loads the model, answers one token and ends."""
    command = [sys.executable, "-m", "pagoda", "run", str(path), "-p", "Hello", "--temperature", "0"]
    start_s = time.perf_counter()
    subprocess.run([*command, "--max-tokens", "1"], capture_output=True, check=True)
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
