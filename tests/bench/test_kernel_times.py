"""`pagoda bench kernels`: right results, figures that belong together, and wrong results told."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import pagoda
from pagoda import _native
from pagoda.bench import kernel_runs, kernels
from pagoda.bench.kernels import KERNELS, Ceilings, describe, measure_case, measure_kernels
from pagoda.cli import main
from pagoda.kernels.linear.cases import STEP_CASES as LINEAR_STEP_CASES
from pagoda.kernels.linear.cases import LinearCase
from pagoda.weights.tensor import TensorType

ISAS = _native.isas()
CEILINGS = Ceilings(ISAS[0], 1, bytes_per_s=1e10, dots_per_s=1e11)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_runs, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "MIN_SAMPLE_S", 0.0)


def test_every_kernel_folder_is_measured() -> None:
    folders = (Path(pagoda.__file__).parent / "kernels").glob("*/cases.py")
    assert {cases.parent.name for cases in folders} == set(KERNELS)


def test_cases_are_told_apart_by_their_description() -> None:
    for kernel in KERNELS.values():
        described = [describe(case) for case in kernel.step_cases]
        assert len(set(described)) == len(described) > 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", KERNELS)
def test_the_first_case_a_step_runs_is_right_and_its_figures_agree(name: str, isa: str) -> None:
    case = KERNELS[name].step_cases[0]
    time = measure_case(name, case, replace(CEILINGS, isa=isa), num_samples=1)
    assert time.is_right
    assert time.time_s > 0
    assert time.bytes_per_s * time.time_s == pytest.approx(case.num_bytes)
    assert time.operations_per_s * time.time_s == pytest.approx(case.num_flops)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", KERNELS)
def test_every_case_a_step_runs_is_right(name: str) -> None:
    times = list(measure_kernels([name], CEILINGS, num_samples=1))
    assert [time.case for time in times if not time.is_right] == []


def test_every_packed_format_has_cases_of_decode_and_prefill() -> None:
    """Types that share a format differ in nothing once they are packed."""
    same_format = {
        TensorType.Q4_0: TensorType.Q4_1,
        TensorType.Q5_1: TensorType.Q5_0,
        **dict.fromkeys((TensorType.IQ4_NL, TensorType.IQ4_XS, TensorType.MXFP4), TensorType.Q8_0),
    }
    needed = {same_format.get(t, t) for t in TensorType}
    for num_tokens in (1, 4, 8, 64, 512):
        assert needed <= {c.weight_type for c in LINEAR_STEP_CASES if c.num_tokens == num_tokens}


def test_the_share_is_that_of_the_ceiling_which_allows_less() -> None:
    assert CEILINGS.share(2.0, num_bytes=1e10, num_dots=1e10) == (0.5, "memory")
    assert CEILINGS.share(4.0, num_bytes=1e10, num_dots=2e11) == (0.5, "dot products")


@pytest.mark.parametrize(
    ("case", "ceiling"),
    [
        (LinearCase(1, 576, 1536), "memory"),
        (LinearCase(64, 576, 192), "dot products"),
        (LinearCase(1, 576, 192, TensorType.F16), "memory"),
        (LinearCase(64, 576, 192, TensorType.F16), None),  # float products have another ceiling
    ],
    ids=str,
)
def test_a_case_is_held_against_the_ceiling_that_applies_to_it(case: LinearCase, ceiling: str | None) -> None:
    time = measure_case("linear", case, CEILINGS, num_samples=1)
    assert time.ceiling == ceiling
    assert (time.share is None) == (ceiling is None)


def test_a_case_is_cold_when_its_copies_fill_the_caches() -> None:
    cases = (LinearCase(1, 576, 1536), LinearCase(64, 576, 192), LinearCase(2, 32, 1, TensorType.Q8_0))
    times = [measure_case("linear", case, CEILINGS, num_samples=1) for case in cases]
    assert [time.is_cold for time in times] == [True, False, False]


def test_a_wrong_result_is_told_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A32: a fast wrong kernel must not look like a fast kernel."""
    monkeypatch.setattr(kernel_runs, "rms_norm", lambda x, weight, eps: x + np.float32(1))
    command = ["bench", "kernels", "--isa", ISAS[0], "--runs", "1", "--kernel", "rms_norm", "--match"]
    monkeypatch.setattr(kernels, "measure_ceilings", lambda isa, n: replace(CEILINGS, isa=isa, num_threads=n))
    assert main([*command, "tokens 1, width 576"]) == 1
    assert "WRONG: error" in capsys.readouterr().out


def test_json_holds_the_machine_its_ceilings_and_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "measure_ceilings", lambda isa, n: replace(CEILINGS, isa=isa, num_threads=n))
    assert main(["bench", "kernels", "--kernel", "rope", "--threads", "1", "--runs", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["machine"]["processor"]
    assert [c["isa"] for c in told["ceilings"]] == ISAS
    assert len(told["kernels"]) == len(ISAS) * len(KERNELS["rope"].step_cases)
    assert set(told["kernels"][0]) == {field.name for field in fields(kernels.KernelTime)}
