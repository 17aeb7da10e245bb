"""Arrays of a step, sampling parameters and results, between plain values and a compiled model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.core.cost import KVCacheSpec, LayerGroup
from pagoda.core.step import BlockCopy, SamplingInput, ScheduledRequest, SchedulerOutput
from pagoda.runtime.build_batch import build_forward_batch, check_forward_batch
from pagoda.runtime.forward_batch import Float32Array, ForwardBatch, SampleResult, SamplingBatch
from pagoda.runtime.model_runner import ModelRunner
from pagoda.runtime.sampling_batch import build_sampling_batch
from pagoda.sampling_params import SamplingParams

VOCAB = 32
SPEC = KVCacheSpec((LayerGroup((0,), 1, 8),), block_size=4)


class FakeModel:
    """Logits of a row put `token_id + 1` first; sampling takes the best."""

    def __init__(self) -> None:
        self.copies: list[BlockCopy] = []

    def forward(self, batch: ForwardBatch) -> Float32Array:
        logits = np.zeros((len(batch.logits_rows), VOCAB), np.float32)
        logits[np.arange(len(logits)), (batch.token_ids[batch.logits_rows] + 1) % VOCAB] = 5.0
        return logits

    def sample(self, logits: Float32Array, batch: SamplingBatch) -> SampleResult:
        assert len(logits) == len(batch.seed)
        width = max(0, batch.num_logprobs.max())
        best = logits.argmax(axis=1).astype(np.int32)
        logits[:] = np.nan  # a sampler may use the logits as its own scratch memory
        top = np.tile(np.arange(width, dtype=np.int32), (len(logits), 1))
        return SampleResult(best, np.full(len(best), -0.5, np.float32), top, -top.astype(np.float32) - 1)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.copies.extend(copies)

    def kv_bytes_resident(self) -> int:
        return 0

    def close(self) -> None: ...


def scheduled(
    request_id: str,
    start: int,
    token_ids: Sequence[int],
    *tables: Sequence[int],
    params: SamplingParams | None = None,
    **more: int | None,
) -> ScheduledRequest:
    sampling = SamplingInput(params, 7, array("i", [1]), array("i")) if params else None
    return ScheduledRequest(
        request_id, start, array("i", token_ids), tuple(array("i", t) for t in tables), sampling, **more
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[SchedulerOutput, int]:
    """A step of requests at any start, with block tables drawn without repetition."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    spans = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6))
    num_tables = draw(st.integers(1, 2))
    num_blocks = [-(-(start + length) // block_size) for start, length in spans]
    requests = []
    free = [iter(draw(st.permutations(range(sum(num_blocks))))) for _ in range(num_tables)]
    for i, (start, length) in enumerate(spans):
        tables = [[next(ids) for _ in range(num_blocks[i])] for ids in free]
        params = SamplingParams() if draw(st.booleans()) else None
        requests.append(scheduled(str(i), start, range(length), *tables, params=params))
    return SchedulerOutput(tuple(requests)), block_size


@settings(deadline=None)
@given(steps())
def test_each_token_gets_the_slot_of_its_position(step_and_block_size: tuple[SchedulerOutput, int]) -> None:
    """A19: chunks that start inside a block and decodes share a step; slots are a bijection."""
    step, block_size = step_and_block_size
    batch = build_forward_batch(step, block_size)
    row = 0
    for i, r in enumerate(step.requests):
        assert batch.query_start_loc[i] == row
        assert batch.seq_lens[i] == r.start + len(r.token_ids)
        for position, token_id in enumerate(r.token_ids, r.start):
            assert (batch.token_ids[row], batch.positions[row]) == (token_id, position)
            for group, table in enumerate(r.block_tables):
                expected = table[position // block_size] * block_size + position % block_size
                assert batch.slot_mapping[group][row] == expected
            row += 1
        for group, table in enumerate(r.block_tables):
            assert batch.block_tables[group][i, : len(table)].tolist() == list(table)
            assert (batch.block_tables[group][i, len(table) :] == -1).all()
        if r.sampling:
            assert row - 1 in batch.logits_rows
    assert len(batch.logits_rows) == sum(r.sampling is not None for r in step.requests)
    assert batch.query_start_loc[-1] == row == len(batch.token_ids)
    num_blocks = [sum(len(r.block_tables[g]) for r in step.requests) for g in range(len(batch.slot_mapping))]
    check_forward_batch(batch, block_size, num_blocks)
    for values in (
        batch.token_ids,
        batch.positions,
        batch.seq_lens,
        *batch.slot_mapping,
        *batch.block_tables,
    ):
        assert values.dtype == np.int32


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([scheduled("a", 3, [1, 2], [0])], "shorter|out of bounds"),
        ([scheduled("a", 0, [1, 2], [-1])], "shorter"),
        ([scheduled("a", 0, [1, 2], [9])], "block 9 of 4"),
        ([scheduled("a", 4, [1, 2], [0, 1]), scheduled("b", 5, [1], [0, 1])], "two rows write one slot"),
    ],
)
def test_a_broken_step_is_refused_when_batches_are_checked(
    requests: list[ScheduledRequest], message: str
) -> None:
    """Invariants I5 and I6."""
    runner = ModelRunner(FakeModel(), SPEC, [4], check_batches=True)
    with pytest.raises((AssertionError, IndexError), match=message):
        runner.execute(SchedulerOutput(tuple(requests)))


def test_a_step_without_a_last_token_samples_nothing() -> None:
    output = ModelRunner(FakeModel(), SPEC, [4]).execute(SchedulerOutput((scheduled("a", 0, [1, 2], [0]),)))
    assert output.sampled == {} and output.prompt_logprobs == {}


def test_results_come_back_under_their_own_request() -> None:
    step = SchedulerOutput(
        (
            scheduled("chunk", 0, [1, 2], [0]),
            scheduled("decode", 4, [9], [1, 2], params=SamplingParams()),
            scheduled("logprobs", 0, [3, 4], [3], params=SamplingParams(logprobs=2)),
        )
    )
    output = ModelRunner(FakeModel(), SPEC, [4]).execute(step)
    assert {k: t.token_id for k, t in output.sampled.items()} == {"decode": 10, "logprobs": 5}
    assert output.sampled["decode"].logprob is None and output.sampled["decode"].top_logprobs == ()
    assert output.sampled["logprobs"].logprob == -0.5
    assert output.sampled["logprobs"].top_logprobs == ((0, -1.0), (1, -2.0))


def test_prompt_logprobs_cover_chunk_borders_and_leave_sampling_alone() -> None:
    """Each prompt token but the first has one entry, whatever the chunks."""
    prompt = [3, 4, 9, 10, 11]
    runner = ModelRunner(FakeModel(), SPEC, [4])
    expected = {1: 0, 2: 5, 3: 0, 4: 0}  # 9 does not follow 4
    for border in range(1, 5):
        first = scheduled(
            "a", 0, prompt[:border], [0, 1], num_prompt_logprobs=1, next_prompt_token_id=prompt[border]
        )
        last = scheduled("a", border, prompt[border:], [0, 1], params=SamplingParams(), num_prompt_logprobs=1)
        other = scheduled("b", 1, [7], [2], params=SamplingParams())
        found = []
        for r in (first, last):
            output = runner.execute(SchedulerOutput((other, r)))
            found += output.prompt_logprobs["a"]
            assert output.sampled["b"].token_id == 8
        assert output.sampled["a"].token_id == 12
        assert [(p.position, p.token.token_id) for p in found] == list(enumerate(prompt))[1:]
        for p in found:
            normaliser = np.log(np.exp(5.0) + VOCAB - 1)
            below_best = expected[p.position]
            assert p.token.logprob == pytest.approx(5.0 - below_best - normaliser, abs=1e-5)
            assert p.top_logprobs[0].logprob == pytest.approx(5.0 - normaliser, abs=1e-5)


def test_the_penalty_history_has_each_token_once_with_its_count_in_the_output() -> None:
    """B39 and B41: unique ids, the whole history, counts of the output only."""
    row = SamplingInput(
        SamplingParams(repetition_penalty=1.2), 1, array("i", [5, 5, 2, 9]), array("i", [9, 9, 1])
    )
    plain = SamplingInput(SamplingParams(), 1, array("i", [5]), array("i", [9]))
    batch = build_sampling_batch([plain, row, plain])
    assert batch.history_start_loc.tolist() == [0, 0, 4, 4]
    assert batch.history_token_ids.tolist() == [1, 2, 5, 9]
    assert batch.history_output_counts.tolist() == [1, 0, 0, 2]
    row.output_token_ids.append(3)  # type: ignore[attr-defined]  # no view of the arrays is left


def test_masked_tokens_win_over_a_bias() -> None:
    row = SamplingInput(
        SamplingParams(logit_bias={4: 50.0, 6: -1.0}), -1, [1], [2, 2], masked_token_ids=(4, 8)
    )
    batch = build_sampling_batch([row])
    bias = dict(zip(batch.bias_token_ids.tolist(), batch.bias_values.tolist(), strict=True))
    assert bias == {4: -np.inf, 6: -1.0, 8: -np.inf}
    assert batch.counter.tolist() == [2] and batch.seed.tolist() == [2**64 - 1]


@settings(deadline=None)
@given(st.lists(st.integers(-1, 3000), min_size=1, max_size=5), st.data())
def test_a_row_does_not_depend_on_its_company(top_ks: list[int], data: st.DataObject) -> None:
    rows = [
        SamplingInput(
            SamplingParams(top_k=k, frequency_penalty=data.draw(st.sampled_from([0.0, 0.5]))),
            k % 7,
            [k + 1],
            [3],
        )
        for k in top_ks
    ]
    together = build_sampling_batch(rows)
    for i, row in enumerate(rows):
        alone = build_sampling_batch([row])
        for name in ("temperature", "top_k", "top_p", "frequency_penalty", "seed", "counter", "num_logprobs"):
            assert getattr(together, name)[i] == getattr(alone, name)[0]
        start, end = together.history_start_loc[i : i + 2]
        assert together.history_token_ids[start:end].tolist() == alone.history_token_ids.tolist()
