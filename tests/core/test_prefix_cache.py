"""What is reused, what is not, and what the cache says about it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.config import CacheConfig
from pagoda.core.block_hash import ExtraKey, encode_extra_keys, hash_block, root_hash
from pagoda.core.events import BlockCached, RequestScheduled
from pagoda.core.prefix_cache import MissReason, PrefixMiss
from pagoda.core.request import FinishReason
from tests.core.harness import Harness
from tests.core.paged_model import Windows, make_request

A = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_block_hashes_are_the_same_in_every_process() -> None:
    """Other caches use them as keys; a change of this value throws those away."""
    root = root_hash("model", 4, encode_extra_keys([ExtraKey("salt", b"a")]))
    tokens = b"".join(t.to_bytes(4, "little") for t in (1, 2, 3, 4))
    assert hash_block(root, tokens).hex().startswith("6e04da09419ddf89")
    others = [
        (root, tokens, b"extra"),
        (tokens, root, b""),
        (root, tokens[4:], b""),
        (b"\0" * 32, tokens, b""),
    ]
    assert len({hash_block(root, tokens), *(hash_block(*other) for other in others)}) == 5
    h = Harness(cache=CacheConfig(block_size=4, cache_namespace="model"))
    h.generate("a", A, cache_salt="a")
    assert h.events_of(BlockCached)[0].block_hash == hash_block(root, tokens)


@given(st.lists(st.tuples(st.sampled_from(["salt", "adapter", "s"]), st.binary(max_size=9)), max_size=3))
def test_extra_keys_cannot_be_confused(keys: list[tuple[str, bytes]]) -> None:
    """Their encoding can be read back, so two lists of keys never look alike."""
    encoded = encode_extra_keys(ExtraKey(*key) for key in keys)
    parts = []
    while encoded:
        length = int.from_bytes(encoded[:8], "little")
        parts.append(encoded[8 : 8 + length])
        encoded = encoded[8 + length :]
    assert parts == [part for kind, value in keys for part in (kind.encode(), value)]


def test_a_salt_is_not_an_adapter() -> None:
    assert make_request("a", [1], cache_salt="x").cache_root != make_request("a", [1], adapter="x").cache_root


@pytest.mark.parametrize("num_common", range(11))
def test_reuse_is_token_granular(num_common: int) -> None:
    h = Harness()
    h.generate("a", A, max_tokens=4)
    b = h.generate("b", [*A[:num_common], 40, 41, 42, 43, 44], max_tokens=4)
    assert b.num_cached_tokens == num_common
    h.check_answer("b")


def test_the_partly_filled_tail_of_an_answer_is_reused() -> None:
    h = Harness()
    a = h.generate("a", A, max_tokens=5)
    chat = [*a.token_ids, 40, 41]
    b = h.generate("b", chat, max_tokens=5)
    assert b.num_cached_tokens == len(a.token_ids) - 1  # the last token was never computed
    h.check_answer("b")


def test_without_partial_reuse_only_whole_blocks_hit() -> None:
    h = Harness(cache=CacheConfig(block_size=4, enable_partial_block_reuse=False))
    h.generate("a", A)
    assert h.generate("b", [*A[:7], 40, 41]).num_cached_tokens == 4
    assert not any(step.block_copies for step in h.steps)


def test_a_short_pool_does_without_the_copy() -> None:
    """The source of a copy takes room while a step is planned; a request must not wait for that."""
    h = Harness(num_blocks=2)
    h.generate("a", A[:8], max_tokens=1)
    assert h.generate("b", A[:8], max_tokens=1).num_cached_tokens == 4
    h.check_answer("b")


@pytest.mark.parametrize(
    ("prompt", "miss"),
    [
        (A, None),
        ([30, 31], PrefixMiss(MissReason.NEVER_SEEN, 0, 0, 30, 1)),
        ([*A, 40, 41], PrefixMiss(MissReason.NEVER_SEEN, 10, 10, 40, None)),
        ([*A[:6], 40, 41], PrefixMiss(MissReason.DIVERGED, 6, 6, 40, 7)),
        ([*A[:8], 40, 41], PrefixMiss(MissReason.DIVERGED, 8, 8, 40, 9)),
    ],
)
def test_a_miss_explains_itself(prompt: list[int], miss: PrefixMiss | None) -> None:
    h = Harness()
    h.generate("a", A, max_tokens=1)
    request = h.generate("b", prompt)
    assert request.prefix_miss == miss
    assert h.events_of(RequestScheduled)[-1].miss == miss
    if miss is not None:
        assert h.scheduler.prefix_stats.num_misses[miss.reason] >= 1


def test_a_miss_inside_a_block_that_may_not_be_copied_says_so() -> None:
    h = Harness(cache=CacheConfig(block_size=4, enable_partial_block_reuse=False))
    h.generate("a", A)
    request = h.generate("b", [*A[:6], 40, 41])
    assert request.prefix_miss == PrefixMiss(MissReason.PARTIAL_BLOCK, 4, 6, 40, 7)


def test_what_has_been_cached_again_is_not_called_evicted() -> None:
    h = Harness(num_blocks=3, cache=CacheConfig(block_size=4, enable_partial_block_reuse=False))
    h.generate("a", A[:8], max_tokens=1)
    h.generate("others", range(20, 32), max_tokens=1)
    again = h.generate("again", A[:8], max_tokens=1)
    assert again.prefix_miss is not None and again.prefix_miss.reason is MissReason.EVICTED
    request = h.generate("b", A[:8], max_tokens=1)  # its second block is cached, and holds its last token
    assert request.prefix_miss == PrefixMiss(MissReason.PARTIAL_BLOCK, 4, 7, 8, None)


@pytest.mark.parametrize("off", ["config", "request", "prompt_logprobs"])
def test_a_bypass_is_not_a_query(off: str) -> None:
    h = Harness(cache=CacheConfig(block_size=4, enable_prefix_caching=off != "config"))
    h.generate("a", A)
    options: dict[str, object] = {
        "request": {"use_cache": False},
        "prompt_logprobs": {"prompt_logprobs": 0},
    }.get(off, {})
    request = h.generate("b", A, **options)
    assert request.num_cached_tokens == 0
    assert request.prefix_miss is not None and request.prefix_miss.reason is MissReason.DISABLED
    assert h.scheduler.prefix_stats.num_queries == (0 if off == "config" else 1)
    h.check_answer("b")


def test_a_request_without_cache_leaves_nothing_there() -> None:
    h = Harness()
    h.generate("a", A, use_cache=False)
    assert h.kv.usage()[0].num_reusable == 0
    assert h.generate("b", A).num_cached_tokens == 0


def test_a_prefix_that_arrives_many_times_is_computed_once() -> None:
    """48 requests at once: all wait for the blocks that the first one is computing."""
    h = Harness(num_blocks=200, max_num_seqs=48, max_num_batched_tokens=16)
    prefix = [t % 50 for t in range(100)]
    for i in range(48):
        h.add(str(i), [*prefix, i, i, i], max_tokens=3)
    h.run()
    assert h.model.num_computed_tokens <= 100 + 48 * (3 + 2)
    for request_id in h.requests:
        h.check_answer(request_id)


def test_those_who_wait_for_a_block_go_on_when_nobody_computes_it_any_more() -> None:
    h = Harness(max_num_batched_tokens=4)
    h.add("a", range(40), max_tokens=2)
    h.add("b", [*range(30), 45, 46], max_tokens=2)
    h.step()
    assert h.scheduler.num_running == 1
    h.end("a", FinishReason.ABORT)
    h.run()
    h.check_answer("b")


def test_waiting_for_a_block_holds_up_nobody_else() -> None:
    h = Harness(long_prefill_token_threshold=6)
    h.add("a", range(40), max_tokens=2)
    h.add("b", range(40), max_tokens=2)
    h.add("c", [48, 47], max_tokens=2)
    while not h.requests["c"].num_output_tokens:
        h.step()
    assert h.requests["b"].num_computed_tokens == 0
    h.run()


def test_equal_answers_are_held_once() -> None:
    """Requests that decode the same tokens come to share the blocks of their answers, too."""
    h = Harness(num_blocks=40)
    for i in range(4):
        h.add(str(i), A[:3], max_tokens=30)
    for _ in range(25):
        h.step()
    assert h.kv.usage()[0].num_held <= 7 + 4
    h.run()
    for request_id in h.requests:
        h.check_answer(request_id)


@pytest.mark.parametrize("windows", [(None, 8), (8,)])
def test_a_windowed_hit_needs_the_window_only(windows: Windows) -> None:
    """The windowed pool holds a third of the prompt, and its end still hits."""
    h = Harness(num_blocks=[40] * (len(windows) - 1) + [8], windows=windows)
    a = h.generate("a", range(47), max_tokens=4)
    b = h.generate("b", [*a.token_ids, 5, 6], max_tokens=4)
    assert b.num_cached_tokens == a.num_tokens - 1
    h.check_answer("b")


def test_a_windowed_hit_stops_where_the_window_is_gone() -> None:
    """Full attention would hit 20 tokens; the windowed group has only the end of the longer prompt."""
    h = Harness(num_blocks=[40, 6], windows=(None, 8))
    h.generate("a", range(44), max_tokens=4)
    b = h.generate("b", [*range(20), 49, 48], max_tokens=4)
    assert b.num_cached_tokens == 0
    assert b.prefix_miss is not None and b.prefix_miss.reason is MissReason.EVICTED
    h.check_answer("b")


def test_resuming_after_preemption_hits_what_it_had() -> None:
    h = Harness(num_blocks=13)
    h.add("a", [1] * 16, max_tokens=24)
    h.add("b", [2] * 16, max_tokens=24)
    h.run()
    resumed = [e for e in h.events_of(RequestScheduled) if e.resumed]
    assert resumed and all(e.num_cached_tokens > 0 for e in resumed)
    assert h.requests["b"].num_cached_tokens == 0  # of the prompt, when it first came


def test_blocks_of_a_failed_request_are_forgotten() -> None:
    """What a request without finite logits has computed may not reach anybody else."""
    h = Harness(max_num_batched_tokens=4)
    h.generate("before", A[:5], max_tokens=1)
    h.model.failing = {"a"}
    h.generate("a", A * 3, max_tokens=4)
    h.model.failing = set()
    assert h.generate("b", A * 3, max_tokens=4).num_cached_tokens == 5  # of the request before
    h.check_answer("b")


def test_a_block_that_was_to_be_copied_and_never_was_is_no_hit() -> None:
    """The copy's source is forgotten and its request aborted in flight, and the step itself is lost."""
    h = Harness()
    h.generate("a", A[:7], max_tokens=1)
    h.add("b", [*A[:6], 40, 41], max_tokens=4)

    def reset_and_abort() -> None:
        h.kv.reset_prefix_cache()
        h.end("b", FinishReason.ABORT)

    step = h.step(in_flight=reset_and_abort, fail=True)
    assert step is not None and step.block_copies
    h.generate("c", [*A[:6], 40, 42], max_tokens=4)
    h.check_answer("c")


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    h = Harness(num_blocks=6)
    old, new = [1] * 8, [2] * 8
    h.generate("old", old, max_tokens=1)
    h.generate("new", new, max_tokens=1)
    h.generate("old again", old, max_tokens=1)
    h.generate("other", [3] * 12, max_tokens=1)
    assert h.generate("check old", old, max_tokens=1).num_cached_tokens == 7
    assert h.generate("check new", new, max_tokens=1).num_cached_tokens == 0


def test_reset_forgets_what_nobody_holds() -> None:
    h = Harness()
    h.generate("a", A)
    h.add("b", [20, 21, 22, 23, 24], max_tokens=3)
    h.step()
    assert h.kv.reset_prefix_cache() > 0
    assert h.kv.usage()[0].num_reusable == 0
    h.run()
    assert h.generate("c", A).num_cached_tokens == 0
    assert h.generate("d", [20, 21, 22, 23, 24]).num_cached_tokens == 4


def test_many_salts_leave_nothing_behind() -> None:
    h = Harness(num_blocks=6)
    for i in range(100):
        h.generate(str(i), A, cache_salt=str(i))
    assert len([n for n in h.kv.prefix_cache.nodes() if n.parent is None]) <= 6
