"""The reference backend computes what transformers computes, however the tokens arrive."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pagoda.backends.reference import ReferenceBackend
from pagoda.models import build_program
from tests.models.run_program import PagedModel, greedy, run_chunked
from tests.models.tiny_checkpoints import TINY_MODELS, ArrayWeights, model_config, token_ids, weights

GOLDEN = Path(__file__).parents[1] / "golden" / "models"


def golden_logits(name: str) -> NDArray[np.float32]:
    with np.load(GOLDEN / f"{name}.npz") as stored:
        assert stored["token_ids"].tolist() == token_ids(TINY_MODELS[name], len(stored["token_ids"]))
        return stored["logits"]


@cache
def paged_model(name: str, kv_dtype: str = "f32", block_size: int = 16, seed: int = 0) -> PagedModel:
    model = TINY_MODELS[name]
    return PagedModel.compile(
        ReferenceBackend(kv_fill=float("nan")),
        build_program(model_config(model)),
        ArrayWeights.of(weights(model)),
        num_tokens=600,
        kv_dtype=kv_dtype,
        block_size=block_size,
        seed=seed,
    )


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("chunk", [None, 1, 7, 16, 33])
def test_logits_equal_those_of_transformers(name: str, chunk: int | None) -> None:
    """Whole prefill, chunked prefill and decode (chunk 1), past the window and the original rope length."""
    golden = golden_logits(name)
    (logits,) = run_chunked(paged_model(name), [token_ids(TINY_MODELS[name], len(golden))], chunk)
    np.testing.assert_allclose(logits, golden, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_do_not_depend_on_company(name: str) -> None:
    """A19: steps that mix first chunks, later chunks starting inside a block, and single tokens."""
    golden = golden_logits(name)
    ids = token_ids(TINY_MODELS[name], len(golden))
    prompts = [ids, ids[:1], ids[:23], ids[5:], ids[:47]]
    together = run_chunked(paged_model(name), prompts, 11)
    for prompt, logits in zip(prompts, together, strict=True):
        (alone,) = run_chunked(paged_model(name), [prompt])
        np.testing.assert_allclose(logits, alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
def test_logits_do_not_depend_on_block_size(block_size: int) -> None:
    golden = golden_logits("llama-window")
    ids = token_ids(TINY_MODELS["llama-window"], len(golden))
    paged = paged_model("llama-window", block_size=block_size)
    np.testing.assert_allclose(run_chunked(paged, [ids], 13)[0], golden, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [16, 20, 21, 64, None])
def test_chunks_longer_than_the_window_lose_no_key(chunk: int | None) -> None:
    """A20: the first queries of a chunk still see the keys just before it."""
    golden = golden_logits("llama-window")
    ids = token_ids(TINY_MODELS["llama-window"], len(golden))
    np.testing.assert_allclose(run_chunked(paged_model("llama-window"), [ids], chunk)[0], golden, atol=1e-4)


def test_half_precision_kv_stays_close() -> None:
    for name in ("llama-gqa", "qwen2"):
        golden = golden_logits(name)
        ids = token_ids(TINY_MODELS[name], len(golden))
        (logits,) = run_chunked(paged_model(name, kv_dtype="f16"), [ids])
        error = np.sqrt(np.mean((logits - golden) ** 2) / np.mean(golden**2))
        assert 1e-5 < error < 5e-3  # rounding is there, and it is small


def test_greedy_text_does_not_depend_on_chunks_or_company() -> None:
    """A15: the first token after a resumed prefill is that of a whole one."""
    ids = token_ids(TINY_MODELS["llama-gqa"], 60)
    prompts = [ids[:31], ids[10:50], ids[:1]]
    paged = paged_model("llama-gqa")
    together = greedy(paged, prompts, 12, chunk=9)
    assert together == [greedy(paged, [prompt], 12)[0] for prompt in prompts]
