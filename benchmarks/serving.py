"""How fast a server answers many clients, over HTTP with streaming: make bench

Without --url it starts `pagoda serve` on a free loopback port. Workloads: many requests that share a long
prefix, chats whose history grows, many prompts that share nothing; then what running streams notice of a
long prompt and of the server. Prompts are random and new in every run, so that no run is served from the
cache of an earlier one. What was not answered with as many tokens as it asked for is a failure: shown, in no
latency, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.running_streams import measure_itl, measure_overhead, print_failures
from benchmarks.streaming import (
    CHATS,
    COMPLETIONS,
    Answer,
    Summary,
    completion,
    percentile,
    random_tokens,
    stream_answer,
    summarise,
)
from pagoda import _native
from pagoda.machine import num_usable_cores
from tests.real_models import SMOLLM2, real_models_folder

WORDS = ("river", "stone", "cloud", "market", "garden", "letter", "window", "music", "winter", "bridge")
START_S, ANSWER_S, STOP_S = 120.0, 300.0, 30.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Clients that each send their prompts one after another, at most `concurrency` at a time.

    A prompt is token ids, or what a user says in a chat that goes on. `num_shared_tokens` is how much of a
    prompt another one of the workload may have computed; None in chats, which depends on the template.
    """

    name: str
    goal_s: float
    max_tokens: int
    concurrency: int
    clients: tuple[tuple[list[int] | str, ...], ...]
    num_shared_tokens: int | None = 0


def workloads() -> dict[str, Workload]:
    prefix = random_tokens(1350)
    shared = tuple((prefix + random_tokens(66),) for _ in range(48))
    chats = tuple(
        tuple(f"{random.getrandbits(32)} {' '.join(random.choices(WORDS, k=40))}?" for _ in range(5))
        for _ in range(8)
    )
    apart = tuple((random_tokens(240),) for _ in range(32))
    return {
        "shared-prefix": Workload(
            "shared prefix: 48 x (1350 + 66), 32 out, 8 at a time", 8.0, 32, 8, shared, 1350
        ),
        "chats": Workload("chats: 8 of 5 turns, 64 out", 9.0, 64, 8, chats, None),
        "no-prefix": Workload("no prefix: 32 x 240, 64 out, 32 at a time", 8.0, 64, 32, apart),
    }


async def run_workload(
    client: httpx.AsyncClient, model: str, workload: Workload
) -> tuple[list[Answer], float]:
    """All answers, and the seconds from the first request to the last answer."""
    slots = asyncio.Semaphore(workload.concurrency)
    start_s = time.perf_counter()
    per_client = await asyncio.gather(
        *(_run_client(client, model, workload, prompts, slots) for prompts in workload.clients)
    )
    return [answer for answers in per_client for answer in answers], time.perf_counter() - start_s


async def _run_client(
    client: httpx.AsyncClient,
    model: str,
    workload: Workload,
    prompts: tuple[list[int] | str, ...],
    slots: asyncio.Semaphore,
) -> list[Answer]:
    answers: list[Answer] = []
    messages: list[dict[str, str]] = []
    for prompt in prompts:
        path, body = COMPLETIONS, completion(model, [], workload.max_tokens)
        if isinstance(prompt, str):
            messages = [*messages, {"role": "user", "content": prompt}]
            del body["prompt"], body["skip_special_tokens"]
            path, body["messages"] = CHATS, messages
        else:
            body["prompt"] = prompt
        async with slots:
            answer = await stream_answer(client, path, body)
        answers.append(answer)
        if answer.failure is not None:
            break  # the rest of a chat has no history to go on from
        messages = [*messages, {"role": "assistant", "content": answer.text}]
    return answers


async def count_differences(client: httpx.AsyncClient, answers: list[Answer]) -> int:
    """How many greedy answers differ from that to the same request sent alone, past the prefix cache."""
    num_different = 0
    for answer in answers:
        if answer.failure is None:
            path = CHATS if "messages" in answer.body else COMPLETIONS
            alone = await stream_answer(client, path, {**answer.body, "cache": False})
            num_different += alone.failure is not None or alone.text != answer.text
    return num_different


def print_summary(workload: Workload, summary: Summary, num_requests: int) -> None:
    ttft_ms = [1000 * percentile(summary.ttft_s, p) for p in (50, 99)]
    itl_ms = [1000 * percentile(summary.itl_s, p) for p in (50, 99)]
    print(f"\n{workload.name}")
    print(f"  wall {summary.wall_s:.2f} s (goal {workload.goal_s:g} s *), ", end="")
    print(f"{summary.num_output_tokens / summary.wall_s:.0f} tokens/s")
    print(f"  TTFT {ttft_ms[0]:.0f} ms median, {ttft_ms[1]:.0f} ms p99; ", end="")
    print(f"ITL {itl_ms[0]:.1f} ms median, {itl_ms[1]:.1f} ms p99")
    print(f"  {summary.num_cached_tokens} of {summary.num_prompt_tokens} prompt tokens cached; ", end="")
    print(f"{len(summary.failures)} of {num_requests} requests failed")
    # A token more: the last block's first one may agree by chance.
    num_shared = workload.num_shared_tokens
    if num_shared is not None and summary.num_cached_tokens > summary.num_answered * (num_shared + 1):
        print("  warning: more was cached than these prompts share; the figures are not of cold prompts")


async def measure_workload(
    client: httpx.AsyncClient, model: str, workload: Workload
) -> tuple[bool, list[Answer]]:
    """Run and print it; whether the measurement holds, and the answers."""
    answers, wall_s = await run_workload(client, model, workload)
    num_requests = sum(len(prompts) for prompts in workload.clients)
    summary = summarise(answers, wall_s)
    print_summary(workload, summary, num_requests)
    print_failures(answers)
    return summary.num_answered == num_requests, answers


Measurement = Callable[[httpx.AsyncClient, str], Awaitable[tuple[bool, list[Answer]]]]


def measurements() -> dict[str, Measurement]:
    """By the name for --only. Each runs, prints, and returns whether all was answered, and the answers."""

    def of_workload(workload: Workload) -> Measurement:
        return lambda client, model: measure_workload(client, model, workload)

    of_workloads = {name: of_workload(workload) for name, workload in workloads().items()}
    return {**of_workloads, "itl": measure_itl, "overhead": measure_overhead}


async def measure(url: str, names: Sequence[str], *, check: bool) -> bool:
    """Run and print; whether everything was right."""
    is_right = True
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        for name, run in measurements().items():
            if name not in names:
                continue
            is_complete, answers = await run(client, model)
            is_right &= is_complete
            num_answered = sum(answer.failure is None for answer in answers)
            verdict = "correct" if is_complete else "WRONG"
            print(f"  {verdict}: {num_answered} of {len(answers)} answers have the tokens asked for")
            if check:
                num_different = await count_differences(client, answers)
                is_right &= num_different == 0
                verdict = "WRONG" if num_different else "correct"
                print(f"  {verdict}: {num_different} answers differ from those of the same requests alone")
    return is_right


@contextmanager
def own_server(model: str, flags: Sequence[str] = ()) -> Iterator[str]:
    """`pagoda serve` on a free loopback port; its URL."""
    command = [sys.executable, "-m", "pagoda", "serve", model, "--port", "0", "--served-model-name", "bench"]
    command += flags
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield _wait_for_url(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Any) -> str:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        log.seek(0)
        for line in log:
            if line.startswith("ready "):
                return str(line.split()[1])
        time.sleep(0.1)
    log.seek(0)
    sys.exit(f"the server did not start:\n{log.read()}")


def print_machine() -> None:
    num_cores = num_usable_cores()
    bytes_per_s, operations_per_s = _native.Model("", num_cores).measure_ceilings()
    print(f"{num_cores} cores, {_native.isas()[0]}; this machine reads {bytes_per_s / 1e9:.1f} GB/s ", end="")
    print(f"and does {operations_per_s / 1e9:.0f} GOP/s of byte dot products; the client runs on it, too")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server with SmolLM2 (default: starts one)")
    parser.add_argument(
        "--model", default=str(real_models_folder() / f"{SMOLLM2}.gguf"), help="served without --url"
    )
    parser.add_argument(
        "--only", nargs="+", choices=tuple(measurements()), default=tuple(measurements()), metavar="NAME",
        help="of " + ", ".join(measurements()),
    )  # fmt: skip
    parser.add_argument(
        "--serve-flags", action="append", metavar="FLAGS",
        help='of the server that is started: --serve-flags="--max-num-batched-tokens 128"; '
        "given again, another server is measured after it",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="compare each answer with that of a run alone")
    args = parser.parse_args()
    if args.url and args.serve_flags:
        parser.error("--serve-flags is for a server that is started here, and --url names another")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server ends with it
    print_machine()
    is_right = True
    if args.url:
        is_right = asyncio.run(measure(args.url, args.only, check=args.check))
    for flags in [] if args.url else args.serve_flags or [""]:
        with own_server(args.model, shlex.split(flags)) as url:
            print(f"\npagoda serve {flags}".rstrip())
            is_right &= asyncio.run(measure(url, args.only, check=args.check))
    print("\n* on two cores with AVX-512 VNNI, 913 GOP/s and 33 GB/s, with the client on them, too")
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
