"""The yardsticks themselves: a helper that always says yes would pass every model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagoda.backends.reference import ReferenceBackend
from pagoda.models import build_program
from tests.models.nll import disagreements, greedy_matches_until_gap, mean_nll, position_nll
from tests.models.run_program import PagedModel, greedy
from tests.models.tiny_checkpoints import TINY_MODELS, ArrayWeights, model_config, weights

TINY = TINY_MODELS["qwen2"]


@pytest.fixture(scope="module")
def paged() -> PagedModel:
    program = build_program(model_config(TINY))
    backend = ReferenceBackend()
    return PagedModel.compile(
        backend, program, ArrayWeights.of(weights(TINY)), num_tokens=200, kv_dtype="f32"
    )


@pytest.mark.parametrize("chunk", [1, 13, 200])
def test_likelihood_is_the_log_softmax_of_the_logits(paged: PagedModel, chunk: int) -> None:
    with np.load(Path(__file__).parents[1] / "golden" / "models" / "qwen2.npz") as stored:
        ids, logits = stored["token_ids"].tolist(), stored["logits"].astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = [-np.log(probabilities[i, token]) for i, token in enumerate(ids[1:])]
    np.testing.assert_allclose(position_nll(paged, ids, chunk), expected, atol=1e-4)
    assert mean_nll(paged, ids, chunk) == pytest.approx(np.mean(expected), abs=1e-5)


def test_texts_are_compared_up_to_the_first_close_call() -> None:
    gaps = [1.0, 0.5, 0.1, 2.0]
    assert greedy_matches_until_gap([1, 2, 3, 4], [1, 2, 3, 4], gaps)
    assert greedy_matches_until_gap([1, 2, 9, 9], [1, 2, 3, 4], gaps)
    assert not greedy_matches_until_gap([1, 9, 3, 4], [1, 2, 3, 4], gaps)
    assert not greedy_matches_until_gap([1, 2, 9, 4], [1, 2, 3, 4], gaps, min_gap=0.05)
    assert not greedy_matches_until_gap([1, 2], [1, 2, 3], [1.0, 1.0, 1.0])


def test_every_clear_choice_is_judged(paged: PagedModel) -> None:
    prompt = [3, 1, 4, 1, 5]
    (answer,) = greedy(paged, [prompt], 10)
    assert disagreements(paged, prompt, answer, [1.0] * 10) == []
    assert disagreements(paged, prompt, answer, [1.0] * 10, chunk=4) == []
    wrong = [*answer[:-1], (answer[-1] + 1) % TINY.vocab_size]
    assert disagreements(paged, prompt, wrong, [1.0] * 10) == [9]
    assert disagreements(paged, prompt, wrong, [1.0] * 9 + [0.1]) == []
