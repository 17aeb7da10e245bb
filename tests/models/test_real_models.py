"""The reference backend on real models predicts what transformers predicts from the same weights."""

from __future__ import annotations

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
from tests.real_models import GEMMA3, QWEN2_5_CODER, SMOLLM2, real_model

pytestmark = pytest.mark.real_model

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
NUM_FAST_TOKENS = 160


class RealModel(NamedTuple):
    paged: PagedModel
    golden: Mapping[str, NDArray[Any]]


FILES = {"smollm2-135m": SMOLLM2, "qwen2.5-0.5b": QWEN2_5_CODER, "gemma3-270m": GEMMA3}


# Others take half a minute in numpy; the native backend answers to the same golden files in the fast suite.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2.5-0.5b", "gemma3-270m")]


@pytest.fixture(scope="module", params=["smollm2-135m", *SLOW])
def real(request: pytest.FixtureRequest) -> Iterator[RealModel]:
    with load_checkpoint(real_model(FILES[request.param])) as checkpoint:
        paged = PagedModel.compile(
            ReferenceBackend(),
            build_program(checkpoint.config),
            checkpoint,
            num_tokens=1500,
            kv_dtype="f32",
        )
    with np.load(GOLDEN / f"{request.param}.npz") as stored:
        yield RealModel(paged, {key: stored[key] for key in stored.files})
    paged.model.close()


def answers(golden: Mapping[str, NDArray[Any]]) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, golden answer and its gaps, prompt after prompt; the last prompt is long."""
    ids, gaps = golden["greedy_ids"].tolist(), golden["greedy_gaps"].tolist()
    return [(golden[f"prompt_{i}"].tolist(), ids[i], gaps[i]) for i in range(len(ids))]


def test_text_is_as_likely_as_for_transformers(real: RealModel) -> None:
    check_text(real, NUM_FAST_TOKENS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whole_text_is_as_likely_as_for_transformers(real: RealModel) -> None:
    check_text(real, len(real.golden["text_token_ids"]))


def check_text(real: RealModel, num_tokens: int) -> None:
    """A39, A41: q, k, v biases and the tied head are applied; without them no text is likely."""
    ids = real.golden["text_token_ids"][:num_tokens].tolist()
    nll = position_nll(real.paged, ids, chunk=100)
    golden = real.golden["text_nll"][: num_tokens - 1]
    assert abs(nll.mean() - golden.mean()) < 1e-3
    np.testing.assert_allclose(nll, golden, rtol=0, atol=1e-2)
    assert nll.mean() < 4.5  # guessing blindly costs the log of the vocabulary, 10.8 or more


def test_greedy_choices_are_those_of_transformers(real: RealModel) -> None:
    """Given the same tokens before, wherever transformers' own choice was not within rounding."""
    for prompt, ids, gaps in (answers(real.golden)[i] for i in (0, 3)):
        assert disagreements(real.paged, prompt, ids[:24], gaps[:24], min_gap=0.01) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_choices_after_every_prompt(real: RealModel) -> None:
    for prompt, ids, gaps in answers(real.golden):
        assert disagreements(real.paged, prompt, ids, gaps, min_gap=0.01, chunk=64) == []


def test_greedy_text_is_that_of_transformers(real: RealModel) -> None:
    check_greedy_text(real, num_prompts=2, num_new_tokens=4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_long_greedy_text_is_that_of_transformers(real: RealModel) -> None:
    check_greedy_text(real, num_prompts=5, num_new_tokens=64)


def check_greedy_text(real: RealModel, num_prompts: int, num_new_tokens: int) -> None:
    """Prefill in chunks, then decode one token at a time with all prompts in one batch."""
    short = answers(real.golden)[:num_prompts]
    texts = greedy(real.paged, [prompt for prompt, _, _ in short], num_new_tokens, chunk=10)
    for text, (_, ids, gaps) in zip(texts, short, strict=True):
        assert greedy_matches_until_gap(text, ids[:num_new_tokens], gaps[:num_new_tokens], min_gap=0.01)
