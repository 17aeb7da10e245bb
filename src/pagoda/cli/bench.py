"""`pagoda bench`: how fast kernels, and steps of a model, are on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from pagoda.cli.arguments import MODEL_HELP, Parser

if TYPE_CHECKING:
    from pagoda.bench.kernels import Ceilings, KernelTime
    from pagoda.bench.steps import StepTime

NAME = "bench"
DESCRIPTION = """Measure kernels, or steps of a model, on this machine.

Every figure stands beside what the machine can do at best, measured in the same run, and
nothing is timed before its result has been held against the reference."""
KERNELS_EXAMPLES = """\
  pagoda bench kernels
  pagoda bench kernels --kernel linear --match "Q4_1" --threads 1
  pagoda bench kernels --isa avx2 --json > kernels.json"""
STEP_EXAMPLES = """\
  pagoda bench step smollm2-135m
  pagoda bench step smollm2-135m --threads 1 2
  pagoda bench step ./model.gguf --profile"""
EXAMPLES = f"{KERNELS_EXAMPLES}\n{STEP_EXAMPLES}"
KERNELS_DESCRIPTION = """Time each kernel on the sizes that steps of real models run, on each instruction set.

A case is run cold when its data comes from memory in a real step (weights and KV of decode),
and hot otherwise. Each result is compared with the kernel's reference; a wrong one is exit code 1."""
STEP_DESCRIPTION = """Time prefill and decode of a model, in tokens a second.

Steps run through the engine, with scheduling, sampling and detokenising. The share is that of
the machine's memory bandwidth or of its byte dot products, whichever allows less."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(print_help=parser.print_help)
    choices = parser.add_subparsers(title="what to measure", metavar="WHAT", parser_class=Parser)
    kernels = choices.add_parser(
        "kernels",
        prog="pagoda bench kernels",
        help="single kernels, on each instruction set",
        description=KERNELS_DESCRIPTION,
        epilog=f"examples:\n{KERNELS_EXAMPLES}",
    )
    add = kernels.add_argument
    add("--kernel", metavar="NAME", nargs="+", help="only these: linear, attention, ... (default: all)")
    add("--isa", metavar="ISA", nargs="+", help="only these instruction sets (default: all of this machine)")
    add("--match", metavar="TEXT", default="", help="only cases whose description holds TEXT")
    add("--edge-cases", action="store_true", help="also the small and odd cases that tests use")
    add("--threads", metavar="N", type=int, help="default: the cores that `pagoda info` shows")
    add(
        "--runs", metavar="N", type=int, default=5, help="timings of a case; their median counts (default: 5)"
    )
    add("--json", action="store_true", help="print JSON")
    kernels.set_defaults(bench=_execute_kernels, bench_error=kernels.error)
    step = choices.add_parser(
        "step",
        prog="pagoda bench step",
        help="prefill and decode of a model",
        description=STEP_DESCRIPTION,
        epilog=f"examples:\n{STEP_EXAMPLES}",
    )
    add = step.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add("--threads", metavar="N", type=int, nargs="+",
        help="one number, or several measured in turns (default: the cores of `pagoda info`)")  # fmt: skip
    add("--runs", metavar="N", type=int, default=5, help="timed runs of each line (default: 5)")
    add("--profile", action="store_true", help="also where the time of a step goes")
    add("--check", action=argparse.BooleanOptionalAction, default=True,
        help="compare an answer with the reference backend first (default: on)")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    step.set_defaults(bench=_execute_step, bench_error=step.error)


def execute(arguments: argparse.Namespace) -> int:
    if not hasattr(arguments, "bench"):
        arguments.print_help(sys.stderr)
        return 2
    threads = arguments.threads if isinstance(arguments.threads, list) else [arguments.threads]
    if any(n is not None and n < 1 for n in threads):
        arguments.bench_error(f"--threads is {' '.join(map(str, threads))}; it must be 1 or more")
    if arguments.runs < 1:
        arguments.bench_error(f"--runs is {arguments.runs}; it must be 1 or more")
    code: int = arguments.bench(arguments)
    return code


def _execute_kernels(arguments: argparse.Namespace) -> int:
    # Threads of numpy's BLAS, which compute references, would go on spinning beside kernels that are timed.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from pagoda import _native, machine
    from pagoda.bench.kernels import KERNELS, measure_ceilings, measure_kernels
    from pagoda.bench.report import KERNEL_HEADER, as_json, ceiling_line, kernel_line

    names = _known(arguments, "--kernel", arguments.kernel, list(KERNELS))
    isas = _known(arguments, "--isa", arguments.isa, _native.isas())
    tell = _teller(arguments)
    ceilings: list[Ceilings] = []
    times: list[KernelTime] = []
    for isa in isas:
        ceilings.append(measure_ceilings(isa, arguments.threads or machine.num_usable_cores()))
        tell(f"{ceiling_line(ceilings[-1])}\n{KERNEL_HEADER}")
        for time in measure_kernels(
            names,
            ceilings[-1],
            num_samples=arguments.runs,
            match=arguments.match,
            edge_cases=arguments.edge_cases,
        ):
            times.append(time)
            tell(kernel_line(time))
    if not times:
        arguments.bench_error(f"--match {arguments.match!r} fits no case of {', '.join(names)}")
    if arguments.json:
        print(json.dumps(as_json(ceilings=ceilings, kernels=times), indent=1))
    return 0 if all(time.is_right for time in times) else 1


def _teller(arguments: argparse.Namespace) -> Callable[[str], None]:
    """Prints a line of a table as soon as it is known, unless JSON is to follow."""
    return lambda line: None if arguments.json else print(line, flush=True)


def _known(
    arguments: argparse.Namespace, flag: str, chosen: list[str] | None, allowed: list[str]
) -> list[str]:
    for name in chosen or ():
        if name not in allowed:
            arguments.bench_error(f"{flag} is {name!r}; it must be one of {', '.join(allowed)}")
    return chosen or allowed


def _execute_step(arguments: argparse.Namespace) -> int:
    from pagoda import machine
    from pagoda.bench.check import check_answer
    from pagoda.bench.profile import profile_steps
    from pagoda.bench.report import as_json, ceiling_line, profile_lines, step_header, step_line
    from pagoda.bench.steps import StepBench
    from pagoda.weights.catalog import resolve_model

    path = str(resolve_model(arguments.model, progress=True))
    num_threads = tuple(dict.fromkeys(arguments.threads or [machine.num_usable_cores()]))
    tell = _teller(arguments)
    with StepBench(path, num_threads) as bench:
        checked = check_answer(bench.llms[num_threads[0]], path) if arguments.check else "answers not checked"
        tell(checked)
        for ceilings in bench.ceilings.values():
            tell(ceiling_line(ceilings))
        for workload in bench.left_out:
            tell(f"left out: {workload.name}, which is longer than the model's positions")
        tell(step_header(num_threads, {}))
        steps: list[StepTime] = []
        profiles: list[dict[str, object]] = []
        for times in bench.measure(arguments.runs):
            steps.extend(times)
            tell(step_line(times, {}))
        for n in num_threads if arguments.profile else ():
            for workload, profile in profile_steps(bench, n):
                profiles.append({"workload": workload, "num_threads": n, **asdict(profile)})
                tell("\n".join(profile_lines(workload, n, profile)))
        if arguments.json:
            parts = {"model": arguments.model, "checked": checked, "ceilings": list(bench.ceilings.values())}
            print(json.dumps(as_json(**parts, steps=steps, profiles=profiles), indent=1))
    return 0
