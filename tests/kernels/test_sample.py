"""The sampler: what each parameter does, and native code against the reference, token for token."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda import _native
from pagoda.core.step import SamplingInput
from pagoda.kernels.sample import reference
from pagoda.kernels.sample.cases import CASES, SampleCase, make_batch
from pagoda.runtime.forward_batch import Float32Array, SampleResult, SamplingBatch
from pagoda.runtime.sampling_batch import build_sampling_batch
from pagoda.sampling_params import SamplingParams

Sampler = Callable[[Float32Array, SamplingBatch], SampleResult]
ISAS: list[str] = _native.isas()
LOGPROB_TOLERANCE = max(case.tolerance for case in CASES)
INF, NAN = np.float32(np.inf), np.float32(np.nan)


def native_sampler(isa: str) -> Sampler:
    def sample(logits: Float32Array, batch: SamplingBatch) -> SampleResult:
        arrays = {f.name: getattr(batch, f.name) for f in fields(batch)}
        return SampleResult(*_native.sample(isa, logits, **arrays))

    return sample


SAMPLERS: dict[str, Sampler] = {"reference": reference.sample} | {isa: native_sampler(isa) for isa in ISAS}


@pytest.fixture(params=SAMPLERS)
def sample(request: pytest.FixtureRequest) -> Sampler:
    return SAMPLERS[request.param]


def floats(*values: float) -> Float32Array:
    """One row of logits."""
    return np.array([values], np.float32)


def many(row: Float32Array, num_rows: int) -> Float32Array:
    return np.ascontiguousarray(np.broadcast_to(row, (num_rows, row.shape[1])))


def drawn(sample: Sampler, row: Float32Array, num_draws: int = 200, **params: Any) -> set[int]:
    """The tokens that many draws from one row of logits bring up."""
    batch = make_batch(num_draws, counter=np.arange(num_draws, dtype=np.uint64), **params)
    return set(sample(many(row, num_draws), batch).token_ids.tolist())


def assert_equal(result: SampleResult, expected: SampleResult) -> None:
    np.testing.assert_array_equal(result.token_ids, expected.token_ids)
    np.testing.assert_array_equal(result.top_token_ids, expected.top_token_ids)
    np.testing.assert_allclose(result.logprobs, expected.logprobs, LOGPROB_TOLERANCE, LOGPROB_TOLERANCE)
    np.testing.assert_allclose(
        result.top_logprobs, expected.top_logprobs, LOGPROB_TOLERANCE, LOGPROB_TOLERANCE
    )


def assert_samplers_agree(logits: Float32Array, batch: SamplingBatch) -> None:
    """Native code equals the reference, and every instruction set equals every other bit for bit."""
    expected = reference.sample(logits, batch)
    before = logits.copy()
    results = [SAMPLERS[isa](logits, batch) for isa in ISAS]
    np.testing.assert_array_equal(logits, before)
    assert_equal(results[0], expected)
    for result in results[1:]:
        for field in fields(SampleResult):
            np.testing.assert_array_equal(getattr(result, field.name), getattr(results[0], field.name))


# ---- native code is the reference ----


@st.composite
def sampling_problems(
    draw: st.DrawFn, vocab_sizes: st.SearchStrategy[int]
) -> tuple[Float32Array, SamplingBatch]:
    """Logits of all kinds (ties, extremes, forbidden and broken values) and rows of unlike parameters."""
    vocab_size, num_rows = draw(vocab_sizes), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 1e-6, 0.3, 3.0, 30.0, 1e4, 3e38]))
    logits = np.asarray(rng.uniform(-1, 1, (num_rows, vocab_size)) * spread, np.float32)
    if draw(st.booleans()):  # ties, and zeros of both signs
        logits = np.rint(logits)
    if draw(st.booleans()):  # some tokens stand out
        logits[:, rng.integers(vocab_size, size=3)] += np.float32(10)
    if draw(st.booleans()):
        logits[rng.random(logits.shape) < rng.random()] = -INF
    if draw(st.integers(0, 3)) == 0:
        logits[rng.integers(num_rows), rng.integers(vocab_size)] = draw(st.sampled_from([NAN, INF]))

    def choose(*options: float) -> Any:
        return rng.choice(np.array(options), num_rows)

    def subset(row: int) -> list[int]:
        size = int(rng.integers(0, vocab_size + 1)) if draw(st.booleans()) else 0
        return [int(t) for t in rng.choice(vocab_size, size, replace=False)]

    mask = rng.integers(0, 2**32, (num_rows, (vocab_size + 31) // 32), dtype=np.uint32)
    batch = make_batch(
        num_rows,
        temperature=choose(0.0, 1e-40, 1e-6, 0.1, 0.7, 1.0, 1.0, 1.5, 100.0, 1e30),
        top_k=choose(0, 0, 1, 2, 5, 40, vocab_size - 1, vocab_size, vocab_size + 7, 2**31 - 1),
        top_p=choose(1.0, 1.0, 1e-30, 1e-3, 0.3, 0.9, 0.9999999),
        min_p=choose(0.0, 0.0, 1e-20, 0.01, 0.5, 1.0),
        repetition_penalty=choose(1.0, 0.01, 0.7, 1.3, 100.0),
        presence_penalty=choose(0.0, -2.0, 0.6, 2.0),
        frequency_penalty=choose(0.0, -2.0, 0.1, 2.0),
        seed=rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        counter=rng.integers(0, 1000, num_rows, dtype=np.uint64),
        history=[{t: int(rng.integers(0, 4)) for t in subset(row)} for row in range(num_rows)],
        bias=[
            {t: float(rng.choice([-100, -1.5, 0, 7, -np.inf])) for t in subset(row)}
            for row in range(num_rows)
        ],
        num_logprobs=choose(-1, 0, 1, 5, 20),
        allowed_mask=mask if draw(st.booleans()) else None,
    )
    return logits, batch


@settings(max_examples=250, deadline=None)
@given(sampling_problems(st.integers(1, 200)))
def test_native_equals_reference(problem: tuple[Float32Array, SamplingBatch]) -> None:
    assert_samplers_agree(*problem)


@settings(max_examples=50, deadline=None)
@given(sampling_problems(st.integers(1000, 9000)))
def test_native_equals_reference_when_draws_leave_the_short_list(
    problem: tuple[Float32Array, SamplingBatch],
) -> None:
    assert_samplers_agree(*problem)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_native_equals_reference_at_the_sizes_of_models(case: SampleCase) -> None:
    assert_samplers_agree(*replace(case, num_rows=2).make_inputs())


def test_a_bucket_may_hold_the_whole_vocabulary() -> None:
    logits = np.zeros((3, 40_000), np.float32)
    logits[1, 7] = -1e30
    logits[2, ::2] = -INF
    assert_samplers_agree(logits, make_batch(3, top_k=30_000, top_p=0.5, temperature=[1.0, 100.0, 100.0]))


# ---- what the parameters mean ----


def test_greedy_takes_the_lowest_id_of_equals(sample: Sampler) -> None:
    assert sample(floats(1, 3, -2, 3, 3), make_batch(1, temperature=0)).token_ids == [1]
    assert sample(floats(-1, -0.0, 0.0), make_batch(1, temperature=0)).token_ids == [1]
    assert sample(floats(-1, 0.0, -0.0), make_batch(1, temperature=0)).token_ids == [1]


def test_greedy_looks_at_every_place(sample: Sampler) -> None:
    for vocab_size in (1, 15, 16, 17, 63, 64, 65, 130):
        logits = np.full((vocab_size, vocab_size), -3, np.float32)
        np.fill_diagonal(logits, -1)
        token_ids = sample(logits, make_batch(vocab_size, temperature=0)).token_ids
        np.testing.assert_array_equal(token_ids, np.arange(vocab_size))


def test_top_k_of_one_is_greedy_at_any_temperature(sample: Sampler) -> None:
    row = floats(0, 5, 1, 5, 4.999)
    for temperature in (1e-30, 1.0, 100.0):
        assert drawn(sample, row, temperature=temperature, top_k=1) == {1}


def test_top_k_keeps_exactly_k_of_equals(sample: Sampler) -> None:
    assert drawn(sample, floats(2, 2, 2, 2, 9, 2), temperature=50, top_k=3) == {4, 0, 1}


def test_top_k_beyond_the_vocabulary_keeps_all(sample: Sampler) -> None:
    row = floats(*np.linspace(0, 1, 20))
    assert drawn(sample, row, top_k=21) == drawn(sample, row, top_k=0) == set(range(20))


def test_top_p_keeps_the_shortest_prefix_that_reaches_it(sample: Sampler) -> None:
    row = np.log(floats(0.2, 0.5, 0.3))
    assert drawn(sample, row, top_p=1e-6) == {1}
    assert drawn(sample, row, top_p=0.49) == {1}
    assert drawn(sample, row, top_p=0.51) == {1, 2}
    assert drawn(sample, row, top_p=0.81) == {0, 1, 2}


def test_top_p_counts_what_top_k_left(sample: Sampler) -> None:
    row = np.log(floats(0.4, 0.3, 0.2, 0.1))
    # Of the two that are left, the first has 4/7.
    assert drawn(sample, row, top_k=2, top_p=0.56) == {0}
    assert drawn(sample, row, top_k=2, top_p=0.58) == {0, 1}


def test_min_p_is_relative_to_the_likeliest_token(sample: Sampler) -> None:
    row = np.log(floats(0.4, 0.3, 0.2, 0.1))
    assert drawn(sample, row, min_p=0.45) == {0, 1, 2}
    assert drawn(sample, row, min_p=0.55) == {0, 1}
    assert drawn(sample, floats(1, 2, 2, 0), min_p=1.0) == {1, 2}


def test_min_p_applies_after_temperature(sample: Sampler) -> None:
    row = np.log(floats(0.4, 0.1))  # at temperature 2 the ratio is a half
    assert drawn(sample, row, temperature=2.0, min_p=0.45) == {0, 1}
    assert drawn(sample, row, temperature=1.0, min_p=0.45) == {0}


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0, 100.0])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 200])
def test_the_only_token_left_is_chosen(sample: Sampler, temperature: float, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    for only in {0, vocab_size // 2, vocab_size - 1}:
        logits = rng.normal(0, 5, (1, vocab_size)).astype(np.float32)
        logits[0, only] = -100
        mask = np.zeros((1, (vocab_size + 31) // 32), np.uint32)
        mask[0, only // 32] = np.uint32(1 << only % 32)
        bias = {t: -math.inf for t in range(vocab_size) if t != only}
        for batch in (
            make_batch(1, temperature=temperature, allowed_mask=mask),
            make_batch(1, temperature=temperature, bias=[bias]),
        ):
            assert sample(logits, batch).token_ids == [only]


def test_bias_is_added(sample: Sampler) -> None:
    logits = floats(0, 1, 2)
    assert sample(logits, make_batch(1, temperature=0, bias=[{0: 2.5}])).token_ids == [0]
    assert sample(logits, make_batch(1, temperature=0, bias=[{2: -1.5}])).token_ids == [1]


def test_draws_follow_the_probabilities(sample: Sampler) -> None:
    """Chi-square over fixed random numbers: with 6 degrees of freedom above 30 once in 25,000 times."""
    row = floats(0.3, -1.2, 2.0, 1.1, -9.0, 0.3, 1.7, 0.9)
    weights = np.sort(np.exp(row[0] / np.float32(1.5)))[::-1][:7]
    order = np.argsort(-row[0], kind="stable")[:7]
    num_draws = 2000
    expected = num_draws * weights / weights.sum()
    numbers = np.arange(num_draws, dtype=np.uint64)
    for keys in ({"seed": numbers, "counter": 5}, {"seed": 5, "counter": numbers}):
        batch = make_batch(num_draws, temperature=1.5, top_k=7, **keys)  # type: ignore[arg-type]
        counts = np.bincount(sample(many(row, num_draws), batch).token_ids, minlength=8)
        assert counts.sum() == counts[order].sum()
        assert (np.square(counts[order] - expected) / expected).sum() < 30


# ---- penalties ----


def one_input(params: SamplingParams, prompt: list[int], output: list[int]) -> SamplingInput:
    return SamplingInput(params, 1, array("i", prompt), array("i", output))


def test_repetition_penalty_counts_a_token_once(sample: Sampler) -> None:
    """B39: 50 occurrences are penalised like one, positive logits divided and negative ones multiplied."""
    params = SamplingParams(temperature=0, repetition_penalty=1.25)
    batch = build_sampling_batch([one_input(params, [0] * 50 + [1], [0, 0]), one_input(params, [0] * 50, [])])
    np.testing.assert_array_equal(
        reference.edited_logits(floats(5, -4, 1)[0], batch, 0), np.array([4, -5, 1], np.float32)
    )
    # 5 / 1.25 is 4 (but 5 / 1.25^2 is 3.2); -4 * 1.25 is -5 (but -4 / 1.25 would be -3.2).
    logits = np.array([[5, -4, 3.5], [-4, -9, -4.9]], np.float32)
    assert sample(logits, batch).token_ids.tolist() == [0, 2]


def test_frequency_and_presence_penalties_count_the_output_only(sample: Sampler) -> None:
    params = SamplingParams(
        temperature=0, frequency_penalty=0.5, presence_penalty=1.0, repetition_penalty=1.0001
    )
    row = one_input(params, [0] * 9, [1, 1, 1, 2])
    edited = reference.edited_logits(floats(4, 5, 4, 3)[0], build_sampling_batch([row]), 0)
    np.testing.assert_allclose(edited, [4, 5 - 1.5 - 1, 4 - 0.5 - 1, 3], rtol=1e-3)
    assert sample(floats(4, 5, 4, 3), build_sampling_batch([row])).token_ids == [0]


def test_penalties_reach_the_whole_history(sample: Sampler) -> None:
    """B41: with ten distinct tokens, the first and the last are penalised alike, and no other token is."""
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    batch = build_sampling_batch([one_input(params, [3, 1, 4, 5, 9], [2, 6, 8, 7, 0])])
    assert sample(floats(*[8.0] * 10, 4.5), batch).token_ids == [10]
    assert sample(floats(*[8.0] * 10, 3.5), batch).token_ids == [0]


def test_temperature_filters_and_draw_see_penalised_logits(sample: Sampler) -> None:
    history = [{0: 1}] * 200
    assert drawn(sample, floats(10, 1, 1), history=history, repetition_penalty=100.0, top_k=2) == {1, 2}


# ---- rows without a token ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("edited", [False, True], ids=["plain", "edited"])
def test_a_broken_row_has_no_token_and_disturbs_no_other(
    sample: Sampler, temperature: float, edited: bool
) -> None:
    """B42: NaN or +inf anywhere, or nothing to choose, gives -1 in that row alone."""
    vocab_size = 70
    good = np.random.default_rng(0).normal(0, 1, (1, vocab_size)).astype(np.float32)
    bad = [
        (place, value) for value in (NAN, INF, -NAN) for place in (0, 16, 35, vocab_size - 1, slice(None))
    ] + [(slice(None), -INF)]
    logits = many(good, 2 * len(bad) + 1)
    for i, (place, value) in enumerate(bad):
        logits[2 * i + 1, place] = value
    num_rows = len(logits)
    mask = np.full((num_rows, 3), 0xFFFFFFFF, np.uint32)
    mask[:, 1] = 0xFFFFFFF0  # the broken place may be forbidden as well
    edits: dict[str, Any] = (
        {"history": [{0: 1, 35: 2}] * num_rows, "repetition_penalty": 1.5, "allowed_mask": mask}
        if edited
        else {}
    )
    result = sample(logits, make_batch(num_rows, temperature=temperature, num_logprobs=3, **edits))
    alone = sample(good, make_batch(1, temperature=temperature, num_logprobs=3, **_first_row(edits)))
    assert result.token_ids[1::2].tolist() == [-1] * len(bad)
    assert np.isnan(result.logprobs[1::2]).all()
    assert (result.top_token_ids[1::2] == -1).all()
    assert result.token_ids[::2].tolist() == [int(alone.token_ids[0])] * (len(bad) + 1)
    assert (result.top_logprobs[::2] == alone.top_logprobs).all()


def _first_row(edits: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, float) else value[:1] for name, value in edits.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_tokens_are_all_forbidden_has_no_token(sample: Sampler, temperature: float) -> None:
    nothing = np.zeros((1, 1), np.uint32)
    logits = floats(1, 2, 3)
    for batch in (
        make_batch(1, temperature=temperature, num_logprobs=2, allowed_mask=nothing),
        make_batch(1, temperature=temperature, num_logprobs=2, bias=[dict.fromkeys(range(3), -math.inf)]),
        make_batch(1, temperature=temperature, num_logprobs=2, bias=[{0: math.inf}]),
        make_batch(1, temperature=temperature, num_logprobs=2, bias=[{0: math.nan}]),
    ):
        result = sample(logits, batch)
        assert result.token_ids == [-1]
        assert (result.top_token_ids == -1).all()
        assert np.isnan(result.logprobs).all()


def test_an_overflowing_penalty_is_a_row_without_a_token(sample: Sampler) -> None:
    batch = make_batch(1, history=[{0: 1}], repetition_penalty=0.01)
    assert sample(floats(3e38, 1), batch).token_ids == [-1]


def test_forbidding_tokens_leaves_the_last_one_alone(sample: Sampler) -> None:
    """B37: only the ids that are named are forbidden; -1 is refused, not taken for the last token."""
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    row = SamplingInput(params, 1, array("i", [0] * 5), array("i"), masked_token_ids=(1,))
    assert sample(floats(1, 9, 2, 3), build_sampling_batch([row])).token_ids == [3]
    for bad_id in (-1, 4):
        with pytest.raises(ValueError, match="bias_token_ids"):
            sample(floats(1, 9, 2, 3), make_batch(1, bias=[{bad_id: -math.inf}]))
        with pytest.raises(ValueError, match="history_token_ids"):
            sample(floats(1, 9, 2, 3), make_batch(1, history=[{bad_id: 1}], presence_penalty=1.0))


# ---- log-probabilities ----


def test_logprobs_are_those_of_the_chosen_token(sample: Sampler) -> None:
    """B22: at temperature 1.5 the draw is often not the likeliest token; its own logprob is reported."""
    num_rows = 100
    row = np.random.default_rng(1).normal(0, 2, (1, 90)).astype(np.float32)
    batch = make_batch(
        num_rows, temperature=1.5, num_logprobs=1, counter=np.arange(num_rows, dtype=np.uint64)
    )
    result = sample(many(row, num_rows), batch)
    exact = row[0] - np.log(np.exp(row[0].astype(np.float64)).sum())
    np.testing.assert_allclose(result.logprobs, exact[result.token_ids], rtol=1e-5)
    assert (result.top_token_ids == row.argmax()).all()
    assert (result.token_ids != row.argmax()).sum() > 10


def test_logprobs_come_from_untouched_logits(sample: Sampler) -> None:
    logits = floats(0, 1, 2, 3)
    edits: dict[str, Any] = {
        "bias": [{3: -math.inf}],
        "history": [{2: 1}],
        "presence_penalty": 2.0,
        "temperature": 0.01,
        "top_k": 1,
        "num_logprobs": 4,
    }
    result = sample(logits, make_batch(1, **edits))
    exact = logits[0] - np.log(np.exp(logits[0]).sum())
    assert result.token_ids == [1]
    assert result.top_token_ids.tolist() == [[3, 2, 1, 0]]
    np.testing.assert_allclose(result.top_logprobs, [exact[::-1]], rtol=1e-5)
    np.testing.assert_allclose(result.logprobs, [exact[1]], rtol=1e-5)


def test_top_logprobs_are_best_first_with_ties_by_lower_id_and_as_many_as_asked(sample: Sampler) -> None:
    logits = many(floats(1, 2, -INF, 2, 1, 0), 4)
    result = sample(logits, make_batch(4, temperature=0, num_logprobs=np.array([3, -1, 0, 9], np.int32)))
    assert result.top_token_ids[:, :6].tolist() == [
        [1, 3, 0, -1, -1, -1],
        [-1] * 6,
        [-1] * 6,
        [1, 3, 0, 4, 5, -1],
    ]
    assert result.top_token_ids.shape == result.top_logprobs.shape == (4, 9)
    assert np.isnan(result.logprobs).tolist() == [False, True, False, False]
    assert (np.isnan(result.top_logprobs) == (result.top_token_ids == -1)).all()


def test_unlikely_tokens_count_when_there_are_many(sample: Sampler) -> None:
    row = np.full((1, 262_144), -25, np.float32)
    row[0, 200_001] = 0
    result = sample(row, make_batch(1, temperature=0, num_logprobs=0))
    assert result.token_ids == [200_001]
    np.testing.assert_allclose(result.logprobs, -math.log1p(262_143 * math.exp(-25)), rtol=0.01)


# ---- seeds, and rows as company ----


def test_seeds_and_counters_give_unlike_and_repeatable_streams(sample: Sampler) -> None:
    """B33: neighbouring seeds (the choices of one request) differ, and each repeats its own tokens."""
    row = np.zeros((1, 1000), np.float32)

    def stream(seed: int) -> list[int]:
        return sample(
            many(row, 8), make_batch(8, seed=seed, counter=np.arange(8, dtype=np.uint64))
        ).token_ids.tolist()

    streams = [stream(seed) for seed in (7, 8, 9, 10)]
    assert len({tuple(tokens) for tokens in streams}) == 4
    assert len({token for tokens in streams for token in tokens}) > 24
    assert streams == [stream(seed) for seed in (7, 8, 9, 10)]


def test_random_numbers_are_splitmix64() -> None:
    """First outputs of the published generator for seed 1234567."""
    gamma = reference.GOLDEN_GAMMA
    assert reference._mix(1234567 + gamma) == 6457827717110365317
    assert reference._mix(1234567 + 2 * gamma) == 3203168211198807973


@settings(max_examples=60, deadline=None)
@given(sampling_problems(st.integers(1, 300)), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_its_company(
    problem: tuple[Float32Array, SamplingBatch], random: Any
) -> None:
    logits, batch = problem
    rows = random.sample(range(len(logits)), len(logits))
    for sample in SAMPLERS.values():
        together = sample(logits, batch)
        for row in rows:
            alone = sample(logits[row : row + 1], _row_of(batch, row))
            assert alone.token_ids[0] == together.token_ids[row]
            width = alone.top_token_ids.shape[1]
            np.testing.assert_array_equal(alone.logprobs[0], together.logprobs[row])
            np.testing.assert_array_equal(alone.top_token_ids[0], together.top_token_ids[row, :width])
            np.testing.assert_array_equal(alone.top_logprobs[0], together.top_logprobs[row, :width])


def _row_of(batch: SamplingBatch, row: int) -> SamplingBatch:
    def entries(name: str, values: str) -> dict[int, Any]:
        start_loc = getattr(batch, f"{name}_start_loc")
        part = slice(start_loc[row], start_loc[row + 1])
        token_ids = getattr(batch, f"{name}_token_ids")[part].tolist()
        return dict(zip(token_ids, getattr(batch, values)[part].tolist(), strict=True))

    per_row = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    return make_batch(
        1,
        **{name: getattr(batch, name)[row] for name in (*per_row, "frequency_penalty", "seed", "counter")},
        history=[entries("history", "history_output_counts")],
        bias=[entries("bias", "bias_values")],
        num_logprobs=batch.num_logprobs[row],
        allowed_mask=None if batch.allowed_mask is None else batch.allowed_mask[row : row + 1],
    )


def test_rows_may_be_a_view_of_wider_rows(sample: Sampler) -> None:
    wide = np.full((3, 50), 99, np.float32)
    wide[:, :40] = np.random.default_rng(3).normal(size=(3, 40))
    batch = make_batch(3, temperature=[0.0, 1.0, 2.0], num_logprobs=2)
    assert_equal(sample(wide[:, :40], batch), sample(wide[:, :40].copy(), batch))


def test_no_rows_give_no_tokens(sample: Sampler) -> None:
    assert sample(np.zeros((0, 5), np.float32), make_batch(0)).token_ids.shape == (0,)


# ---- weights and refusals ----


def test_weights_are_the_exponential() -> None:
    logits = np.linspace(-31, 0, 10_001).astype(np.float32)
    weights = reference.token_weights(logits, np.float32(1)) / reference.WEIGHT_ONE
    np.testing.assert_allclose(
        weights, np.exp(logits.astype(np.float64)), rtol=1e-8, atol=0.5 / reference.WEIGHT_ONE
    )
    assert reference.token_weights(np.array([0, -31.1, -33, -INF], np.float32), np.float32(1)).tolist() == [
        reference.WEIGHT_ONE, 1, 0, 0,
    ]  # fmt: skip


def test_parameters_that_make_no_sense_are_refused(sample: Sampler) -> None:
    for params in ({"temperature": -1.0}, {"temperature": math.nan}, {"min_p": 1.5}, {"min_p": math.nan}):
        with pytest.raises(ValueError, match=next(iter(params))):
            sample(floats(1, 2), make_batch(1, **params))  # type: ignore[arg-type]


def test_native_code_refuses_arrays_it_cannot_read() -> None:
    logits, batch = floats(1, 2), make_batch(1, temperature=0)
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch)}

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=match):
            _native.sample(ISAS[-1], logits, **(arrays | changes))

    refused("temperature", temperature=arrays["temperature"].astype(np.float64))
    refused("top_k", top_k=np.zeros(2, np.int32))
    refused("seed", seed=None)
    refused("history_start_loc", history_start_loc=np.array([1, 1], np.int32))
    refused("history_start_loc", history_start_loc=np.array([0, -1], np.int32))
    refused("bias_token_ids", bias_start_loc=np.array([0, 1], np.int32))
    refused("allowed_mask", allowed_mask=np.zeros((1, 2), np.uint32))
    refused("keyword", temperatures=arrays["temperature"])
    with pytest.raises(ValueError, match="no_such_isa"):
        _native.sample("no_such_isa", logits, **arrays)
