"""The reference backend on real models predicts what transformers predicts from the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from pagoda.backends.reference import ReferenceBackend
from pagoda.models import build_program
from pagoda.weights.checkpoint import load_checkpoint
from tests.models.nll import disagreements, greedy_matches_until_gap, position_nll
from tests.models.run_program import PagedModel, greedy
from tests.real_models import QWEN2_5_CODER, SMOLLM2, real_model

pytestmark = pytest.mark.real_model

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
NUM_FAST_TOKENS = 256


class RealModel(NamedTuple):
    paged: PagedModel
    golden: Mapping[str, NDArray[Any]]


@pytest.fixture(scope="module", params=[(SMOLLM2, "smollm2-135m"), (QWEN2_5_CODER, "qwen2.5-0.5b")])
def real(request: pytest.FixtureRequest) -> Iterator[RealModel]:
    file, golden_name = request.param
    with load_checkpoint(real_model(file)) as checkpoint:
        paged = PagedModel.compile(
            ReferenceBackend(),
            build_program(checkpoint.config),
            checkpoint,
            num_tokens=1500,
            kv_dtype="f32",
        )
    with np.load(GOLDEN / f"{golden_name}.npz") as stored:
        yield RealModel(paged, {key: stored[key] for key in stored.files})
    paged.model.close()


def prompts(golden: Mapping[str, NDArray[Any]]) -> list[list[int]]:
    return [golden[f"prompt_{i}"].tolist() for i in range(len(golden["greedy_ids"]))]


def test_text_is_as_likely_as_for_transformers(real: RealModel) -> None:
    check_text(real, NUM_FAST_TOKENS)


@pytest.mark.slow
def test_long_text_is_as_likely_as_for_transformers(real: RealModel) -> None:
    check_text(real, len(real.golden["text_token_ids"]))


def check_text(real: RealModel, num_tokens: int) -> None:
    """A39, A41: q, k, v biases and the tied head are applied; without them no text is likely."""
    ids = real.golden["text_token_ids"][:num_tokens].tolist()
    nll = position_nll(real.paged, ids, chunk=100)
    golden = real.golden["text_nll"][: num_tokens - 1]
    assert abs(nll.mean() - golden.mean()) < 1e-3
    np.testing.assert_allclose(nll, golden, rtol=0, atol=1e-2)
    assert nll.mean() < 4.0 < math.log(real.paged.model.program.config.vocab_size) - 0.5  # type: ignore[attr-defined]


def test_every_greedy_choice_is_that_of_transformers(real: RealModel) -> None:
    """Given the same tokens before, wherever transformers' own choice was not within rounding."""
    short = [i for i, prompt in enumerate(prompts(real.golden)) if len(prompt) < 100]
    for i in short:
        ids, gaps = real.golden["greedy_ids"][i].tolist(), real.golden["greedy_gaps"][i].tolist()
        assert disagreements(real.paged, prompts(real.golden)[i], ids, gaps, min_gap=0.01) == []


def test_greedy_text_is_that_of_transformers(real: RealModel) -> None:
    """Prefill in chunks, then decode one token at a time with all prompts in one batch."""
    num_new_tokens = 12
    answers = greedy(real.paged, prompts(real.golden)[:5], num_new_tokens, chunk=10)
    golden_ids = real.golden["greedy_ids"][:5, :num_new_tokens].tolist()
    golden_gaps = real.golden["greedy_gaps"][:5, :num_new_tokens].tolist()
    for ids, expected, gaps in zip(answers, golden_ids, golden_gaps, strict=True):
        assert greedy_matches_until_gap(ids, expected, gaps, min_gap=0.01)


@pytest.mark.slow
def test_greedy_choices_after_a_long_prompt(real: RealModel) -> None:
    ids, gaps = real.golden["greedy_ids"][-1].tolist(), real.golden["greedy_gaps"][-1].tolist()
    assert disagreements(real.paged, prompts(real.golden)[-1], ids, gaps, min_gap=0.01, chunk=64) == []
