"""Every architecture computes what transformers computes, from the files of Hugging Face and from GGUF."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pagoda.backends.cpu import CPUBackend
from pagoda.backends.reference import ReferenceBackend
from pagoda.models import build_program
from pagoda.weights.checkpoint import load_checkpoint
from pagoda.weights.tensor import TensorType
from tests.models.load_tiny_hf import config_of, weights_of
from tests.models.nll import disagreements
from tests.models.run_program import PagedModel, greedy, run_chunked
from tests.models.tiny_gguf import NOT_IN_GGUF, write_tiny_gguf
from tests.models.tiny_hf import TINY_HF, hf_token_ids

GOLDEN = Path(__file__).parents[1] / "golden" / "models"


def golden_logits(name: str) -> NDArray[np.float32]:
    with np.load(GOLDEN / f"{name}.npz") as stored:
        assert stored["token_ids"].tolist() == hf_token_ids(TINY_HF[name])
        return stored["logits"]


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


def native(name: str, tensor_type: TensorType = TensorType.F32, num_threads: int = 2) -> PagedModel:
    model = TINY_HF[name]
    return PagedModel.compile(
        CPUBackend(num_threads=num_threads),
        build_program(config_of(model)),
        weights_of(model, tensor_type),
        num_tokens=800,
    )


def relative_error(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Root mean square of the error over that of the logits, each row around its mean."""
    spread = expected - expected.mean(axis=1, keepdims=True)
    return float(np.sqrt(np.mean((logits - expected) ** 2) / np.mean(spread**2)))


@pytest.mark.parametrize("name", TINY_HF)
def test_native_logits_with_weights_in_floats(name: str) -> None:
    """Keys and values are in half precision: a part in a thousand or two."""
    paged = native(name)
    golden = golden_logits(name)
    ids = hf_token_ids(TINY_HF[name])
    (whole,) = run_chunked(paged, [ids])
    assert relative_error(whole, golden) < 2e-3


@pytest.mark.parametrize("name", TINY_HF)
def test_native_logits_with_8_bit_weights(name: str) -> None:
    """Activations are rounded to 8 bits too, which these models feel more than trained ones."""
    model = TINY_HF[name]
    ids = hf_token_ids(model)
    exact = PagedModel.compile(
        ReferenceBackend(),
        build_program(config_of(model)),
        weights_of(model, TensorType.Q8_0),
        num_tokens=200,
        kv_dtype="f32",
    )
    (expected,) = run_chunked(exact, [ids])
    paged = native(name, TensorType.Q8_0)
    (whole,) = run_chunked(paged, [ids])
    assert relative_error(whole, expected) < 0.05
    for chunk in (1, 7, 33):
        np.testing.assert_array_equal(run_chunked(paged, [ids], chunk)[0], whole)
    company = [ids[:5], ids, ids[:21], ids[3:]]
    np.testing.assert_array_equal(run_chunked(paged, company, 11)[1], whole)


@pytest.mark.parametrize("name", [name for name in TINY_HF if name not in NOT_IN_GGUF])
def test_logits_from_gguf_files_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """D16 (rows of q and k), A35 (rope factors as tensors), fused projections and stacked experts."""
    with load_checkpoint(write_tiny_gguf(tmp_path, TINY_HF[name])) as checkpoint:
        program = build_program(checkpoint.config_for(TINY_HF[name].num_tokens))
        paged = PagedModel.compile(ReferenceBackend(), program, checkpoint, num_tokens=100, kv_dtype="f32")
    (logits,) = run_chunked(paged, [hf_token_ids(TINY_HF[name])])
    np.testing.assert_allclose(logits, golden_logits(name), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["hf-gemma2", "hf-gemma3"])
def test_gemma_from_gguf_differs_in_the_scale_of_queries_only(name: str, tmp_path: Path) -> None:
    """GGUF has no key for `query_pre_attn_scalar`: the head dim stands for it, but in the largest models."""
    model = TINY_HF[name]
    expected = config_of(model)
    with load_checkpoint(write_tiny_gguf(tmp_path, model)) as checkpoint:
        config = replace(checkpoint.config, attention_scale=expected.attention_scale)
        assert checkpoint.config.attention_scale == pytest.approx(24**-0.5)
        paged = PagedModel.compile(
            ReferenceBackend(), build_program(config), checkpoint, num_tokens=100, kv_dtype="f32"
        )
    (logits,) = run_chunked(paged, [hf_token_ids(model)])
    np.testing.assert_allclose(logits, golden_logits(name), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["hf-phi3", "hf-rope-dynamic"])
def test_generating_across_the_trained_length_equals_prefilling_the_whole_text(name: str) -> None:
    """A49: keys from before that point are rotated as those after it."""
    paged = native(name)
    prompt = hf_token_ids(TINY_HF[name])[:20]
    (answer,) = greedy(paged, [prompt], 40)
    assert disagreements(paged, prompt, answer, [1.0] * 40) == []


@pytest.mark.parametrize("name", ["hf-qwen3moe", "hf-mixtral", "hf-phi3", "hf-gpt2"])
def test_quantised_gguf_files_run_natively(name: str, tmp_path: Path) -> None:
    """Stacked experts and fused projections are cut without being unpacked."""
    ids = hf_token_ids(TINY_HF[name])
    logits = []
    with load_checkpoint(write_tiny_gguf(tmp_path, TINY_HF[name], TensorType.Q8_0)) as checkpoint:
        for backend, kv_dtype in ((ReferenceBackend(), "f32"), (CPUBackend(num_threads=2), None)):
            program = build_program(checkpoint.config)
            paged = PagedModel.compile(backend, program, checkpoint, num_tokens=100, kv_dtype=kv_dtype)
            logits += run_chunked(paged, [ids])
    assert relative_error(logits[1], logits[0]) < 0.05
