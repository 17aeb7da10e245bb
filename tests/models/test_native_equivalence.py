"""On the native backend a request's logits are bitwise the same whatever runs beside it."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda import _native
from pagoda.backends.cpu import CPUBackend
from pagoda.models import build_program
from pagoda.runtime.forward_batch import Float32Array
from pagoda.weights.checkpoint import load_checkpoint
from tests.models.run_program import Chunk, PagedModel, run_chunked
from tests.real_models import SMOLLM2, real_model

CHUNKS = (1, 7, 15, 16, 17, 64)
QUICK_BATCH_SIZES = (2, 3, 4, 5, 8, 9, 33)


def smollm2(num_threads: int, isa: str | None = None) -> PagedModel:
    with load_checkpoint(real_model(SMOLLM2)) as checkpoint:
        paged = PagedModel.compile(
            CPUBackend(num_threads=num_threads, isa=isa),
            build_program(checkpoint.config),
            checkpoint,
            num_tokens=1600,
            seed=num_threads,
        )
    paged.model.native.poison()  # fresh memory holds NaN: nothing may be read before it is written
    return paged


@pytest.fixture(scope="module")
def one_thread() -> PagedModel:
    return smollm2(1)


@pytest.fixture(scope="module")
def two_threads() -> PagedModel:
    return smollm2(2)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


PROMPTS = [prompt(2 + 3 * (i % 5), seed=i) for i in range(33)]


def assert_same_bits(a: Float32Array, b: Float32Array) -> None:
    assert np.isfinite(a).all()
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def last_logits(paged: PagedModel, ids: list[int], chunk: int) -> Float32Array:
    """Logits after the last token, the prompt cut into chunks."""
    sequence = paged.start()
    for start in range(0, len(ids), chunk):
        (logits,) = paged.step([Chunk(sequence, ids[start : start + chunk], "last")])
    paged.finish(sequence)
    return logits


@pytest.fixture(scope="module")
def alone(one_thread: PagedModel) -> list[Float32Array]:
    return run_chunked(one_thread, PROMPTS, alone=True)


@pytest.mark.real_model
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_prefill_equals_whole(one_thread: PagedModel, two_threads: PagedModel, chunk: int) -> None:
    ids = prompt(70, seed=1)
    (whole,) = run_chunked(one_thread, [ids])
    for paged in (one_thread, two_threads):
        assert_same_bits(whole, run_chunked(paged, [ids], chunk)[0])


@pytest.mark.real_model
@pytest.mark.parametrize(
    "batch_size",
    [pytest.param(n, marks=[] if n in QUICK_BATCH_SIZES else pytest.mark.slow) for n in range(2, 34)],
)
def test_alone_equals_in_a_batch(
    alone: list[Float32Array], one_thread: PagedModel, two_threads: PagedModel, batch_size: int
) -> None:
    for paged in (one_thread, two_threads):
        for chunk in (None, 1):
            together = run_chunked(paged, PROMPTS[:batch_size], chunk)
            for a, b in zip(alone, together, strict=False):
                assert_same_bits(a, b)


@pytest.mark.real_model
def test_a_long_context_split_over_threads_equals_one_thread(
    one_thread: PagedModel, two_threads: PagedModel
) -> None:
    """A single token at a long context is split over key chunks when there are threads to feed."""
    ids = prompt(701, seed=2)
    whole = last_logits(one_thread, ids, 701)
    for paged in (one_thread, two_threads):
        sequence = paged.start()
        paged.step([Chunk(sequence, ids[:700], "none")])
        (logits,) = paged.step([Chunk(sequence, ids[700:], "last")])
        paged.finish(sequence)
        assert_same_bits(whole, logits)


@pytest.mark.real_model
def test_every_instruction_set_gives_the_same_logits(one_thread: PagedModel) -> None:
    ids = prompt(20, seed=3)
    (expected,) = run_chunked(one_thread, [ids])
    for isa in _native.isas():
        assert_same_bits(expected, run_chunked(smollm2(1, isa), [ids])[0])


@pytest.mark.real_model
def test_reused_blocks_hold_nothing_of_their_last_owner(two_threads: PagedModel) -> None:
    ids = prompt(40, seed=4)
    first = last_logits(two_threads, ids, 40)
    last_logits(two_threads, prompt(1500, seed=5), 500)
    assert_same_bits(first, last_logits(two_threads, ids, 40))
