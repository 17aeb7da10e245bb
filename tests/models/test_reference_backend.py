"""Promises of the backend contract, on the backend that defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.backends.reference import ReferenceBackend, ReferenceModel
from pagoda.core.step import BlockCopy
from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.models import build_program
from pagoda.models.config import ModelConfig
from pagoda.runtime.forward_batch import ForwardBatch
from tests.models.run_program import Chunk, PagedModel, run_chunked
from tests.models.tiny_checkpoints import TINY_MODELS, ArrayWeights, model_config, token_ids, weights

TINY = TINY_MODELS["llama-gqa"]
CONFIG = model_config(TINY)
IDS = token_ids(TINY, 64)
NAN = float("nan")


def compile_tiny(
    config: ModelConfig = CONFIG, *, kv_fill: float = NAN, kv_dtype: str = "f32", seed: int = 0
) -> PagedModel:
    return PagedModel.compile(
        ReferenceBackend(kv_fill=kv_fill),
        build_program(config),
        ArrayWeights.of(weights(TINY)),
        num_tokens=400,
        kv_dtype=kv_dtype,
        seed=seed,
    )


def test_fresh_kv_leaves_no_trace() -> None:
    """What a block held before, and which block it is, changes no bit of the result."""
    filled, zeroed = compile_tiny(kv_fill=NAN), compile_tiny(kv_fill=0.0, seed=1)
    for chunk in (None, 5):
        a, b = run_chunked(filled, [IDS, IDS[:9]], chunk), run_chunked(zeroed, [IDS, IDS[:9]], chunk)
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_blocks_may_be_reused_with_what_they_hold() -> None:
    paged = compile_tiny()
    (first,) = run_chunked(paged, [IDS], 16)
    run_chunked(paged, [IDS[::-1]] * 5, 16)
    assert np.array_equal(run_chunked(paged, [IDS], 16)[0], first)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_same_logits(data: st.DataObject) -> None:
    """Sequences advance in any order and by any number of tokens; each step mixes any of them."""
    config = replace(CONFIG, windows=data.draw(st.sampled_from([(None, None), (7, None), (20, 3)])))
    paged = compile_tiny(config)
    prompts = [IDS, IDS[3:40], IDS[:17]]
    alone = run_chunked(paged, prompts, alone=True)
    sequences = [paged.start() for _ in prompts]
    while True:
        chunks, expected = [], []
        for prompt, sequence, logits in zip(prompts, sequences, alone, strict=True):
            start = sequence.num_computed_tokens
            count = data.draw(st.integers(0, min(25, len(prompt) - start)))
            if count:
                chunks.append(Chunk(sequence, prompt[start : start + count]))
                expected.append(logits[start : start + count])
        if chunks:
            for result, wanted in zip(paged.step(chunks), expected, strict=True):
                np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-4)
        elif all(s.num_computed_tokens == len(p) for s, p in zip(sequences, prompts, strict=True)):
            break
        else:
            for s, p in zip(sequences, prompts, strict=True):
                if s.num_computed_tokens < len(p):
                    paged.step([Chunk(s, p[s.num_computed_tokens :][:1])])


def test_layer_groups_have_their_own_blocks_and_windows() -> None:
    """A windowed layer sees its window and no more; a window longer than the text changes nothing."""
    (full,) = run_chunked(compile_tiny(), [IDS])
    (wide,) = run_chunked(compile_tiny(replace(CONFIG, windows=(64, None))), [IDS], 10)
    (narrow,) = run_chunked(compile_tiny(replace(CONFIG, windows=(8, None))), [IDS], 10)
    np.testing.assert_allclose(wide, full, rtol=0, atol=1e-4)
    np.testing.assert_allclose(narrow[:8], full[:8], rtol=0, atol=1e-4)
    assert np.abs(narrow[8:] - full[8:]).max(axis=1).min() > 1e-3


def test_both_soft_caps_are_applied() -> None:
    """A38: a small cap of the logits bounds them; a small cap of the scores changes them."""
    (plain,) = run_chunked(compile_tiny(), [IDS])
    (capped,) = run_chunked(compile_tiny(replace(CONFIG, final_softcap=0.5)), [IDS])
    np.testing.assert_allclose(capped, 0.5 * np.tanh(plain / 0.5), rtol=0, atol=1e-4)
    (flat,) = run_chunked(compile_tiny(replace(CONFIG, attention_softcap=0.1)), [IDS])
    assert np.abs(flat - plain).max() > 1e-2


def test_logits_are_those_of_the_rows_asked_for() -> None:
    paged = compile_tiny()
    a, b, c = (paged.start() for _ in range(3))
    full = run_chunked(paged, [IDS[:20]])[0]
    steps = paged.step([Chunk(a, IDS[:20], "last"), Chunk(b, IDS[:20], "none"), Chunk(c, IDS[:20], "all")])
    assert [len(logits) for logits in steps] == [1, 0, 20]
    np.testing.assert_allclose(steps[0][0], full[-1], rtol=0, atol=1e-4)
    np.testing.assert_allclose(steps[2], full, rtol=0, atol=1e-4)


def test_copied_blocks_continue_like_their_source() -> None:
    paged = compile_tiny()
    source, fork = paged.start(), paged.start()
    paged.step([Chunk(source, IDS[:40])])
    fork.num_computed_tokens = 40
    copies = []
    for group, table in enumerate(source.block_tables):
        fork.block_tables[group] = [paged.free_blocks[group].pop() for _ in table]
        copies += [BlockCopy(group, s, t) for s, t in zip(table, fork.block_tables[group], strict=True)]
    paged.model.copy_blocks(copies)
    paged.step([Chunk(source, IDS[:10])])
    (continued,) = paged.step([Chunk(fork, IDS[40:])])
    np.testing.assert_allclose(continued, run_chunked(paged, [IDS])[0][40:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
def test_resident_kv_is_that_of_the_blocks_written(kv_dtype: str) -> None:
    paged = compile_tiny(kv_dtype=kv_dtype)
    assert paged.model.kv_bytes_resident() == 0
    sequence = paged.start()
    paged.step([Chunk(sequence, IDS[:17])])
    assert paged.model.kv_bytes_resident() == 2 * paged.spec.block_bytes(0)
    paged.step([Chunk(sequence, IDS[17:18])])
    assert paged.model.kv_bytes_resident() == 2 * paged.spec.block_bytes(0)
    paged.model.close()
    assert paged.model.kv_bytes_resident() == 0


def test_files_that_do_not_fit_the_program_are_refused() -> None:
    """A39: one tensor too many is a bias left out, and one too few is a broken file."""
    arrays = weights(TINY)
    program, spec = build_program(CONFIG), CONFIG.kv_cache_spec()
    extra = arrays | {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    missing = {name: a for name, a in arrays.items() if name != "blk.1.ffn_up.weight"}
    transposed = arrays | {"blk.1.ffn_up.weight": arrays["blk.1.ffn_up.weight"].T}
    for wrong, name in ((extra, "attn_q.bias"), (missing, "ffn_up"), (transposed, "ffn_up")):
        with pytest.raises(ModelFileError, match=name):
            ReferenceBackend().compile(program, ArrayWeights.of(wrong), spec, [4])


def test_kv_types_it_does_not_have_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="bf16"):
        compile_tiny(kv_dtype="bf16")


Change = Callable[[ForwardBatch], ForwardBatch]


def int32(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda b: replace(b, token_ids=int32([0, 61, 0])), "token_ids"),
        (lambda b: replace(b, token_ids=int32([0, -1, 0])), "token_ids"),
        (lambda b: replace(b, positions=int32([0, 2, 1])), "positions"),
        (lambda b: replace(b, seq_lens=int32([4])), "positions"),
        (lambda b: replace(b, query_start_loc=int32([0, 2])), "query_start_loc"),
        (lambda b: replace(b, slot_mapping=(int32([16, 17, 17]),)), "slot_mapping"),
        (lambda b: replace(b, slot_mapping=(int32([0, 1, 2]),)), "slot_mapping"),
        (lambda b: replace(b, block_tables=(int32([[9]]),)), "block_tables"),
        (lambda b: replace(b, block_tables=(int32([[-1]]),)), "block_tables"),
        (lambda b: replace(b, block_tables=()), "block_tables"),
        (lambda b: replace(b, logits_rows=int32([3])), "logits_rows"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(change: Change, name: str) -> None:
    """A19: a slot that is not that of the token's position is an error, not another request's memory."""
    model = ReferenceBackend().compile(
        build_program(CONFIG), ArrayWeights.of(weights(TINY)), CONFIG.kv_cache_spec(), [4]
    )
    batch = ForwardBatch(
        token_ids=int32([5, 6, 7]),
        positions=int32([0, 1, 2]),
        query_start_loc=int32([0, 3]),
        seq_lens=int32([3]),
        block_tables=(int32([[1]]),),
        slot_mapping=(int32([16, 17, 18]),),
        logits_rows=int32([2]),
    )
    assert isinstance(model, ReferenceModel)
    with pytest.raises(ValueError, match=name):
        model.forward(change(batch))
    assert model.kv_bytes_resident() == 0
    assert np.isfinite(model.forward(batch)).all()


def test_two_requests_may_not_write_one_slot() -> None:
    """I5."""
    paged = compile_tiny()
    a, b = paged.start(), paged.start()
    paged.step([Chunk(a, IDS[:3])])
    b.block_tables, b.num_computed_tokens = [list(t) for t in a.block_tables], 3
    with pytest.raises(ValueError, match="slot_mapping"):
        paged.step([Chunk(a, [1]), Chunk(b, [2])])
