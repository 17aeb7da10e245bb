"""Faults reported against other engines, each as a statement about ours. Ids are those of the reports."""

from __future__ import annotations

import random

import pytest

from pagoda.core import block_hash
from pagoda.core.block_hash import ContentSpan
from pagoda.core.events import RequestFinished, RequestPreempted
from pagoda.core.prefix_cache import MissReason
from pagoda.core.request import FinishReason
from pagoda.errors import CapacityError
from tests.core.harness import Harness
from tests.core.paged_model import Windows


def test_equal_hashes_of_different_tokens_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A06: tokens and parent are verified, so a collision costs a miss and nothing else."""
    monkeypatch.setattr(block_hash, "hash_block", lambda parent, tokens, extra=b"": b"same")
    h = Harness()
    h.generate("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=8)
    b = h.generate("b", [11, 12, 13, 14, 15, 16, 17, 18, 19], max_tokens=8)
    assert b.num_cached_tokens == 0
    c = h.generate("c", [1, 2, 3, 4, 1, 2, 3, 4, 5], max_tokens=8)  # a cached block after another parent
    assert c.num_cached_tokens == 4
    d = h.generate("d", [1, 2, 3, 4, 5], max_tokens=8, cache_salt="another")
    assert d.num_cached_tokens == 0
    for request_id in h.requests:
        h.check_answer(request_id)


@pytest.mark.parametrize(("second", "num_cached"), [(b"cat", 11), (b"dog", 4), (None, 4)])
def test_placeholders_hit_only_for_the_same_content(second: bytes | None, num_cached: int) -> None:
    """A07: equal token ids stand for attached content, part of the key; unknown content never hits."""
    h = Harness()
    prompt = [1, 2, 3, 4, 0, 0, 0, 0, 0, 5, 6, 7]
    h.generate("first", prompt, max_tokens=1, content_spans=[ContentSpan(4, 9, b"cat")])
    again = h.generate("second", prompt, max_tokens=1, content_spans=[ContentSpan(4, 9, second)])
    assert again.num_cached_tokens == num_cached


def test_content_at_another_offset_is_other_content() -> None:
    """A07: two blocks of placeholders from the middle of one image differ by where in it they lie."""
    h = Harness()
    h.generate("a", [0] * 9, max_tokens=1, content_spans=[ContentSpan(0, 9, b"cat")])
    shifted = h.generate("b", [0] * 9, max_tokens=1, content_spans=[ContentSpan(1, 9, b"cat")])
    assert shifted.num_cached_tokens == 0


@pytest.mark.parametrize("options", [{"cache_salt": "b"}, {"adapter": "a"}, {}])
def test_salts_and_adapters_do_not_share(options: dict[str, str]) -> None:
    """A02, A03, A04: weights added to the model's own, like a tenant's salt, are a cache of their own."""
    h = Harness()
    h.generate("first", range(9), cache_salt="a")
    other = h.generate("other", range(9), **options)
    assert other.num_cached_tokens == 0
    assert other.prefix_miss is not None and other.prefix_miss.reason is MissReason.SALT
    assert h.generate("same", range(9), cache_salt="a").num_cached_tokens == 8


def test_two_writers_never_share_a_partly_filled_block() -> None:
    """A09: B arrives while A decodes, with the same prompt of one and a half blocks; C copies A's tail."""
    h = Harness()
    h.add("a", [1, 2, 3, 4, 5, 6], max_tokens=20)
    h.step()
    h.step()
    h.add("b", [1, 2, 3, 4, 5, 6], max_tokens=20, stop_token_ids=(0, 1, 2, 3), min_tokens=15)
    h.step()
    tables = [h.kv.block_tables(h.requests[name])[0] for name in ("a", "b")]
    assert tables[0][0] == tables[1][0]
    assert not set(tables[0][1:]) & set(tables[1][1:])
    h.run()
    c = h.generate("c", [1, 2, 3, 4, 5, 6], max_tokens=20)
    assert c.num_cached_tokens == 5
    for request_id in "abc":
        h.check_answer(request_id)


def test_blocks_of_another_request_are_no_hit() -> None:
    """A12: what has been evicted and handed out again cannot be found any more."""
    h = Harness(num_blocks=3)
    h.generate("a", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)
    h.add("b", [20, 21, 22, 23, 24, 25, 26, 27, 28], max_tokens=3)
    h.step()
    c = h.add("c", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)
    h.run()
    assert c.num_cached_tokens == 0
    assert c.prefix_miss is not None and c.prefix_miss.reason is MissReason.EVICTED
    h.check_answer("c")


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token(num_blocks: int) -> None:
    """A15, A16: hits never cover the last prompt token, whose logits are wanted."""
    h = Harness()
    prompt = list(range(4 * num_blocks))
    cold = h.generate("cold", prompt, max_tokens=6)
    warm = h.generate("warm", prompt, max_tokens=6)
    assert warm.num_cached_tokens == len(prompt) - 1
    assert warm.output_token_ids == cold.output_token_ids
    assert h.generate("one", prompt, max_tokens=1).output_token_ids == cold.output_token_ids[:1]


def test_chunks_and_decodes_in_one_step_keep_to_their_slots() -> None:
    """A19: a second chunk that starts inside a block, a decode and a first chunk share a step."""
    h = Harness(long_prefill_token_threshold=5)
    h.add("decode", [1], max_tokens=20)
    h.step()
    h.add("chunks", range(2, 20), max_tokens=4)
    h.step()
    h.add("first", range(30, 34), max_tokens=4)
    step = h.step()
    assert step is not None and [(r.request_id, r.start) for r in step.requests] == [
        ("decode", 2),
        ("chunks", 5),
        ("first", 0),
    ]
    h.run()
    for request_id in h.requests:
        h.check_answer(request_id)


@pytest.mark.parametrize("budget", [1, 4, 8, 9, 16, 50])
@pytest.mark.parametrize("windows", [(8,), (None, 8)])
def test_chunks_longer_than_the_window_lose_no_key(windows: Windows, budget: int) -> None:
    """A20: the first queries of a chunk still see the window before it."""
    h = Harness(windows=windows, max_num_batched_tokens=budget)
    h.generate("a", range(50), max_tokens=10)
    h.check_answer("a")


def test_a_windowed_chat_of_thirty_turns_holds_no_more_than_its_window() -> None:
    """A22: every turn answers, hits the turns before, and the windowed group stays bounded."""
    h = Harness(num_blocks=[100, 40], windows=(None, 16))
    history: list[int] = []
    for turn in range(30):
        prompt = [*history, turn, turn + 1, turn + 2]
        request = h.add(f"turn {turn}", prompt, max_tokens=5)
        while not request.is_finished:
            h.step()
            assert h.kv.usage()[1].num_held <= (16 + 8) // 4 + 1
        assert request.num_output_tokens == 5
        assert request.num_cached_tokens >= len(history) - 1
        h.check_answer(f"turn {turn}")
        history = [*prompt, *request.output_token_ids]


def test_preemption_neither_doubles_nor_loses_a_token() -> None:
    """A24: four requests grow into a pool that holds two and a half of them."""
    h = Harness(num_blocks=20)
    for i in range(4):
        h.add(str(i), range(16 * i, 16 * i + 16), max_tokens=16)
    h.run()
    assert h.events_of(RequestPreempted)
    for request_id, request in h.requests.items():
        h.check_answer(request_id)
        assert (request.num_prompt_tokens, request.num_output_tokens) == (16, 16)


@pytest.mark.parametrize("min_tokens", [0, 12])
def test_prompt_and_output_stay_apart_after_preemption(min_tokens: int) -> None:
    """A26, A45: sampling sees the whole prompt as prompt and all output as output, hit or computed."""
    h = Harness(num_blocks=8)
    ends = tuple(range(0, 50, 7))
    for i in range(3):
        h.add(str(i), [i] * 8, max_tokens=12, min_tokens=min_tokens, stop_token_ids=ends)
    num_preempted = 0
    while h.scheduler.has_unfinished:
        step = h.step()
        assert step is not None
        for scheduled in step.requests:
            request = h.requests[scheduled.request_id]
            num_preempted += scheduled.start == 0 and request.num_output_tokens > 1
            if scheduled.sampling is not None:
                assert list(scheduled.sampling.prompt_token_ids) == [int(request.request_id)] * 8
                assert scheduled.sampling.output_token_ids is request.output_token_ids
    assert sum(r.num_preemptions for r in h.requests.values()) > 0
    for request_id in h.requests:
        h.check_answer(request_id)


def test_min_tokens_counts_output_only_and_ignore_eos_masks_nothing() -> None:
    """B37."""
    h = Harness(vocab_size=3)
    masked = h.generate("a", range(3), max_tokens=9, min_tokens=6, eos_token_ids=frozenset({0, 1}))
    assert list(masked.output_token_ids[:5]) == [2] * 5
    h.add("b", range(3), max_tokens=9, min_tokens=6, eos_token_ids=frozenset({2}), ignore_eos=True)
    step = h.step()
    assert step is not None and step.requests[0].sampling is not None
    assert step.requests[0].sampling.masked_token_ids == ()


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 20])
def test_as_many_tokens_as_asked_for(max_tokens: int) -> None:
    """B17, B18: the limit counts output tokens, and reaching it is "length"."""
    h = Harness()
    request = h.generate("a", [1, 2, 3], max_tokens=max_tokens)
    assert request.num_output_tokens == max_tokens
    assert request.finish_reason is FinishReason.LENGTH


def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_is_served() -> None:
    """E01, B26: refused at once, with the numbers."""
    h = Harness(num_blocks=8, max_model_len=256)
    with pytest.raises(CapacityError, match=r"36 tokens.*holds 32"):
        h.add("large", range(36))
    assert h.generate("small", range(4), max_tokens=2).num_output_tokens == 2


def test_a_request_that_outgrows_the_pool_ends_with_length() -> None:
    """E01: seven of eight blocks are prompt, the answer may be longer than the rest."""
    h = Harness(num_blocks=8, max_model_len=256)
    request = h.generate("a", range(28), max_tokens=100)
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_tokens == 8 * 4 + 1  # the last token is never computed
    h.check_answer("a")


def test_a_pool_full_of_cached_blocks_still_admits() -> None:
    """E03: blocks that only the cache wants are evicted."""
    h = Harness(num_blocks=8)
    for i in range(8):
        h.generate(str(i), [i] * 4, max_tokens=1)
    assert h.kv.usage()[0].num_reusable == 8
    assert h.generate("large", range(10, 40), max_tokens=1).is_finished


def test_preemption_is_bounded() -> None:
    """E04: a pool for one and a half requests; each step makes progress and all of them end."""
    h = Harness(num_blocks=12)
    for i in range(5):
        h.add(str(i), [i] * 16, max_tokens=16)
    h.run(max_steps=400)
    assert all(r.num_preemptions <= 3 for r in h.requests.values())
    assert all(r.num_output_tokens == 16 for r in h.requests.values())


def test_finished_requests_hold_nothing() -> None:
    """E06: 200 prompts, one after the other, on 16 blocks."""
    h = Harness(num_blocks=16)
    for i in range(200):
        h.generate(str(i), [i, i + 1, i + 2, i, i], max_tokens=3)
        assert h.kv.usage()[0].num_held == 0


@pytest.mark.parametrize("max_tokens", [3, 4, 5, 9])
@pytest.mark.parametrize("ending", ["length", "eos", "stop string", "abort", "error", "failed step"])
def test_blocks_are_released_once_however_a_request_ends(ending: str, max_tokens: int) -> None:
    """E07: one way out, and taking it twice does nothing."""
    h = Harness(num_blocks=16)
    num_before = h.kv.usage()[0].num_free
    eos = frozenset(range(50)) if ending == "eos" else frozenset()
    h.add("a", range(4), max_tokens=max_tokens, eos_token_ids=eos)
    h.step()
    if ending in ("stop string", "abort"):
        reason = FinishReason.STOP if ending == "stop string" else FinishReason.ABORT
        assert h.end("a", reason, "text")
        assert not h.end("a", reason, "text")
    elif ending == "error":
        h.model.failing = {"a"}
        h.step()
    elif ending == "failed step":
        h.step(fail=True)
    h.run()
    usage = h.kv.usage()[0]
    assert usage.num_held == 0
    assert usage.num_free + usage.num_reusable == num_before
    assert len(h.events_of(RequestFinished)) == 1


def test_aborts_at_any_moment() -> None:
    """E09, E12, F08: queued, between chunks, in flight, decoding, preempted; nothing leaks, all end once."""
    random_source = random.Random(0)
    h = Harness(num_blocks=10, max_num_batched_tokens=6, max_num_seqs=4)
    for i in range(300):
        h.add(str(i), random_source.choices(range(4), k=random_source.randint(1, 14)), max_tokens=9)
        if random_source.random() < 0.8:
            victim = str(random_source.randint(max(0, i - 6), i))
            if random_source.random() < 0.5:
                h.end(victim, FinishReason.ABORT)
            else:
                h.step(in_flight=lambda victim=victim: h.end(victim, FinishReason.ABORT))
        else:
            h.step()
    h.run()
    assert h.lifecycle.num_ended == 300
    assert not h.scheduler.requests and not h.kv.sequences
    reasons = [event.finish_reason for event in h.events_of(RequestFinished)]
    assert reasons.count(FinishReason.ABORT) > 50 and reasons.count(FinishReason.LENGTH) > 50


def test_an_id_that_comes_back_does_not_get_the_old_ones_token() -> None:
    """E09: aborted in flight, and a new request takes the id before the step returns."""
    h = Harness()
    h.add("a", [1, 2, 3], max_tokens=4)

    def replace() -> None:
        h.end("a", FinishReason.ABORT)
        h.add("a", [7, 8, 9, 10], max_tokens=4)

    h.step(in_flight=replace)
    assert h.outputs["a"] == []
    h.run()
    h.check_answer("a")


@pytest.mark.parametrize("budget", [4, 64])
@pytest.mark.parametrize("windows", [(8,), (8, 12)])
def test_a_windowed_prompt_longer_than_the_pool_runs(windows: Windows, budget: int) -> None:
    """E17: admission and allocation use one formula; chunks shrink to what fits beside the window."""
    h = Harness(num_blocks=5, windows=windows, max_num_batched_tokens=budget)
    h.add("long", range(49), max_tokens=10)
    h.add("other", range(20, 45), max_tokens=10)
    h.run()
    h.check_answer("long")
    h.check_answer("other")


@pytest.mark.parametrize(("num_shared", "num_cached"), [(3, 3), (4, 4), (5, 5)])
def test_a_prefix_shorter_than_a_block_is_reused_all_the_same(num_shared: int, num_cached: int) -> None:
    """F03: reuse is token-granular."""
    h = Harness()
    for i in range(20):
        request = h.generate(str(i), [*range(num_shared), 30 + i, 30 + i, 30 + i, 30 + i], max_tokens=1)
        assert request.num_cached_tokens == (num_cached if i else 0)


def test_only_eligible_lookups_count_and_each_request_once() -> None:
    """F04: not those that bypass the cache, not those repeated while a request waits or after preemption."""
    h = Harness(num_blocks=12)
    for i in range(3):
        h.add(f"query {i}", [i] * 16, max_tokens=16)
        h.add(f"logprobs {i}", [10 + i] * 8, max_tokens=2, prompt_logprobs=0)
        h.add(f"bypass {i}", [20 + i] * 8, max_tokens=2, use_cache=False)
    h.run()
    assert h.events_of(RequestPreempted)
    stats = h.scheduler.prefix_stats
    assert (stats.num_queries, stats.num_queried_tokens) == (3, 48)
    assert stats.num_misses[MissReason.DISABLED] == 6


def test_no_delta_before_the_first_token() -> None:
    """G02, G09: a chunk that is not the last brings nothing to tell."""
    h = Harness(max_num_batched_tokens=4)
    h.add("a", range(12), max_tokens=1)
    steps = 0
    while not h.outputs["a"]:
        assert "a" not in h.ended
        h.step()
        steps += 1
    assert steps == 3
