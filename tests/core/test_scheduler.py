"""Budgets, order, and requests that come and go."""

from __future__ import annotations

import copy
import random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.core.events import RequestFinished, RequestPreempted, RequestScheduled, StepScheduled
from pagoda.core.invariants import snapshot
from pagoda.core.request import FinishReason, RequestStatus
from pagoda.core.step import ModelOutput
from pagoda.errors import CapacityError, RequestError
from tests.core.harness import Harness
from tests.core.paged_model import Windows, make_request, make_spec


@settings(max_examples=25, deadline=None)
@given(
    budget=st.sampled_from([1, 7, 15, 16, 17, 64]),
    num_companions=st.integers(0, 8),
    windows=st.sampled_from([(None,), (None, 6), (9,)]),
)
def test_answers_do_not_depend_on_budget_or_company(
    budget: int, num_companions: int, windows: Windows
) -> None:
    h = Harness(windows=windows, max_num_batched_tokens=budget)
    for i in range(num_companions):
        h.add(str(i), range(i, i + 3 * i + 1), max_tokens=7)
    h.add("it", range(30), max_tokens=12)
    h.run()
    for request_id in h.requests:
        h.check_answer(request_id)


def test_requests_that_decode_are_not_held_up_by_a_long_prompt() -> None:
    """The prompt comes first in order, and still the others get their token in every step."""
    h = Harness(max_num_batched_tokens=8, scheduling_policy="priority")
    for i in range(3):
        h.add(str(i), [i], max_tokens=30, priority=5)
    h.step()
    h.add("long", range(40), max_tokens=2, priority=0)
    while h.requests["long"].num_computed_tokens < 40:
        step = h.step()
        assert step is not None
        assert {r.request_id: len(r.token_ids) for r in step.requests} == {"long": 5, "0": 1, "1": 1, "2": 1}


def test_nobody_overtakes_a_request_that_waits_for_room() -> None:
    h = Harness(num_blocks=8)
    h.add("running", [1] * 20, max_tokens=8)
    h.step()
    h.add("large", [2] * 16, max_tokens=1)
    h.add("small", [3], max_tokens=1)
    h.run()
    assert [e.request_id for e in h.events_of(RequestScheduled)] == ["running", "large", "small"]


def test_every_budget_is_used_up() -> None:
    h = Harness(max_num_batched_tokens=10)
    for i in range(6):
        h.add(str(i), [i] * 13, max_tokens=2)
    steps = [h.step() for _ in range(6)]
    assert [s.num_scheduled_tokens for s in steps if s is not None] == [10] * 6


def test_long_prefills_leave_room_for_short_ones() -> None:
    h = Harness(max_num_batched_tokens=16, long_prefill_token_threshold=6, max_long_partial_prefills=1)
    h.add("long", range(30), max_tokens=1)
    h.add("second long", range(10, 40), max_tokens=1)
    h.add("short", [1, 2, 3], max_tokens=1)
    step = h.step()
    assert step is not None
    assert [(r.request_id, len(r.token_ids)) for r in step.requests] == [("long", 6), ("short", 3)]
    h.run()
    order = [e.request_id for e in h.events_of(RequestFinished)]
    assert order == ["short", "long", "second long"]


def test_first_come_first_served() -> None:
    h = Harness(max_num_seqs=1)
    for i in range(5):
        h.add(str(i), [i], max_tokens=2, priority=-i)
    h.run()
    assert [e.request_id for e in h.events_of(RequestFinished)] == ["0", "1", "2", "3", "4"]


def test_lower_priority_values_go_first_and_give_way_last() -> None:
    h = Harness(num_blocks=8, scheduling_policy="priority")
    h.add("late", [1] * 8, max_tokens=16, priority=5)
    h.add("soon", [2] * 8, max_tokens=16, priority=1)
    h.run()
    assert [e.request_id for e in h.events_of(RequestScheduled)][:2] == ["soon", "late"]
    assert {e.request_id for e in h.events_of(RequestPreempted)} == {"late"}


def test_with_ageing_no_priority_waits_for_ever() -> None:
    h = Harness(scheduling_policy="priority", priority_ageing_s=10.0, max_num_seqs=1)
    h.add("patient", [9], max_tokens=1, priority=3)
    for i in range(100):
        h.add(f"urgent {i}", [i % 50], max_tokens=1, priority=0)
        if h.requests["patient"].is_finished:
            break
        h.step()
        h.now_s += 1.0
    assert h.requests["patient"].is_finished
    assert 29 <= h.now_s <= 32


def test_a_request_past_its_deadline_ends_with_an_error() -> None:
    h = Harness(max_num_seqs=1)
    h.add("running", [1, 2], max_tokens=50, deadline_s=5.0)
    h.add("waiting", [3, 4], max_tokens=50, deadline_s=5.0)
    h.step()
    h.now_s = 6.0
    assert h.step() is None
    assert h.ended == {"running": FinishReason.ERROR, "waiting": FinishReason.ERROR}
    assert "deadline" in str(h.requests["running"].error)
    assert not h.scheduler.has_unfinished


def test_only_a_prompt() -> None:
    """max_tokens 0 computes the prompt, says "length" and never samples."""
    h = Harness(max_num_batched_tokens=4)
    request = h.generate("a", range(10), max_tokens=0, prompt_logprobs=0)
    assert request.finish_reason is FinishReason.LENGTH and request.num_output_tokens == 0
    assert [position for position, _ in h.prompt_logprobs["a"]] == list(range(1, 10))
    assert all(r.sampling is None for step in h.steps for r in step.requests)


def test_prompt_logprobs_come_once_even_when_their_request_is_preempted() -> None:
    """In mid-prompt: its first rows are computed again, and not told again."""
    h = Harness(num_blocks=10, max_num_batched_tokens=2)
    h.add("a", [1] * 8, max_tokens=24)
    h.add("b", range(20), max_tokens=4, prompt_logprobs=0)
    h.run()
    assert any(0 < e.num_computed_tokens < 20 for e in h.events_of(RequestPreempted))
    h.check_answer("b")
    assert len(h.prompt_logprobs["b"]) == 19


def test_a_stop_token_before_min_tokens_ends_nothing() -> None:
    """It is masked; should it come all the same, it is a token like any other."""
    request = make_request("a", [1], max_tokens=3, min_tokens=2, stop_token_ids=(7,))
    request.max_num_tokens = 4
    request.append_output(7)
    assert request.check_end() is None
    request.append_output(7)
    assert request.check_end() == (FinishReason.STOP, 7)


@pytest.mark.parametrize(
    ("stop", "finish_reason", "stop_reason"),
    [
        ({"eos_token_ids": frozenset(range(50))}, FinishReason.STOP, None),
        ({"stop_token_ids": tuple(range(50))}, FinishReason.STOP, "the token"),
        ({"eos_token_ids": frozenset(range(50)), "ignore_eos": True}, FinishReason.LENGTH, None),
    ],
)
def test_what_ended_a_request(
    stop: dict[str, object], finish_reason: FinishReason, stop_reason: object
) -> None:
    request = Harness().generate("a", [1, 2, 3], max_tokens=4, **stop)
    assert request.finish_reason is finish_reason
    assert request.stop_reason == (request.output_token_ids[-1] if stop_reason else None)
    assert request.num_output_tokens == (1 if finish_reason is FinishReason.STOP else 4)


def test_a_stop_string_ends_a_request_from_outside() -> None:
    h = Harness()
    request = h.add("a", [1, 2], max_tokens=50)
    h.step()
    assert h.end("a", FinishReason.STOP, "###")
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, "###")
    assert not h.scheduler.has_unfinished


def test_max_model_len_ends_a_request() -> None:
    h = Harness(max_model_len=12)
    assert h.generate("a", range(9), max_tokens=None).num_tokens == 12
    with pytest.raises(RequestError, match="max_model_len, which is 12"):
        h.add("b", range(12), max_tokens=5)
    assert h.generate("c", range(12), max_tokens=0).is_finished


def test_a_refused_request_leaves_no_trace() -> None:
    h = Harness(num_blocks=4)
    h.add("a", range(5), max_tokens=4)
    with pytest.raises(RequestError, match="in use"):
        h.scheduler.add(make_request("a", [1]))
    with pytest.raises(CapacityError):
        h.scheduler.add(make_request("b", range(17)))
    assert list(h.scheduler.requests) == ["a"]
    h.run()


@pytest.mark.parametrize("bad", [[], [-1], [2**31], [1.5], "text"])
def test_what_is_no_token_id_is_refused(bad: object) -> None:
    with pytest.raises(RequestError) as refusal:
        make_request("a", bad)  # type: ignore[arg-type]
    assert refusal.value.param == "prompt"


def test_steps_are_planned_and_updated_in_turn() -> None:
    h = Harness()
    h.add("a", [1, 2, 3])
    step = h.scheduler.schedule()
    assert step is not None
    with pytest.raises(RuntimeError, match="still to be updated"):
        h.scheduler.schedule()
    with pytest.raises(RuntimeError, match="not the step"):
        h.scheduler.update(copy.copy(step), ModelOutput({}))
    deltas = h.scheduler.update(step, ModelOutput({}))  # an executor that forgets a request
    assert deltas[0].finish_reason is FinishReason.ERROR


def test_a_failed_step_ends_its_requests_and_no_other() -> None:
    h = Harness(max_num_seqs=2)
    for i in range(3):
        h.add(str(i), [i] * 5, max_tokens=3)
    h.step(fail=True)
    assert h.ended == {"0": FinishReason.ERROR, "1": FinishReason.ERROR}
    h.run()
    h.check_answer("2")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_refused_allocation_has_changed_nothing(data: st.DataObject) -> None:
    """I7, over random states, for new requests with and without hits and for running ones."""
    windows = data.draw(st.sampled_from([(None,), (None, 5), (6,)]))
    h = Harness(num_blocks=8, windows=windows, max_num_batched_tokens=6)
    for i in range(data.draw(st.integers(1, 4))):
        h.add(str(i), data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=14)), max_tokens=9)
    for _ in range(data.draw(st.integers(1, 12))):
        h.step()
    newcomer = make_request("new", data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=30)))
    hit = h.kv.find_hit(newcomer)
    before = snapshot(h.kv)
    for request in [newcomer, *(r for r in h.scheduler.requests.values() if r.request_id in h.kv.sequences)]:
        num_fitting = h.kv.num_tokens_that_fit(request, 1000, hit)
        assert h.kv.allocate(request, num_fitting + 1, hit) is None
        assert snapshot(h.kv) == before


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_same_trace_gives_the_same_schedule(policy: str) -> None:
    """I12."""

    def run() -> list[object]:
        source = random.Random(1)
        h = Harness(num_blocks=14, max_num_batched_tokens=7, scheduling_policy=policy)
        for i in range(40):
            h.add(str(i), source.choices(range(3), k=source.randint(1, 20)), priority=source.randint(0, 3))
            for _ in range(source.randint(0, 3)):
                h.step()
        h.run()
        return [h.events, [[(r.request_id, r.start, list(r.token_ids)) for r in s.requests] for s in h.steps]]

    assert run() == run()


def test_the_watermark_keeps_room_for_those_who_run() -> None:
    h = Harness(num_blocks=10, watermark=0.3)
    h.add("a", [1] * 16, max_tokens=12)
    h.step()
    h.add("b", [2] * 16, max_tokens=1)  # would leave one block free
    h.step()
    assert h.scheduler.num_running == 1
    h.run()
    assert not h.events_of(RequestPreempted)


def test_running_prompts_keep_the_room_for_their_later_chunks() -> None:
    """A second long prompt is not let in on the blocks that the first has not taken yet."""
    h = Harness(
        num_blocks=10, long_prefill_token_threshold=4, max_num_partial_prefills=2, max_long_partial_prefills=2
    )
    h.add("a", range(30), max_tokens=2)
    h.add("b", range(10, 40), max_tokens=2)
    h.run()
    assert not h.events_of(RequestPreempted)


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    """E12: state of a request goes with it."""
    h = Harness()
    for i in range(1000):
        h.add(str(i), [1], max_tokens=1, deadline_s=1e9)
        h.end(str(i), FinishReason.ABORT)
    assert len(h.scheduler._deadlines) < 200


def test_events_tell_what_the_pools_hold() -> None:
    h = Harness(num_blocks=8)
    h.generate("a", range(9), max_tokens=3)
    usages = [e.usage[0] for e in h.events_of(StepScheduled)]
    assert all(sum(usage) == 8 for usage in usages)
    assert mean(u.num_held for u in usages) == 3


def test_pools_must_fit_the_layer_groups() -> None:
    with pytest.raises(CapacityError):
        Harness([4], windows=(None, 4))
    with pytest.raises(CapacityError):
        Harness([0])
    assert make_spec((None, 4)).max_blocks_for(1, 1000) == 2
