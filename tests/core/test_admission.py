"""Which waiting request goes first, and how much of a step prefills may take."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.config import SchedulerConfig
from pagoda.core.events import RequestScheduled
from pagoda.core.request import Request
from pagoda.core.request_queue import admission_order
from tests.core.harness import Harness
from tests.core.paged_model import make_request

CHAT, DOCUMENT = list(range(10, 26)), list(range(30, 46))


def scheduled(h: Harness) -> list[str]:
    return [e.request_id for e in h.events_of(RequestScheduled)]


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, ["both", "half", "cold", "cold too"]),
        ({"longest_prefix_first": False}, ["cold", "half", "both", "cold too"]),
        ({"max_overtaken_s": 0.0}, ["cold", "half", "both", "cold too"]),
    ],
)
def test_the_best_cached_prefix_goes_first(options: dict[str, object], order: list[str]) -> None:
    h = Harness(max_num_seqs=1, **options)
    h.generate("chat", CHAT, max_tokens=1)
    h.add("cold", [1] * 9, max_tokens=1)
    h.add("half", [*CHAT[:8], 2, 3], max_tokens=1)
    h.add("both", [*CHAT, 2, 3], max_tokens=1)
    h.add("cold too", [4] * 9, max_tokens=1)
    h.run()
    assert scheduled(h) == ["chat", *order]


def test_a_prefix_never_beats_priority() -> None:
    h = Harness(max_num_seqs=1, scheduling_policy="priority", priority_ageing_s=0)
    h.generate("chat", CHAT, max_tokens=1)
    h.add("late", [*CHAT, 2], max_tokens=1, priority=2)
    h.add("soon", [1] * 9, max_tokens=1, priority=1)
    h.add("soon and cached", [*CHAT, 3], max_tokens=1, priority=1)
    h.run()
    assert scheduled(h) == ["chat", "soon and cached", "soon", "late"]


@pytest.mark.parametrize("max_overtaken_s", [0.0, 3.0, 10.0])
def test_nobody_is_overtaken_for_longer_than_that(max_overtaken_s: float) -> None:
    """Cached requests keep coming, one a second, and take every seat."""
    h = Harness(max_num_seqs=1, max_overtaken_s=max_overtaken_s)
    h.generate("chat", CHAT, max_tokens=1)
    h.add("first", [*CHAT, 1], max_tokens=1)
    h.add("cold", [1] * 9, max_tokens=1)
    for i in range(30):
        h.add(f"cached {i}", [*CHAT, i], max_tokens=1)
        h.step()
        h.now_s += 1.0
        if h.requests["cold"].is_finished:
            break
    scheduled_s = h.requests["cold"].first_scheduled_s
    assert scheduled_s is not None and max(1.0, max_overtaken_s) == scheduled_s
    h.run()


REQUESTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([0.0, 4.0, 9.0]), st.integers(0, 1), st.integers(0, 5)),
    max_size=12,
)


@given(drawn=REQUESTS, policy=st.sampled_from(["fcfs", "priority"]))
def test_the_order_moves_equals_only(drawn: list[tuple[int, float, int, int]], policy: str) -> None:
    """Every request stays; one that has waited or was preempted is overtaken by nobody; of two young
    equals in one stretch the better cached is first, and the earlier among ties."""
    config = SchedulerConfig(scheduling_policy=policy, max_overtaken_s=5.0)  # type: ignore[arg-type]
    waiting: list[Request] = []
    cached: dict[str, int] = {}
    for i, (priority, queued_s, num_preemptions, num_cached) in enumerate(drawn):
        request = make_request(str(i), [1], priority=priority)
        request.queued_s, request.num_preemptions = queued_s, num_preemptions
        waiting.append(request)
        cached[request.request_id] = num_cached
    ordered = admission_order(waiting, config, 9.0, lambda r: cached[r.request_id])
    assert sorted(r.request_id for r in ordered) == sorted(r.request_id for r in waiting)
    settled = [r for r in waiting if r.num_preemptions or r.queued_s <= 4.0]
    for request in settled:
        assert ordered.index(request) == waiting.index(request)
    for a, b in pairwise(ordered):
        if a in settled or b in settled or (policy == "priority" and a.priority != b.priority):
            continue
        better, worse = cached[a.request_id], cached[b.request_id]
        assert better > worse or (better == worse and waiting.index(a) < waiting.index(b))


@settings(max_examples=40, deadline=None)
@given(
    limit=st.integers(1, 20),
    num_decoding=st.integers(1, 5),
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=4),
    threshold=st.sampled_from([0, 5]),
)
def test_prefills_take_little_of_a_step_that_decodes(
    limit: int, num_decoding: int, lengths: list[int], threshold: int
) -> None:
    """Every stream gets its token in every step, and the step is short."""
    h = Harness(
        num_blocks=400,
        max_num_batched_tokens=40,
        max_num_seqs=16,
        max_num_partial_prefills=2,
        max_long_partial_prefills=2,
        long_prefill_token_threshold=threshold,
        max_prefill_tokens_while_decoding=limit,
    )
    for i in range(num_decoding):
        h.add(f"stream {i}", [i, i], max_tokens=150)
    h.step()
    for i, length in enumerate(lengths):
        h.add(f"prompt {i}", [7 + i] * length, max_tokens=1)
    while any(r.startswith("prompt") for r in h.scheduler.requests):
        step = h.step()
        assert step is not None
        streams = [r for r in step.requests if r.request_id.startswith("stream")]
        assert len(streams) == num_decoding and all(len(r.token_ids) == 1 for r in streams)
        assert 1 <= step.num_scheduled_tokens - num_decoding <= limit + len(lengths)
        assert sum(len(r.token_ids) for r in step.requests if len(r.token_ids) > 1) <= limit
    for request_id in h.requests:
        h.check_answer(request_id)


def test_prefills_have_the_whole_budget_when_nobody_decodes() -> None:
    h = Harness(max_num_batched_tokens=40, max_prefill_tokens_while_decoding=3)
    h.add("a", [1] * 70, max_tokens=2)
    assert [s.num_scheduled_tokens for s in (h.step(), h.step()) if s is not None] == [40, 30]


@pytest.mark.parametrize("max_num_partial_prefills", [1, 2, 3])
def test_so_many_prompts_are_computed_in_part_at_a_time(max_num_partial_prefills: int) -> None:
    h = Harness(
        num_blocks=200,
        long_prefill_token_threshold=8,
        max_num_partial_prefills=max_num_partial_prefills,
        max_long_partial_prefills=max_num_partial_prefills,
    )
    for i in range(5):
        h.add(f"long {i}", [i] * 30, max_tokens=1)
    most = 0
    while h.scheduler.has_unfinished:
        h.step()
        partial = [r for r in h.scheduler.requests.values() if 0 < r.num_computed_tokens < 30]
        most = max(most, len(partial))
    assert most == max_num_partial_prefills


def test_a_prompt_that_fits_into_a_step_does_not_wait_for_long_ones() -> None:
    h = Harness(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    h.add("long", [1] * 30, max_tokens=1)
    h.add("too large", [2] * 12, max_tokens=1)
    h.add("short", [3] * 5, max_tokens=1)
    step = h.step()
    assert step is not None
    assert [(r.request_id, len(r.token_ids)) for r in step.requests] == [("long", 6), ("short", 5)]
    h.run()
