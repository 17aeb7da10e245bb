"""The timing loop of `pagoda bench step` for other engines, in their own environments.

Imports nothing beside the standard library: it runs in a peer's environment, where there is no pagoda.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any, Protocol


class StepEngine(Protocol):
    """An engine that is driven step by step."""

    version: str

    def add(self, stream: int, prompt: list[int], max_tokens: int) -> None:
        """Start a greedy stream that ignores the end token."""

    def step(self) -> dict[int, list[int]]:
        """Run one step. Returns the new tokens of each stream that got some."""

    def end(self, streams: list[int]) -> None:
        """Stop streams that have not ended, and leave nothing of them."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


def tokens_per_s(engine: StepEngine, workload: dict[str, Any], vocab_size: int) -> float:
    """One run; `workload` has the fields of `pagoda.bench.steps.Workload`, and is timed as there."""
    num_streams, num_steps = workload["num_streams"], workload["num_decode_tokens"]
    streams = list(range(num_streams))
    prompts = [random.choices(range(1000, vocab_size), k=workload["num_prompt_tokens"]) for _ in streams]
    max_tokens = num_steps + num_streams if num_steps else 1
    start_s = time.perf_counter()
    for stream, prompt in zip(streams, prompts, strict=True):
        engine.add(stream, prompt, max_tokens)
    waiting = set(streams)
    while waiting:
        waiting -= engine.step().keys()
    num_tokens = num_streams * workload["num_prompt_tokens"]
    if num_steps:
        num_tokens, start_s = 0, time.perf_counter()
        for _ in range(num_steps):
            num_tokens += sum(len(token_ids) for token_ids in engine.step().values())
    time_s = time.perf_counter() - start_s
    engine.end(streams)
    expected = num_streams * (num_steps or workload["num_prompt_tokens"])
    if num_tokens < 0.9 * expected:
        sys.exit(f"{workload['name']}: {num_tokens} tokens came in steps that should give {expected}")
    return num_tokens / time_s


def greedy_answer(engine: StepEngine, text: str, num_tokens: int) -> dict[str, Any]:
    """What the peer makes of a prompt, to see that it runs the same model."""
    prompt = engine.encode(text)
    engine.add(0, prompt, num_tokens)
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        token_ids += engine.step().get(0, [])
    engine.end([0])
    return {"num_prompt_tokens": len(prompt), "text": engine.decode(token_ids)}


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--workloads", type=json.loads, required=True, help="JSON list")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--num-tokens", type=int, required=True)
    return parser.parse_args()


def report(engine: StepEngine, arguments: argparse.Namespace) -> None:
    """Run everything, each workload once more than it is timed, and print one line of JSON."""
    answer = greedy_answer(engine, arguments.prompt, arguments.num_tokens)
    figures = {}
    for workload in arguments.workloads:
        tokens_per_s(engine, workload, arguments.vocab_size)
        figures[workload["name"]] = tokens_per_s(engine, workload, arguments.vocab_size)
    print("\n" + json.dumps({"version": engine.version, "answer": answer, "tokens_per_s": figures}))
