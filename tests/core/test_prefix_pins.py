"""Pins keep a prefix from eviction, for a time and for a share of the pool; listing tells what is cached."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.config import CacheConfig
from pagoda.core.events import PrefixPinned, PrefixUnpinned
from pagoda.core.prefix_pins import PREVIEW_TOKENS, PrefixInfo
from pagoda.errors import CapacityError, RequestError
from tests.core.harness import Harness
from tests.core.paged_model import Windows

A = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def make_harness(num_blocks: int = 16, *, share: float = 0.5, windows: Windows = (None,)) -> Harness:
    cache = CacheConfig(block_size=4, max_pinned_share=share)
    return Harness(num_blocks, windows=windows, cache=cache, max_model_len=32)


def flood(h: Harness, num_requests: int = 12) -> None:
    """Enough other prompts to evict everything that may be evicted."""
    for i in range(num_requests):
        h.generate(f"flood {h.now_s} {i}", [20 + i] * 24, max_tokens=2)


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)])
def test_a_pinned_prefix_survives_what_evicts_all_others(windows: Windows) -> None:
    h = make_harness(windows=windows)
    h.generate("a", A, max_tokens=1)
    assert h.scheduler.pin_prefix(A).num_tokens == 8
    h.generate("b", A[::-1], max_tokens=1)
    flood(h)
    assert h.generate("a again", A, max_tokens=4).num_cached_tokens == 8
    assert h.generate("b again", A[::-1], max_tokens=1).num_cached_tokens == 0
    h.check_answer("a again")


def test_an_unpinned_prefix_is_evicted_like_any_other() -> None:
    h = make_harness()
    h.generate("a", A, max_tokens=1)
    h.scheduler.pin_prefix(A)
    assert h.scheduler.unpin_prefix(A)
    assert not h.scheduler.unpin_prefix(A)
    assert h.kv.usage()[0].num_pinned == 0
    flood(h)
    assert h.generate("a again", A, max_tokens=1).num_cached_tokens == 0


def test_a_pin_ends_with_its_time() -> None:
    h = make_harness()
    h.generate("a", A, max_tokens=1)
    assert h.scheduler.pin_prefix(A, ttl_s=10.0).ttl_s == 10.0
    h.now_s = 9.0
    flood(h)
    assert h.scheduler.list_prefixes()[-1].ttl_s == 1.0
    assert h.generate("within", A, max_tokens=1).num_cached_tokens == 8
    h.now_s = 10.0
    flood(h)
    assert h.generate("after", A, max_tokens=1).num_cached_tokens == 0
    assert not any(info.pinned for info in h.scheduler.list_prefixes())


def test_a_second_pin_sets_its_time_anew() -> None:
    h = make_harness()
    h.generate("a", A, max_tokens=1)
    h.scheduler.pin_prefix(A, ttl_s=1.0)
    h.scheduler.pin_prefix(A)
    h.now_s = 5.0
    assert [(i.pinned, i.ttl_s) for i in h.scheduler.list_prefixes()] == [(True, None)]
    assert h.kv.usage()[0].num_pinned == 2


def test_usage_tells_the_four_states_apart() -> None:
    h = make_harness()
    h.generate("a", A, max_tokens=1)
    h.generate("b", A[::-1], max_tokens=1)
    h.scheduler.pin_prefix(A)
    h.add("c", [*A, 11], max_tokens=5)
    h.step()
    usage = h.kv.usage()[0]
    assert usage == (16 - 3 - 1 - 3, 4, 3, 0)  # two pinned blocks are in use: held comes before pinned
    h.run()
    usage = h.kv.usage()[0]
    assert (usage.num_held, usage.num_pinned, usage.num_blocks) == (0, 2, 16)
    assert usage.used_share == 2 / 16


def test_pins_are_bounded_and_share_what_they_have_in_common() -> None:
    h = make_harness(num_blocks=16, share=0.25)
    h.generate("a", A, max_tokens=1)
    h.generate("b", [*A[:4], *[40] * 8], max_tokens=1)
    h.scheduler.pin_prefix(A)
    h.scheduler.pin_prefix([*A[:4], *[40] * 8])
    assert h.kv.usage()[0].num_pinned == 4
    h.generate("c", [41] * 4, max_tokens=1)
    with pytest.raises(CapacityError, match="needs 1 more pinned blocks; 4 of at most 4"):
        h.scheduler.pin_prefix([41] * 4)
    h.scheduler.unpin_prefix(A)
    assert h.kv.usage()[0].num_pinned == 3  # the block that both began with stays
    h.scheduler.pin_prefix([41] * 4)


def test_pins_leave_room_for_the_longest_sequence() -> None:
    """Whoever is first in order must always be able to go on."""
    h = make_harness(num_blocks=10, share=1.0)
    h.generate("a", [1] * 16, max_tokens=1)
    with pytest.raises(CapacityError, match="of at most 2"):
        h.scheduler.pin_prefix([1] * 16)
    h.scheduler.pin_prefix([1] * 8)
    h.add("longest", [2] * 20, max_tokens=None)
    h.add("other", [3] * 20, max_tokens=None)
    h.run()
    assert h.requests["longest"].num_tokens == h.requests["other"].num_tokens == 32


def test_a_prefix_may_be_named_by_its_hash() -> None:
    h = make_harness()
    h.generate("a", A, max_tokens=1)
    (info,) = h.scheduler.list_prefixes()
    assert (info.num_tokens, info.hash) == (8, info.block_hash.hex())
    assert h.scheduler.pin_prefix(block_hash=info.block_hash).pinned
    flood(h)
    assert h.generate("b", A, max_tokens=1).num_cached_tokens == 8
    assert h.scheduler.unpin_prefix(block_hash=info.block_hash)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"token_ids": [40] * 8}, "prompt"),
        ({"token_ids": A[:3]}, "prompt"),
        ({"token_ids": A, "cache_salt": "other"}, "prompt"),
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [-1]}, "prompt"),
        ({"token_ids": A, "block_hash": b"x"}, "prompt"),
        ({}, "prompt"),
        ({"block_hash": b"x"}, "block_hash"),
        ({"token_ids": A, "ttl_s": 0.0}, "ttl_s"),
        ({"token_ids": A, "ttl_s": float("nan")}, "ttl_s"),
    ],
)
def test_what_cannot_be_pinned_is_refused(arguments: dict[str, object], param: str) -> None:
    h = make_harness()
    h.generate("a", A, max_tokens=1)
    with pytest.raises(RequestError) as refusal:
        h.scheduler.pin_prefix(**arguments)  # type: ignore[arg-type]
    assert refusal.value.param == param
    assert len(h.kv.pins) == 0


def test_a_salted_prefix_is_pinned_under_its_salt() -> None:
    h = make_harness()
    h.generate("a", A, max_tokens=1, cache_salt="tenant")
    h.scheduler.pin_prefix(A, cache_salt="tenant")
    assert not h.scheduler.unpin_prefix(A)
    flood(h)
    assert h.generate("b", A, max_tokens=1, cache_salt="tenant").num_cached_tokens == 8


def test_without_prefix_caching_there_is_nothing_to_pin() -> None:
    h = Harness(cache=CacheConfig(block_size=4, enable_prefix_caching=False), max_model_len=32)
    h.generate("a", A, max_tokens=1)
    with pytest.raises(RequestError):
        h.scheduler.pin_prefix(A)
    assert h.scheduler.list_prefixes() == []


def test_events_tell_when_a_prefix_is_pinned_and_why_no_more() -> None:
    h = make_harness()
    for name, prompt in (("a", A), ("b", A[::-1])):
        h.generate(name, prompt, max_tokens=1)
    first = h.scheduler.pin_prefix(A, ttl_s=10.0)
    second = h.scheduler.pin_prefix(A[::-1])
    h.now_s = 10.0
    h.step()
    assert not h.scheduler.unpin_prefix(A) and h.scheduler.unpin_prefix(A[::-1])
    h.scheduler.pin_prefix(A)
    h.scheduler.reset_prefix_cache()
    assert [(e.block_hash, e.num_tokens, e.ttl_s) for e in h.events_of(PrefixPinned)] == [
        (first.block_hash, 8, 10.0),
        (second.block_hash, 8, None),
        (first.block_hash, 8, None),
    ]
    assert [(e.block_hash, e.reason) for e in h.events_of(PrefixUnpinned)] == [
        (first.block_hash, "expired"),
        (second.block_hash, "asked"),
        (first.block_hash, "reset"),
    ]


def test_a_reset_takes_pins_with_it() -> None:
    h = make_harness()
    h.generate("a", A, max_tokens=1)
    h.scheduler.pin_prefix(A)
    assert h.scheduler.reset_prefix_cache() == 3
    assert h.scheduler.list_prefixes() == []
    assert h.kv.usage()[0] == (16, 0, 0, 0)


def test_what_is_in_doubt_does_not_stay_pinned() -> None:
    """A prefix is pinned while the request that computes it runs, and then that request fails."""
    h = make_harness()
    h.add("a", A, max_tokens=8)
    h.step()
    h.scheduler.pin_prefix(A)
    h.model.failing = {"a"}
    h.step()
    assert len(h.kv.pins) == 0
    h.model.failing = set()
    assert h.generate("b", A, max_tokens=1).num_cached_tokens == 0


def test_listing_tells_who_uses_what_and_when() -> None:
    h = make_harness(num_blocks=40)
    h.generate("a", A, max_tokens=1)
    h.now_s = 3.0
    h.add("b", [*A[:4], 40, 41, 42, 43, 44], max_tokens=5)
    h.add("c", [*A[:4], 40, 41, 42, 43, 45], max_tokens=5)
    for _ in range(3):
        h.step()
    used, idle = h.scheduler.list_prefixes()
    assert (used.num_tokens, used.ref_count, used.last_use_s) == (8, 2, 3.0)
    assert used.first_token_ids == (*A[:4], 40, 41, 42, 43)
    assert (idle.num_tokens, idle.ref_count, idle.last_use_s) == (8, 0, 0.0)
    h.now_s = 4.0
    h.run()
    assert h.scheduler.list_prefixes()[0].last_use_s == 4.0
    assert isinstance(used, PrefixInfo) and not used.pinned


def test_a_preview_is_short() -> None:
    h = Harness()
    h.generate("a", [t % 50 for t in range(100)], max_tokens=1)
    assert h.scheduler.list_prefixes()[0].first_token_ids == tuple(range(PREVIEW_TOKENS))


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=16), min_size=1, max_size=6),
    share=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    windows=st.sampled_from([(None,), (None, 5), (6,)]),
)
def test_all_that_is_pinned_hits_whatever_came_between(
    prompts: list[list[int]], share: float, windows: Windows
) -> None:
    h = make_harness(share=share, windows=windows)
    pinned: list[tuple[list[int], int]] = []
    for i, prompt in enumerate(prompts):
        h.generate(str(i), [*prompt, 3], max_tokens=1)
        try:
            pinned.append((prompt, h.scheduler.pin_prefix(prompt).num_tokens))
        except CapacityError:
            assert share < 1.0 or len(pinned) > 0
    flood(h)
    for i, (prompt, num_tokens) in enumerate(pinned):
        assert h.generate(f"again {i}", [*prompt, 4], max_tokens=1).num_cached_tokens >= num_tokens
    for pool, limit in zip(h.kv.usage(), h.kv.pins.max_blocks, strict=True):
        assert pool.num_pinned <= limit <= share * 16


def test_a_pinned_hit_costs_no_room() -> None:
    """Its blocks are nobody else's to take, so a request beside which only the rest fits may start."""
    h = make_harness(num_blocks=10, share=1.0)
    h.generate("a", A[:8], max_tokens=1)
    h.scheduler.pin_prefix(A[:8])
    h.add("running", [40], max_tokens=3)
    h.step()
    h.add("b", [*A[:8], *[41] * 23], max_tokens=1)
    h.step()
    assert h.requests["b"].num_cached_tokens == 8
    h.run()
