"""Choices of one request: the prompt is computed once, its blocks are shared, and freed once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.config import CacheConfig
from pagoda.core.events import RequestPreempted, RequestScheduled
from pagoda.core.request import FinishReason
from tests.core.harness import Harness
from tests.core.paged_model import Windows

NO_CACHE = CacheConfig(block_size=4, enable_prefix_caching=False)


def num_needed(num_prompt: int, n: int, max_tokens: int) -> int:
    """Tokens of a prompt that is computed once: but each choice samples from its own last prompt token."""
    return num_prompt - 1 + n + n * (max_tokens - 1)


@settings(max_examples=60, deadline=None)
@given(
    num_prompt=st.integers(1, 20),
    n=st.integers(1, 6),
    max_tokens=st.integers(1, 9),
    caching=st.booleans(),
    windows=st.sampled_from([(None,), (None, 5), (3,), (8, None, 1)]),
)
def test_a_prompt_is_computed_once(
    num_prompt: int, n: int, max_tokens: int, caching: bool, windows: Windows
) -> None:
    """With caching or without, shorter than a block or longer, and whatever windows let go of."""
    h = Harness(windows=windows, cache=CacheConfig(block_size=4, enable_prefix_caching=caching))
    h.add_choices("a", n, [t % 7 for t in range(num_prompt)], max_tokens=max_tokens)
    h.run()
    assert h.model.num_computed_tokens == num_needed(num_prompt, n, max_tokens)
    assert h.scheduler.num_forked_tokens == (n - 1) * (num_prompt - 1)
    for request_id in h.requests:
        h.check_answer(request_id)


@settings(max_examples=40, deadline=None)
@given(
    num_prompt=st.integers(2, 20),
    max_num_seqs=st.integers(1, 4),
    max_tokens=st.sampled_from([1, 2, 7]),
    budget=st.sampled_from([1, 3, 16]),
    caching=st.booleans(),
)
def test_more_choices_than_seats_still_compute_it_once(
    num_prompt: int, max_num_seqs: int, max_tokens: int, budget: int, caching: bool
) -> None:
    """The prompt outlives those that used it, as long as a choice has not started."""
    cache = CacheConfig(block_size=4, enable_prefix_caching=caching)
    h = Harness(cache=cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    h.add_choices("a", 6, range(num_prompt), max_tokens=max_tokens)
    h.run()
    assert h.model.num_computed_tokens == num_needed(num_prompt, 6, max_tokens)
    for request_id in h.requests:
        h.check_answer(request_id)


def test_choices_share_whole_blocks_and_copy_the_rest() -> None:
    """A09: the partly filled block is copied before its second writer writes."""
    h = Harness(cache=NO_CACHE)
    h.add_choices("a", 3, range(10), max_tokens=6)
    h.step()
    step = h.step()
    assert step is not None
    tables = [list(r.block_tables[0]) for r in step.requests]
    assert len({tuple(t[:2]) for t in tables}) == 1
    assert len({t[2] for t in tables}) == 3
    assert [(c.source, c.target) for c in step.block_copies] == [(tables[0][2], t[2]) for t in tables[1:]]
    assert h.kv.usage()[0].num_held == 2 + 3
    h.run()


def test_choices_are_one_query_of_the_prefix_cache() -> None:
    h = Harness()
    h.generate("before", range(10), max_tokens=1)
    h.add_choices("a", 4, range(10), max_tokens=2)
    h.run()
    assert h.scheduler.prefix_stats.num_queries == 2
    assert h.scheduler.prefix_stats.num_hit_tokens == h.requests["a/0"].num_cached_tokens == 9
    forked = [e.num_forked_tokens for e in h.events_of(RequestScheduled)]
    assert forked == [0, 0, 9, 9, 9]


def test_prompt_logprobs_come_from_the_choice_that_asks() -> None:
    h = Harness()
    h.add_choices("a", 3, range(10), max_tokens=3, prompt_logprobs=0)
    h.run()
    assert [len(h.prompt_logprobs[f"a/{i}"]) for i in range(3)] == [9, 0, 0]
    assert h.model.num_computed_tokens == num_needed(10, 3, 3)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("when", range(5))
@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_choice_that_is_aborted_takes_nothing_from_the_others(caching: bool, when: int, who: int) -> None:
    """B34: blocks of the prompt are freed once, and only after the last choice."""
    h = Harness(
        cache=CacheConfig(block_size=4, enable_prefix_caching=caching),
        max_num_seqs=2,
        max_num_batched_tokens=6,
    )
    h.add_choices("a", 4, range(10), max_tokens=3)
    for _ in range(when):
        h.step()
    if f"a/{who}" in h.scheduler.requests:
        h.end(f"a/{who}", FinishReason.ABORT)
    h.run()
    for request_id in h.requests:
        h.check_answer(request_id)
    assert h.kv.usage()[0].num_held == 0
    assert h.model.num_computed_tokens <= num_needed(10, 4, 3) + 9


def test_a_choice_that_ends_while_its_step_runs_leaves_that_step_its_tables() -> None:
    """The prompt is kept for the sibling that waits; the step still reads the blocks behind it."""
    h = Harness(cache=NO_CACHE, max_num_seqs=1)
    h.add_choices("a", 2, range(4), max_tokens=6)
    for _ in range(2):
        h.step()
    # The table now has blocks behind the prompt's, and the step under way writes to one of them.
    h.step(in_flight=lambda: h.end("a/0", FinishReason.ABORT))
    h.run()
    h.check_answer("a/1")


def test_choices_of_a_failed_prompt_do_not_use_it() -> None:
    h = Harness(cache=NO_CACHE)
    h.add_choices("a", 3, range(10), max_tokens=3)
    h.model.failing = {"a/0"}
    h.run()
    assert h.ended["a/0"] is FinishReason.ERROR
    assert h.model.num_computed_tokens == 10 + num_needed(10, 2, 3)
    h.check_answer("a/1")


def test_a_prompt_that_is_kept_gives_way_to_those_who_run() -> None:
    """It is there to save work, so it never costs another request its blocks, nor keeps one waiting."""
    h = Harness(num_blocks=8, cache=NO_CACHE, max_num_seqs=2)
    h.add_choices("a", 4, range(15), max_tokens=1)
    h.add("large", [7] * 10, max_tokens=20)
    h.step()
    h.end("a/1", FinishReason.ABORT)
    while h.scheduler.has_unfinished:
        h.step()
    for request_id in h.requests:
        h.check_answer(request_id)
    assert not h.events_of(RequestPreempted)


@settings(max_examples=30, deadline=None)
@given(
    num_prompt=st.integers(1, 14),
    n=st.integers(2, 5),
    num_blocks=st.integers(7, 12),
    caching=st.booleans(),
    windows=st.sampled_from([(None,), (None, 5), (3,)]),
)
def test_choices_in_a_tiny_pool_end_right(
    num_prompt: int, n: int, num_blocks: int, caching: bool, windows: Windows
) -> None:
    cache = CacheConfig(block_size=4, enable_prefix_caching=caching)
    h = Harness(num_blocks, windows=windows, cache=cache, max_num_batched_tokens=6)
    h.add_choices("a", n, range(num_prompt), max_tokens=12)
    h.add_choices("b", n, range(num_prompt), max_tokens=5, use_cache=False)
    h.run()
    for request_id in h.requests:
        h.check_answer(request_id)


def test_an_id_that_is_used_again_is_no_sibling() -> None:
    """Blocks belong to requests, not to names."""
    h = Harness(cache=NO_CACHE, max_num_seqs=2)
    h.add_choices("a", 3, range(10), max_tokens=2)
    while "a/0" in h.scheduler.requests:
        h.step()
    h.add("a/0", [9] * 12, max_tokens=9)
    h.run()
    for request_id in h.requests:
        h.check_answer(request_id)


def test_a_kept_prompt_is_given_up_before_anybody_is_preempted() -> None:
    h = Harness(num_blocks=8, cache=NO_CACHE, max_num_seqs=2)
    h.add("running", [7] * 16, max_tokens=8)
    h.add_choices("a", 3, range(15), max_tokens=1)
    h.step()
    assert h.kv.forks.kept and h.kv.usage()[0].num_free == 0
    h.run()
    assert not h.events_of(RequestPreempted)
    for request_id in h.requests:
        h.check_answer(request_id)


def test_a_kept_prompt_does_not_keep_the_first_in_order_waiting() -> None:
    h = Harness(num_blocks=8, cache=NO_CACHE, max_num_seqs=1, scheduling_policy="priority")
    h.add_choices("a", 3, range(15), max_tokens=1, priority=5)
    h.step()
    assert h.kv.forks.kept
    h.add("urgent", [7] * 20, max_tokens=1, priority=0)
    h.step()
    assert h.requests["urgent"].is_finished
    h.run()
    for request_id in h.requests:
        h.check_answer(request_id)
