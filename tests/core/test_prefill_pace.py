"""How much prompts of others slow a stream down, on machines whose speed nobody has told."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.core.prefill_pace import MIN_PREFILL_TOKENS
from pagoda.core.request import FinishReason
from pagoda.core.step import SchedulerOutput
from pagoda.sim.sim_executor import LinearCostModel
from tests.core.harness import Harness

COST = LinearCostModel(step_s=0.002, token_s=0.0005)


def num_prefill_tokens(step: SchedulerOutput) -> int:
    return sum(len(r.token_ids) for r in step.requests if len(r.token_ids) > 1)


def harness_with_streams(
    num_streams: int, cost: LinearCostModel, slowdown: float, **config: object
) -> Harness:
    """`num_streams` streams that have decoded for a while."""
    h = Harness(
        800,
        block_size=16,
        duration_s=cost.duration_s,
        **{"max_num_batched_tokens": 512, "max_num_seqs": 64, "max_model_len": 4000, **config},
        max_decode_slowdown=slowdown,
    )
    for i in range(num_streams):
        h.add(f"stream {i}", [i] * 40, max_tokens=3000)
    for _ in range(20):
        h.step()
    return h


def timed_step(h: Harness) -> tuple[SchedulerOutput, float]:
    start_s = h.now_s
    step = h.step()
    assert step is not None
    return step, h.now_s - start_s


@settings(max_examples=8, deadline=None)
@given(
    slowdown=st.sampled_from([1.5, 2.5, 4.0]),
    step_s=st.sampled_from([0.004, 0.01, 0.03]),
    token_s=st.sampled_from([0.0001, 0.0005, 0.002]),
    context_share=st.sampled_from([0.0, 0.001]),
    num_streams=st.sampled_from([1, 6]),
)
def test_a_long_prompt_slows_streams_down_by_so_much_and_no_more(
    slowdown: float, step_s: float, token_s: float, context_share: float, num_streams: int
) -> None:
    """Also as its tokens get dearer, the longer the context is that they attend to."""
    context_token_s = context_share * token_s
    cost = LinearCostModel(step_s=step_s, token_s=token_s, context_token_s=context_token_s)
    h = harness_with_streams(num_streams, cost, slowdown)
    _, decode_s = timed_step(h)
    h.add("long", [99] * 600, max_tokens=1)
    durations, chunks = [], []
    while not h.requests["long"].is_finished:
        step, duration_s = timed_step(h)
        durations.append(duration_s / decode_s)
        chunks.append(num_prefill_tokens(step))
    largest = max(range(len(chunks)), key=durations.__getitem__)
    assert durations[largest] <= 1.25 * slowdown or chunks[largest] <= MIN_PREFILL_TOKENS
    # And the prompt has what is left: it is not held back more than that, but for whole tokens.
    for duration, chunk in zip(durations[5:-1], chunks[5:-1], strict=True):
        assert chunk == 512 or duration + (token_s + 700 * context_token_s) / decode_s >= 0.85 * slowdown


def test_every_step_has_some_of_a_prompt_however_dear_it_is() -> None:
    h = harness_with_streams(1, LinearCostModel(step_s=0.0, token_s=0.01), 1.01)
    h.add("long", [9] * 100, max_tokens=1)
    chunks = []
    while not h.requests["long"].is_finished:
        step, _ = timed_step(h)
        chunks.append(num_prefill_tokens(step))
    assert chunks == [MIN_PREFILL_TOKENS] * 25


def test_nobody_waits_for_a_pace_when_nobody_decodes() -> None:
    h = harness_with_streams(1, COST, 2.5)
    h.end("stream 0", FinishReason.ABORT)
    h.add("long", [9] * 1100, max_tokens=1)
    assert [num_prefill_tokens(timed_step(h)[0]) for _ in range(3)] == [512, 512, 76]


def test_each_prompt_that_waits_gets_its_share() -> None:
    """A burst of clients is not held up for one stream."""
    shares = []
    for num_prompts in (1, 4, 8, 30):
        h = harness_with_streams(2, COST, 2.5)
        for i in range(num_prompts):
            h.add(f"prompt {i}", [10 + i] * 300, max_tokens=2)
        shares.append(num_prefill_tokens(timed_step(h)[0]))
    once = int(1.5 * (COST.step_s + 2 * COST.token_s) / COST.token_s)
    assert shares == [pytest.approx(n * once, rel=0.2) for n in (1, 4, 8, 30)]


def test_those_without_a_place_do_not_hurry_a_prompt() -> None:
    shares = []
    for num_prompts in (1, 30):
        h = harness_with_streams(2, COST, 2.5, max_num_seqs=3)
        for i in range(num_prompts):
            h.add(f"prompt {i}", [10 + i] * 300, max_tokens=2)
        shares.append(num_prefill_tokens(timed_step(h)[0]))
    assert shares[0] == shares[1] > 0


def test_a_stream_is_not_slow_because_there_were_many() -> None:
    """Nor are many held to the time of one: decoding is reckoned for as many as there are."""
    cost = LinearCostModel(step_s=0.004, token_s=0.0005)  # as long as `BASE_STREAMS` streams
    for num_before, num_after in ((12, 1), (1, 12)):
        h = harness_with_streams(num_before, cost, 2.0)
        for i in range(1, num_before):
            h.end(f"stream {i}", FinishReason.ABORT)
        for i in range(num_before, num_after):
            h.add(f"stream {i}", [i], max_tokens=3000)
        h.add("long", [99] * 600, max_tokens=1)
        timed_step(h)
        _, duration_s = timed_step(h)
        assert duration_s == pytest.approx(2.0 * cost.step_s + 2.0 * num_after * cost.token_s, rel=0.1)


def test_the_same_durations_give_the_same_steps() -> None:
    """I12"""

    def chunks() -> list[list[int]]:
        h = harness_with_streams(3, COST, 2.5)
        for i in range(4):
            h.add(f"prompt {i}", [10 + i] * 200, max_tokens=5)
        return [[len(r.token_ids) for r in timed_step(h)[0].requests] for _ in range(60)]

    assert chunks() == chunks()
