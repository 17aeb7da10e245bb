"""Random mixes of requests over a tiny KV cache: each ends once, as if it had been alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.config import CacheConfig
from pagoda.core.invariants import check_state
from pagoda.core.step import SchedulerOutput
from pagoda.engine.engine import Engine
from pagoda.engine.output import CompletionOutput, OutputKind, RequestOutput
from pagoda.engine.seeds import choice_seed
from pagoda.errors import CapacityError
from pagoda.sampling_params import SamplingParams
from tests.engine.engines import EOS, VOCAB_SIZE, check_idle, drain, run, scripted_engine

MAX_MODEL_LEN = 40


@cache
def logits(history: tuple[int, ...]) -> np.ndarray:
    """A model of few words, whose next token depends on the whole history and may end it."""
    rng = np.random.default_rng(abs(hash(history)) % 2**32)
    row = np.full(VOCAB_SIZE, -np.inf, np.float32)
    words = np.array([*b"abcd", EOS])
    row[words] = rng.normal(size=len(words)) * 2
    return row


def model(history: Sequence[int]) -> np.ndarray:
    return logits(tuple(history))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    max_tokens=st.integers(0, 20),
    n=st.sampled_from([1, 1, 1, 2]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    stop=st.sampled_from([(), ("ab",), ("dd", "ca")]),
    logprobs=st.sampled_from([None, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, 1]),
)
# Few different prompts, of few letters, so that requests share prefixes of all lengths.
PROMPTS = st.builds(
    lambda text, n: (text * 20)[:n].encode(), st.sampled_from(["a", "ab", "abc"]), st.integers(1, 20)
)


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: bytes
    params: SamplingParams
    kind: OutputKind
    use_cache: bool
    abort_after: int | None  # steps


ARRIVALS = st.builds(
    Arrival,
    step=st.integers(0, 25),
    prompt=PROMPTS,
    params=PARAMS,
    kind=st.sampled_from(OutputKind),
    use_cache=st.sampled_from([True, True, True, False]),
    abort_after=st.sampled_from([None, None, None, 0, 1, 3, 8]),
)


def alone(arrival: Arrival) -> RequestOutput:
    """The answer of a cold engine with room for everything."""
    engine = scripted_engine(model, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64)
    return run(engine, {"x": (arrival.prompt, arrival.params)})["x"]


def joined(outputs: list[RequestOutput], kind: OutputKind) -> dict[int, CompletionOutput]:
    """The choices of one request from all its outputs; those of a stream are put together."""
    if kind is not OutputKind.DELTA:
        return {choice.index: choice for choice in outputs[-1].outputs}
    parts: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for choice in output.outputs:
            parts.setdefault(choice.index, []).append(choice)
    return {
        index: CompletionOutput(
            index,
            "".join(c.text for c in choices),
            [t for c in choices for t in c.token_ids],
            None if choices[0].logprobs is None else [p for c in choices for p in c.logprobs or ()],
            choices[-1].cumulative_logprob,
            choices[-1].finish_reason,
            choices[-1].stop_reason,
            choices[-1].error,
        )
        for index, choices in parts.items()
    }


def play(engine: Engine, arrivals: Sequence[Arrival]) -> dict[int, list[RequestOutput]]:
    """Let requests come and go at their steps; all outputs by number of the request."""
    outputs: list[RequestOutput] = []
    refused = set()
    last_step = max(a.step + (a.abort_after or 0) for a in arrivals)
    for step in range(last_step + 1):
        for number, a in enumerate(arrivals):
            if a.step == step:
                try:
                    engine.add_request(
                        str(number), a.prompt, a.params, output_kind=a.kind, use_cache=a.use_cache
                    )
                except CapacityError:
                    refused.add(number)
            if a.abort_after is not None and a.step + a.abort_after == step:
                outputs += engine.abort([str(number)])
        outputs += engine.step()
        check_state(engine.scheduler)
    outputs += drain(engine)
    assert Counter(o.request_id for o in outputs if o.finished) == Counter(
        str(number) for number in range(len(arrivals)) if number not in refused
    )
    return {
        n: [o for o in outputs if o.request_id == str(n)] for n in range(len(arrivals)) if n not in refused
    }


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=8),
    num_blocks=st.sampled_from([6, 9, 30]),
    budget=st.sampled_from([1, 3, 8, 64]),
    caching=st.booleans(),
)
def test_company_memory_and_chunks_change_nothing(
    arrivals: list[Arrival], num_blocks: int, budget: int, caching: bool
) -> None:
    """Principle 5; E09, A24, A26: preempted, cached, chunked or in any company, the answer is the same.

    A request that was aborted, or that the pool could not hold to its end, has the beginning of it.
    """
    engine = scripted_engine(
        model,
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        cache=CacheConfig(block_size=4, enable_prefix_caching=caching),
    )
    for number, outputs in play(engine, arrivals).items():
        arrival, expected = arrivals[number], alone(arrivals[number])
        choices = joined(outputs, arrival.kind)
        assert set(choices) == set(range(arrival.params.n))
        for index, choice in choices.items():
            whole = expected.outputs[index]
            if choice.finish_reason == "abort" or len(arrival.prompt) + len(whole.token_ids) > num_blocks * 4:
                assert list(whole.token_ids[: len(choice.token_ids)]) == list(choice.token_ids)
                continue
            assert (choice.text, list(choice.token_ids)) == (whole.text, list(whole.token_ids))
            assert (choice.finish_reason, choice.stop_reason) == (whole.finish_reason, whole.stop_reason)
            assert choice.logprobs == whole.logprobs
        if all(c.finish_reason != "abort" for c in choices.values()):
            found = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None][-1:]
            assert found == [p for p in [expected.prompt_logprobs] if p is not None]
        assert all(o.num_cached_tokens < len(arrival.prompt) for o in outputs)
        assert (caching and arrival.use_cache) or all(o.num_cached_tokens == 0 for o in outputs)


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.lists(ARRIVALS, min_size=2, max_size=6),
    failing=st.sets(st.integers(1, 40), min_size=1, max_size=5),
    windows=st.sampled_from([(None,), (None, 6), (5,)]),
)
def test_failing_steps_end_requests_once_and_never_spoil_others(
    arrivals: list[Arrival], failing: set[int], windows: tuple[int | None, ...]
) -> None:
    """Principle 7. What a failed step left in the KV cache is never read: the executor checks it."""
    num_steps = 0

    def fail(step: SchedulerOutput) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps in failing:
            raise RuntimeError("device lost")

    arrivals = [a for a in arrivals if windows[0] is None or a.params.prompt_logprobs is None]
    if not arrivals:
        return
    engine = scripted_engine(
        model, num_blocks=12, max_model_len=MAX_MODEL_LEN, before_step=fail, windows=windows
    )
    for number, outputs in play(engine, arrivals).items():
        expected = alone(arrivals[number])
        for index, choice in joined(outputs, arrivals[number].kind).items():
            whole = list(expected.outputs[index].token_ids)
            assert whole[: len(choice.token_ids)] == list(choice.token_ids)
            assert choice.finish_reason == "error" or choice.error is None
    check_idle(engine)


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_hundreds_of_aborted_requests_leave_nothing(windows: tuple[int | None, ...]) -> None:
    """E09, E10, E12: tables stay flat whatever the state a request is in when its client leaves."""
    rng = np.random.default_rng(5)
    engine = scripted_engine(model, num_blocks=16, max_model_len=MAX_MODEL_LEN, windows=windows)
    num_ended = 0
    params = [
        SamplingParams(max_tokens=20, min_tokens=5),
        SamplingParams(max_tokens=20, frequency_penalty=1.0, stop="ab"),
        SamplingParams(max_tokens=20, logit_bias={97: 2.0}),
    ]
    for number in range(300):
        prompt = b"abc"[: 1 + number % 3] * int(rng.integers(1, 7))
        engine.add_request(str(number), prompt, params[number % 3])
        if rng.random() < 0.7:
            num_ended += sum(o.finished for o in engine.step())
        live = list(engine._groups)
        if len(live) > 4:
            num_ended += len(engine.abort([str(r) for r in rng.choice(live, size=2, replace=False)]))
        assert len(engine._choices) == len(engine._groups) == len(engine.scheduler.requests) <= 6
    num_ended += len(engine.abort(list(engine._groups)))
    assert num_ended == 300
    check_idle(engine)


@settings(max_examples=40, deadline=None)
@given(
    prompt=PROMPTS,
    params=PARAMS,
    n=st.integers(2, 5),
    caching=st.booleans(),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    budget=st.sampled_from([1, 5, 16]),
    windows=st.sampled_from([(None,), (None, 6)]),
)
def test_choices_equal_requests_with_derived_seeds(
    prompt: bytes,
    params: SamplingParams,
    n: int,
    caching: bool,
    max_num_seqs: int,
    budget: int,
    windows: tuple[int | None, ...],
) -> None:
    """B33, B34: however their prompt came to them."""
    assert params.seed is not None
    options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": budget}
    cache_config = CacheConfig(block_size=4, enable_prefix_caching=caching)
    engine = scripted_engine(model, cache=cache_config, max_num_seqs=max_num_seqs, windows=windows, **options)
    output = run(engine, {"x": (prompt, replace(params, n=n))})["x"]
    for index, choice in enumerate(output.outputs):
        own = replace(params, n=1, seed=choice_seed(params.seed, index))
        expected = run(scripted_engine(model, **options), {"x": (prompt, own)})["x"].outputs[0]
        assert replace(choice, index=0) == expected
