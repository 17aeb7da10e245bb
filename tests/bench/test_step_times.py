"""`pagoda bench step`: what is counted, where the time goes, and that wrong answers have no speed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.backends.cpu import CPUModel
from pagoda.bench import steps
from pagoda.bench.check import check_answer
from pagoda.bench.profile import profile_workload
from pagoda.bench.roofline import StepCost
from pagoda.bench.steps import StepBench, Workload, native_model, run_workload
from pagoda.cli import main
from pagoda.engine.llm import LLM
from pagoda.errors import PagodaError
from pagoda.weights.checkpoint import load_checkpoint
from tests.real_models import SMOLLM2, real_model

RNG = np.random.default_rng(0)
SHORT = (Workload("prefill", 40), Workload("decode", 16, 3, 2))


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, num_threads=1, max_num_seqs=8, max_num_batched_tokens=32) as llm:
        yield llm


@pytest.fixture
def short_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "WORKLOADS", SHORT)


def test_prefill_counts_prompt_tokens_and_the_steps_they_took(llm: LLM) -> None:
    run = run_workload(llm.engine, Workload("prefill", 100), RNG)
    assert (run.num_tokens, run.num_steps) == (100, 4)  # 32 tokens a step


@pytest.mark.parametrize("num_streams", [1, 5])
def test_decode_counts_one_token_a_stream_and_step_once_all_have_begun(llm: LLM, num_streams: int) -> None:
    started: list[int] = []
    workload = Workload("decode", 16, 7, num_streams)
    run = run_workload(
        llm.engine, workload, RNG, on_start=lambda: started.append(llm.engine.scheduler.num_running)
    )
    assert started == [num_streams]
    assert (run.num_tokens, run.num_steps) == (7 * num_streams, 7)
    assert not llm.engine.has_unfinished


def test_no_run_is_served_from_the_prefix_cache(llm: LLM) -> None:
    """G08: prompts are new in every run, so a step computes what it says."""
    for _ in range(2):
        assert run_workload(llm.engine, Workload("prefill", 64), RNG).num_steps == 2


def test_parts_of_a_profile_add_up_to_the_step(llm: LLM) -> None:
    model = native_model(llm.engine)
    profile = profile_workload(llm.engine, Workload("decode", 16, 5), RNG)
    assert profile.num_steps == 5
    assert {"linear", "attention", "sampler", "python"} <= set(profile.seconds)
    assert all(seconds >= 0 for seconds in profile.seconds.values())
    assert profile.step_s == pytest.approx(sum(profile.seconds.values()))
    assert native_model(llm.engine) is model  # nothing stays wrapped


@pytest.mark.real_model
def test_the_cost_of_a_step_is_that_of_its_matrices() -> None:
    """SmolLM2: 30 layers of 576 x (576 + 2 x 192 + 576 + 3 x 1536) weights and a head of 49152 rows."""
    with load_checkpoint(real_model(SMOLLM2)) as checkpoint:
        cost = StepCost.of(checkpoint)
        file_bytes = checkpoint.num_bytes
    assert cost.dots_per_token == 2 * 30 * 576 * (576 + 2 * 192 + 576 + 3 * 1536)
    assert cost.dots_per_head_row == 2 * 49152 * 576
    assert 0.99 * file_bytes < cost.weight_bytes < file_bytes  # its head is its embedding


def test_float_weights_count_for_bytes_only(tiny_model: Path) -> None:
    with load_checkpoint(tiny_model) as checkpoint:
        cost = StepCost.of(checkpoint)
    assert cost.weight_bytes > 0
    assert cost.dots_per_token == cost.dots_per_head_row == 0


def test_workloads_longer_than_the_model_are_left_out_and_named(tiny_model: Path) -> None:
    with StepBench(str(tiny_model), (1,)) as bench:
        assert [w.name for w in bench.left_out] == ["decode, 1 stream, 4096 of context"]
        assert len(bench.workloads) == len(steps.WORKLOADS) - 1


def test_threads_are_compared_in_one_run(tiny_model: Path, short_workloads: None) -> None:
    with StepBench(str(tiny_model), (1, 2)) as bench:
        for workload, times in zip(SHORT, bench.measure(num_runs=3), strict=True):
            assert [time.num_threads for time in times] == [1, 2]
            for time in times:
                assert time.workload == workload
                assert sorted(time.tokens_per_s) == list(time.tokens_per_s)
                assert len(time.tokens_per_s) == 3 and time.share > 0


def test_an_answer_is_held_against_the_reference(llm: LLM, tiny_model: Path) -> None:
    assert check_answer(llm, str(tiny_model)).startswith("correct: 32 greedy tokens")


def test_a_wrong_answer_is_refused(llm: LLM, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A32: a build that answers nonsense fast has no speed."""
    right = CPUModel.forward
    monkeypatch.setattr(CPUModel, "forward", lambda model, batch: -right(model, batch))
    with pytest.raises(PagodaError, match="wrong answer: token 0"):
        check_answer(llm, str(tiny_model))


def test_a_reference_that_does_not_fit_is_told_instead_of_run(
    llm: LLM, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.machine.memory_available_bytes", lambda: 1000)
    assert check_answer(llm, str(tiny_model)).startswith("answers not checked: the reference needs")


def test_the_command_prints_a_line_a_workload_and_the_profile(
    tiny_model: Path, short_workloads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", str(tiny_model), "--threads", "1", "2", "--runs", "1", "--profile"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("correct:")
    for workload in SHORT:
        assert sum(line.startswith(f"{workload.name} ") for line in lines) == 1
        assert sum(line.startswith(f"{workload.name}, ") for line in lines) == 2
    assert sum(line.startswith("  attention") for line in lines) == 4


def test_json_holds_steps_and_profiles(
    tiny_model: Path, short_workloads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "step", str(tiny_model), "--threads", "1", "--runs", "2", "--no-check"]
    assert main([*command, "--profile", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["checked"] == "answers not checked"
    assert [step["workload"]["name"] for step in told["steps"]] == [w.name for w in SHORT]
    assert all(len(step["tokens_per_s"]) == 2 for step in told["steps"])
    assert all(profile["seconds"]["linear"] > 0 for profile in told["profiles"])
