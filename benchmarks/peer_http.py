"""The workloads of `benchmarks.serving` on any server with OpenAI's completions, without streaming.

Servers count tokens in streams in their own ways; whole answers have a usage that all of them send.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from benchmarks.serving import Workload, workloads

START_S, ANSWER_S, STOP_S = 600.0, 600.0, 30.0


def http_workloads() -> dict[str, Workload]:
    """Prompts are new in every call."""
    chosen = workloads()
    return {
        "32 x 240, 64 out, s": chosen["no-prefix"],
        "48 x (1350 shared + 66), 32 out, s": chosen["shared-prefix"],
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def server(command: Sequence[str], environment: dict[str, str], url: str) -> Iterator[httpx.Client]:
    """Run a server until the block ends; a client of it once /v1/models answers."""
    with tempfile.TemporaryFile("w+") as log, httpx.Client(base_url=url, timeout=ANSWER_S) as client:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        try:
            _wait(process, client, log)
            yield client
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], client: httpx.Client, log: Any) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            # Some list their models before they have loaded them; a token is an answer of all.
            if complete(client, "Hello", 1)["usage"]["completion_tokens"] == 1:
                return
        except (httpx.HTTPError, KeyError):
            time.sleep(0.2)
    log.seek(0)
    sys.exit(f"the server did not start: {process.args}\n{log.read()[-2000:]}")


def complete(client: httpx.Client, prompt: str, max_tokens: int) -> dict[str, Any]:
    """A greedy completion of text."""
    models = client.get("/v1/models", timeout=5).raise_for_status().json()["data"]
    body = {"model": models[0]["id"], "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer: dict[str, Any] = client.post("/v1/completions", json=body).raise_for_status().json()
    return answer


def wall_s(url: str, workload: Workload) -> float:
    """Seconds from the first request to the last answer; ends the program where an answer is not whole."""
    return asyncio.run(_wall_s(url, workload))


async def _wall_s(url: str, workload: Workload) -> float:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        slots = asyncio.Semaphore(workload.concurrency)
        start_s = time.perf_counter()
        await asyncio.gather(*(_ask(client, model, workload, p[0], slots) for p in workload.clients))
        return time.perf_counter() - start_s


async def _ask(
    client: httpx.AsyncClient, model: str, workload: Workload, prompt: object, slots: asyncio.Semaphore
) -> None:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": workload.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with slots:
        answer = await client.post("/v1/completions", json=body)
    usage = answer.json().get("usage", {}) if answer.status_code == 200 else {}
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    assert isinstance(prompt, list)
    if counts != (len(prompt), workload.max_tokens):
        sys.exit(
            f"{workload.name}: HTTP {answer.status_code}, {counts[0]} prompt tokens of {len(prompt)}, "
            f"{counts[1]} of {workload.max_tokens} tokens: {answer.text[:300]}"
        )
