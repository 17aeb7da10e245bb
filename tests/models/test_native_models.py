"""The native backend on real models: what 8-bit activations may cost against transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from pagoda.backends.cpu import CPUBackend
from pagoda.models import build_program
from pagoda.weights.checkpoint import load_checkpoint
from tests.models.nll import disagreements, greedy_matches_until_gap, position_nll
from tests.models.run_program import Chunk, PagedModel, greedy
from tests.real_models import GEMMA3, QWEN2_5_CODER, SMOLLM2, real_model

pytestmark = pytest.mark.real_model

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
FILES = {"smollm2-135m": SMOLLM2, "qwen2.5-0.5b": QWEN2_5_CODER, "gemma3-270m": GEMMA3}
NUM_FAST_TOKENS = 256
MIN_GAP = 0.3  # where transformers' two best logits are nearer, rounding may choose the other


class NativeModel(NamedTuple):
    paged: PagedModel
    golden: dict[str, NDArray[np.generic]]


@pytest.fixture(scope="module", params=FILES)
def native(request: pytest.FixtureRequest) -> Iterator[NativeModel]:
    with load_checkpoint(real_model(FILES[request.param])) as checkpoint:
        program = build_program(checkpoint.config)
        paged = PagedModel.compile(CPUBackend(num_threads=2), program, checkpoint, num_tokens=2000)
    golden = dict(np.load(GOLDEN / f"{request.param}.npz"))
    yield NativeModel(paged, golden)


def check_nll(native: NativeModel, num_tokens: int) -> None:
    ids = native.golden["text_token_ids"][:num_tokens].tolist()
    expected = native.golden["text_nll"][: num_tokens - 1].mean()
    assert position_nll(native.paged, ids, chunk=128).mean() == pytest.approx(expected, rel=0.005)


def test_mean_nll_of_a_text_is_within_half_a_percent(native: NativeModel) -> None:
    check_nll(native, NUM_FAST_TOKENS)


@pytest.mark.slow
def test_mean_nll_of_the_whole_text_is_within_half_a_percent(native: NativeModel) -> None:
    check_nll(native, 1500)


def test_greedy_text_equals_the_reference_until_the_choice_is_close(native: NativeModel) -> None:
    prompts = [native.golden[f"prompt_{i}"].tolist() for i in range(len(native.golden["greedy_ids"]))]
    answers = greedy(native.paged, prompts, native.golden["greedy_ids"].shape[1])
    for answer, ids, gaps in zip(
        answers, native.golden["greedy_ids"], native.golden["greedy_gaps"], strict=True
    ):
        assert greedy_matches_until_gap(answer, ids.tolist(), gaps.tolist(), MIN_GAP)


@pytest.mark.slow
def test_every_clear_choice_is_that_of_the_reference(native: NativeModel) -> None:
    """Also those after a close one, given the tokens that the reference chose before."""
    golden = native.golden
    for i, (ids, gaps) in enumerate(zip(golden["greedy_ids"], golden["greedy_gaps"], strict=True)):
        prompt = golden[f"prompt_{i}"].tolist()
        assert disagreements(native.paged, prompt, ids.tolist(), gaps.tolist(), MIN_GAP, chunk=128) == []


def test_chunks_and_blocks_let_go_behind_the_window_change_nothing() -> None:
    """A20: the windowed layers of Gemma 3, whose first blocks are given away before the last chunk runs."""
    with load_checkpoint(real_model(GEMMA3)) as checkpoint:
        program = build_program(checkpoint.config)
        paged = PagedModel.compile(CPUBackend(num_threads=2), program, checkpoint, num_tokens=700)
    ids = np.load(GOLDEN / "gemma3-270m.npz")["text_token_ids"][:640].tolist()
    assert checkpoint.config.windows[:6] == (512,) * 5 + (None,)
    last: list[NDArray[np.float32]] = []
    for chunk in (640, 128, 33):
        sequence = paged.start()
        for start in range(0, len(ids), chunk):
            (logits,) = paged.step([Chunk(sequence, ids[start : start + chunk], "last")])
        last.append(logits)
        let_go = [sum(block < 0 for block in table) for table in sequence.block_tables]
        if chunk == 33:  # the last one starts at 627
            assert (min(let_go), max(let_go)) == (0, (627 - 511) // 16)
        paged.finish(sequence)
    np.testing.assert_array_equal(last[0], last[1])
    np.testing.assert_array_equal(last[0], last[2])
