"""Random traffic over tiny pools: invariants I1 to I11 after every step, answers equal to a naive oracle."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagoda.config import CacheConfig
from pagoda.core.invariants import check_state
from pagoda.core.request import FinishReason
from pagoda.errors import CapacityError, RequestError
from pagoda.sim.sim_executor import LinearCostModel
from tests.core.harness import Harness

WINDOWS = [(None,), (None, 5), (3, None), (4,), (2, 7), (None, 1), (6, None, 9)]
VOCAB_SIZE = 4


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Few tokens and a few common beginnings, so that prefixes are shared, extended and diverge."""
    stem = draw(st.sampled_from([[1, 2, 3, 1, 2, 0, 3, 3, 1, 0], [2, 2, 1, 3, 0, 0, 1], [3]]))
    cut = draw(st.integers(0, len(stem)))
    return stem[:cut] + draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8))


class Traffic(RuleBasedStateMachine):
    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        windows = data.draw(st.sampled_from(WINDOWS))
        block_size = data.draw(st.sampled_from([1, 2, 4]))
        self.harness = Harness(
            [data.draw(st.integers(3, 16)) for _ in windows],
            windows=windows,
            block_size=block_size,
            vocab_size=VOCAB_SIZE,
            cache=CacheConfig(
                block_size=block_size,
                enable_prefix_caching=data.draw(st.sampled_from([True, True, True, False])),
                enable_partial_block_reuse=data.draw(st.booleans()),
                max_pinned_share=data.draw(st.sampled_from([0.2, 0.6, 1.0])),
            ),
            max_num_seqs=data.draw(st.integers(1, 5)),
            max_num_batched_tokens=data.draw(st.sampled_from([1, 2, 3, 5, 8, 30])),
            max_model_len=data.draw(st.sampled_from([12, 20, 60])),
            scheduling_policy=data.draw(st.sampled_from(["fcfs", "priority"])),
            watermark=data.draw(st.sampled_from([0.0, 0.1])),
            long_prefill_token_threshold=data.draw(st.sampled_from([0, 0, 2, 4])),
            max_num_partial_prefills=data.draw(st.sampled_from([1, 3])),
            max_prefill_tokens_while_decoding=data.draw(st.sampled_from([0, 1, 4])),
            max_decode_slowdown=data.draw(st.sampled_from([0.0, 1.5, 4.0])),
            longest_prefix_first=data.draw(st.booleans()),
            duration_s=LinearCostModel(step_s=1e-3, token_s=1e-3).duration_s,
        )
        self.num_requests = 0

    @rule(
        prompt=prompts(),
        max_tokens=st.sampled_from([0, 1, 2, 5, 12, None]),
        min_tokens=st.integers(0, 3),
        eos=st.sampled_from([frozenset(), frozenset({0}), frozenset({1, 2})]),
        stop_token_ids=st.sampled_from([(), (), (3,)]),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        priority=st.integers(-2, 2),
        cache_salt=st.sampled_from([None, None, "a"]),
        use_cache=st.sampled_from([True, True, True, False]),
        patience_s=st.sampled_from([None, None, None, 3.0]),
        n=st.sampled_from([1, 1, 2, 4]),
    )
    def add(self, prompt: list[int], patience_s: float | None, n: int, **options: object) -> None:
        self.num_requests += 1
        max_tokens, min_tokens = options["max_tokens"], options["min_tokens"]
        assert isinstance(min_tokens, int)
        if isinstance(max_tokens, int):
            options["min_tokens"] = min(min_tokens, max_tokens)
        if patience_s is not None:
            options["deadline_s"] = self.harness.now_s + patience_s
        request_id = f"r{self.num_requests}"
        try:
            self.harness.add_choices(request_id, n, prompt, eos_token_ids=options.pop("eos"), **options)
        except RequestError:
            assert len(prompt) >= self.harness.scheduler.config.max_model_len
        except CapacityError:
            max_kv = self.harness.kv.max_sequence_tokens()
            assert max_kv is not None and len(prompt) > max_kv

    @rule(num_steps=st.integers(1, 5))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    @precondition(lambda self: self.harness.scheduler.requests)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.harness.scheduler.requests)))
        assert self.harness.end(request_id, reason, "stop string")
        assert not self.harness.end(request_id, reason)

    @precondition(lambda self: self.harness.scheduler.requests)
    @rule(data=st.data())
    def end_in_flight(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.harness.scheduler.requests)))
        self.harness.step(in_flight=lambda: self.harness.end(request_id, FinishReason.ABORT))

    @precondition(lambda self: self.harness.scheduler.requests)
    @rule(data=st.data())
    def fail_one(self, data: st.DataObject) -> None:
        self.harness.model.failing = {data.draw(st.sampled_from(sorted(self.harness.scheduler.requests)))}
        self.harness.step()
        self.harness.model.failing = set()

    @rule()
    def fail_step(self) -> None:
        self.harness.step(fail=True)

    @rule(duration_s=st.sampled_from([0.5, 10.0]))
    def wait(self, duration_s: float) -> None:
        self.harness.now_s += duration_s

    @rule(prompt=prompts(), cache_salt=st.sampled_from([None, "a"]), ttl_s=st.sampled_from([None, 1.0, 15.0]))
    def pin(self, prompt: list[int], cache_salt: str | None, ttl_s: float | None) -> None:
        try:
            info = self.harness.scheduler.pin_prefix(prompt, ttl_s=ttl_s, cache_salt=cache_salt)
        except (RequestError, CapacityError):
            return
        assert info in self.harness.scheduler.list_prefixes()
        assert info.first_token_ids == tuple(prompt[: info.num_tokens])

    @rule(data=st.data())
    def pin_or_unpin_by_hash(self, data: st.DataObject) -> None:
        prefixes = self.harness.scheduler.list_prefixes()
        if not prefixes:
            return
        info = data.draw(st.sampled_from(prefixes))
        if info.pinned:
            assert self.harness.scheduler.unpin_prefix(block_hash=info.block_hash)
            assert not self.harness.scheduler.unpin_prefix(block_hash=info.block_hash)
            return
        try:
            self.harness.scheduler.pin_prefix(block_hash=info.block_hash)
        except (RequestError, CapacityError):
            return

    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.kv.reset_prefix_cache()
        assert all(usage.num_reusable == usage.num_pinned == 0 for usage in self.harness.kv.usage())

    @invariant()
    def invariants_hold(self) -> None:
        if hasattr(self, "harness"):
            check_state(self.harness.scheduler)
            prefixes = self.harness.scheduler.list_prefixes()
            assert self.harness.pinned == {p.block_hash: p.num_tokens for p in prefixes if p.pinned}
            for request_id in self.harness.requests:
                self.harness.check_answer(request_id)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run()
            assert not self.harness.kv.forks.kept
            for request_id, request in self.harness.requests.items():
                assert request_id in self.harness.ended
                assert request.is_finished
                self.harness.check_answer(request_id)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
