"""Every architecture computes what transformers computes, from the files of Hugging Face and from GGUF."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pagoda.backends.reference import ReferenceBackend
from pagoda.models import build_program
from pagoda.models.config import ModelConfig
from pagoda.weights.hf_config import model_config_from_hf
from pagoda.weights.program_tensors import hf_tensors
from tests.models.run_program import PagedModel, run_chunked
from tests.models.tiny_checkpoints import ArrayWeights
from tests.models.tiny_hf import TINY_HF, TinyHF, hf_token_ids, hf_weights

GOLDEN = Path(__file__).parents[1] / "golden" / "models"


def golden_logits(name: str) -> NDArray[np.float32]:
    with np.load(GOLDEN / f"{name}.npz") as stored:
        assert stored["token_ids"].tolist() == hf_token_ids(TINY_HF[name])
        return stored["logits"]


def config_of(model: TinyHF) -> ModelConfig:
    return model_config_from_hf(model.config, hf_weights(model).keys(), model.num_tokens)


def weights_of(model: TinyHF) -> ArrayWeights:
    stored = ArrayWeights.of(hf_weights(model)).tensors
    return ArrayWeights(hf_tensors(stored, config_of(model)))


@cache
def reference(name: str) -> PagedModel:
    model = TINY_HF[name]
    return PagedModel.compile(
        ReferenceBackend(kv_fill=float("nan")),
        build_program(config_of(model)),
        weights_of(model),
        num_tokens=200,
        kv_dtype="f32",
    )


@pytest.mark.parametrize("name", TINY_HF)
@pytest.mark.parametrize("chunk", [None, 1, 7, 33])
def test_logits_equal_those_of_transformers(name: str, chunk: int | None) -> None:
    """A38 (soft caps), A37 and A49 (rope scaling): whole prefill, chunks and decode, past windows and the
    original rope length."""
    (logits,) = run_chunked(reference(name), [hf_token_ids(TINY_HF[name])], chunk)
    np.testing.assert_allclose(logits, golden_logits(name), rtol=0, atol=1e-4)
