"""The comparison with other engines: what is counted, compared and refused. The engines are stubs."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.peer_commands import Peer, Steps, pagoda
from benchmarks.peer_http import http_workloads
from benchmarks.peer_steps import greedy_answer, tokens_per_s
from benchmarks.peers import Figures, answers_agree, ratio, run_turn
from tests.cli.tiny_chat_model import write_tiny_chat_model


class StubEngine:
    """Computes 512 tokens a step, one prompt after the other; then each stream gets a token a step."""

    version = "stub"

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.prompts: list[list[int]] = []
        self.num_steps = 0

    def add(self, stream: int, prompt: list[int], max_tokens: int) -> None:
        self.prompts.append(prompt)
        self.waiting[stream] = len(prompt)
        self.left[stream] = max_tokens

    def step(self) -> dict[int, list[int]]:
        self.num_steps += 1
        budget = 512
        for stream, num_tokens in list(self.waiting.items()):
            self.waiting[stream] -= min(budget, num_tokens)
            budget -= min(budget, num_tokens)
            if self.waiting[stream] == 0:
                del self.waiting[stream]
        ready = [stream for stream in self.left if stream not in self.waiting and self.left[stream]]
        for stream in ready:
            self.left[stream] -= 1
        return {stream: [7] for stream in ready}

    def end(self, streams: list[int]) -> None:
        self.left.clear()

    def encode(self, text: str) -> list[int]:
        return list(range(len(text)))

    def decode(self, token_ids: list[int]) -> str:
        return "x" * len(token_ids)


def workload(num_prompt_tokens: int, num_decode_tokens: int = 0, num_streams: int = 1) -> dict[str, Any]:
    fields = ("name", "num_prompt_tokens", "num_decode_tokens", "num_streams")
    return dict(zip(fields, ("w", num_prompt_tokens, num_decode_tokens, num_streams), strict=True))


@pytest.mark.parametrize(
    ("sizes", "num_steps"), [((512,), 1), ((2048,), 4), ((16, 10), 11), ((400, 6, 8), 7 + 6)]
)
def test_the_loop_of_peers_runs_the_steps_a_workload_says(sizes: tuple[int, ...], num_steps: int) -> None:
    engine = StubEngine()
    assert tokens_per_s(engine, workload(*sizes), 48000) > 0
    assert engine.num_steps == num_steps
    assert engine.left == {}


def test_prompts_of_peers_are_new_in_every_run() -> None:
    """G08"""
    engine = StubEngine()
    for _ in range(2):
        tokens_per_s(engine, workload(16, 4, 8), 48000)
    assert len({tuple(prompt) for prompt in engine.prompts}) == 16


def test_an_engine_whose_streams_end_early_has_no_figure() -> None:
    """G06: fewer tokens than were asked for are no speed."""
    engine = StubEngine()
    engine.add = lambda stream, prompt, n: StubEngine.add(engine, stream, prompt, 2)  # type: ignore[method-assign]
    with pytest.raises(SystemExit, match="tokens came in steps"):
        tokens_per_s(engine, workload(16, 40), 48000)


def test_an_answer_has_as_many_tokens_as_asked_for() -> None:
    assert greedy_answer(StubEngine(), "four", 5) == {"num_prompt_tokens": 4, "text": "xxxxx"}


def test_ratios_are_to_the_best_peer_and_seconds_count_the_other_way_round() -> None:
    assert ratio("prefill 512", [300.0, 100.0, 150.0, None]) == "2.00x"
    assert ratio("32 prompts, s", [2.0, 8.0, 5.0]) == "2.50x"
    assert ratio("prefill 512", [300.0, None]) == "-"


def test_medians_are_taken_over_turns() -> None:
    figures = Figures()
    values = iter([10.0, 30.0, 20.0])
    peer = Peer("stub", lambda: Steps({"prefill 512": next(values)}, "1.0", ("run me",)))
    for _ in range(3):
        run_turn(peer, figures, with_http=True)  # it has no server
    assert figures.median("prefill 512") == 20.0
    assert figures.median("decode, 1 stream") is None
    assert (figures.version, figures.commands) == ("1.0", ["run me"])


def answer(num_prompt_tokens: int, text: str) -> Figures:
    return Figures(answer={"num_prompt_tokens": num_prompt_tokens, "text": text})


@pytest.mark.parametrize("other", [answer(6, " Paris"), answer(5, " Rome"), answer(5, " ")])
def test_engines_that_run_something_else_are_not_compared(
    other: Figures, capsys: pytest.CaptureFixture[str]
) -> None:
    alike = {"a": answer(5, " Paris. It"), "b": answer(5, " Paris is"), "without a server": Figures()}
    assert answers_agree(alike)
    assert not answers_agree({**alike, "c": other})
    assert "WRONG" in capsys.readouterr().err


def test_workloads_over_http_are_those_of_the_serving_benchmark() -> None:
    apart, shared = http_workloads().values()
    assert (len(apart.clients), apart.max_tokens, apart.concurrency) == (32, 64, 32)
    assert (len(shared.clients), shared.max_tokens, shared.concurrency) == (48, 32, 8)


def test_what_runs_in_a_peers_environment_needs_nothing_of_pagoda() -> None:
    path = Path(peers.__file__).with_name("peer_steps.py")
    imports = re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
    assert set(imports) <= {*sys.stdlib_module_names, "__future__"}


def test_flags_that_need_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", "--vllm", "/tmp"])
    with pytest.raises(SystemExit):
        peers.parse_arguments()
    assert "need each other" in capsys.readouterr().err


@pytest.mark.slow
def test_pagoda_itself_is_measured_by_its_own_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_tiny_chat_model(tmp_path / "tiny.gguf"))
    figures = Figures()
    run_turn(pagoda(model, 1), figures, with_http=False)
    assert {"prefill 512", "decode, 32 streams"} <= figures.rows.keys()
    peers.print_report(argparse.Namespace(model=model, threads=1, turns=1, http=False), {"pagoda": figures})
    assert "| prefill 512 | " in capsys.readouterr().out
