"""Results do not depend on company: the engine over real models of random weights, on each backend.

Tokens, greedy and seeded, must be the same alone or batched, chunked or whole, cached or cold, preempted
or not (design principle 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest

from pagoda.backends.cpu import CPUModel
from pagoda.config import CacheConfig, SchedulerConfig
from pagoda.core.invariants import check_state
from pagoda.core.scheduler import Scheduler
from pagoda.engine.engine import Engine
from pagoda.engine.load import make_backend
from pagoda.engine.output import RequestOutput
from pagoda.engine.seeds import choice_seed
from pagoda.models import build_program
from pagoda.runtime.model_runner import ModelRunner
from pagoda.sampling_params import SamplingParams
from tests.engine.engines import Requests, run
from tests.models.load_tiny_hf import config_of, weights_of
from tests.models.tiny_checkpoints import TINY_MODELS, ArrayWeights, model_config, weights
from tests.models.tiny_hf import TINY_HF

BLOCK_SIZE = 16
NUM_BLOCKS = 64
# Among them layers that attend to a window beside layers that attend to everything, and routed experts.
MODELS = ["llama-window", "qwen2-untied", "hf-gemma3", "hf-qwen3moe"]
BACKENDS = [("reference", "qwen2-untied"), *(("cpu", name) for name in MODELS if "moe" not in name)]


@cache
def model_runner(backend: str, name: str, num_threads: int = 1) -> ModelRunner:
    if name in TINY_HF:
        config, source = config_of(TINY_HF[name]), weights_of(TINY_HF[name])
    else:
        config, source = model_config(TINY_MODELS[name]), ArrayWeights.of(weights(TINY_MODELS[name]))
    chosen = make_backend(backend, num_threads)
    spec = config.kv_cache_spec(block_size=BLOCK_SIZE, dtype=chosen.default_kv_dtype)
    num_blocks = (NUM_BLOCKS,) * len(spec.groups)
    compiled = chosen.compile(build_program(config), source, spec, num_blocks)
    return ModelRunner(compiled, spec, num_blocks, check_batches=True)


def make_engine(
    runner: ModelRunner,
    *,
    num_blocks: int | Sequence[int] = NUM_BLOCKS,
    caching: bool = True,
    **limits: float,
) -> Engine:
    """A cold engine over a runner whose KV cache may hold anything."""
    limits = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "max_model_len": 256} | limits
    config = SchedulerConfig(**limits)  # type: ignore[arg-type]
    if isinstance(num_blocks, int):
        num_blocks = (num_blocks,) * len(runner.num_blocks)
    scheduler = Scheduler(
        config,
        runner._spec,
        tuple(num_blocks),
        cache=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching),
    )
    vocab_size = 61
    return Engine(runner, scheduler, vocab_size=vocab_size, max_model_len=config.max_model_len)


def prompt(number: int, length: int) -> list[int]:
    return [(number * 17 + i * i * 7 + i) % 61 for i in range(length)]


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, logprobs=2),
    "seeded": SamplingParams(temperature=1.2, seed=11, top_p=0.95, max_tokens=20, logprobs=0),
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.8, presence_penalty=0.3, max_tokens=20
    ),
    "min-tokens": SamplingParams(
        temperature=0.8, seed=5, stop_token_ids=tuple(range(12)), min_tokens=9, max_tokens=20
    ),
}
PROMPTS = {
    "short": prompt(1, 5),
    "a-block": prompt(2, 16),
    "long": prompt(3, 53),
    "long-tail": [*prompt(3, 40), *prompt(4, 9)],
}
REQUESTS = {f"{p} {s}": (PROMPTS[p], PARAMS[s]) for p in PROMPTS for s in PARAMS}


def tokens(outputs: Mapping[str, RequestOutput]) -> dict[str, list[int]]:
    assert all(o.outputs[0].error is None for o in outputs.values())
    return {name: list(o.outputs[0].token_ids) for name, o in outputs.items()}


def assert_equal(
    backend: str, outputs: Mapping[str, RequestOutput], expected: Mapping[str, RequestOutput]
) -> None:
    """The same tokens as in `expected`, and on the native backend the same log-probabilities to the last bit.

    The reference multiplies matrices with a library that may round differently for each shape.
    """
    assert tokens(outputs) == tokens({name: expected[name] for name in outputs})
    for name, output in outputs.items():
        if backend == "cpu":
            assert output.outputs[0].logprobs == expected[name].outputs[0].logprobs


@cache
def alone(backend: str, name: str) -> dict[str, RequestOutput]:
    """Each request on its own, with nothing cached and its prompt computed whole."""
    runner = model_runner(backend, name)
    answers: dict[str, RequestOutput] = {}
    for request_id, request in REQUESTS.items():
        answers |= run(make_engine(runner, caching=False), {request_id: request})
    assert len({tuple(a) for a in tokens(answers).values()}) > len(answers) / 2
    return answers


each_model = pytest.mark.parametrize(("backend", "name"), BACKENDS)


@each_model
def test_batched_equals_alone(backend: str, name: str) -> None:
    """A28, A29"""
    engine = make_engine(model_runner(backend, name), caching=False)
    assert_equal(backend, run(engine, REQUESTS), alone(backend, name))


@pytest.mark.parametrize("name", MODELS)
def test_threads_change_nothing(name: str) -> None:
    engine = make_engine(model_runner("cpu", name, num_threads=2), caching=False, max_num_batched_tokens=40)
    assert_equal("cpu", run(engine, REQUESTS), alone("cpu", name))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_companions", [1, 2, 6, 15, 32])
def test_the_number_of_companions_changes_nothing(name: str, num_companions: int) -> None:
    """A28: whatever tile a row falls into."""
    companions: Requests = {
        str(i): (prompt(20 + i, 1 + i % 9), SamplingParams(temperature=0, max_tokens=25))
        for i in range(num_companions)
    }
    request_id = "long greedy"
    engine = make_engine(model_runner("cpu", name), caching=False)
    outputs = run(engine, {**companions, request_id: REQUESTS[request_id]})
    assert_equal("cpu", {request_id: outputs[request_id]}, alone("cpu", name))


@each_model
@pytest.mark.parametrize("budget", [7, 16, 17, 64])
def test_chunked_equals_whole(backend: str, name: str, budget: int) -> None:
    """A19, A20: chunks that start and end inside blocks, beside decodes."""
    engine = make_engine(model_runner(backend, name), caching=False, max_num_batched_tokens=budget)
    assert_equal(backend, run(engine, REQUESTS), alone(backend, name))


@pytest.mark.parametrize("name", MODELS)
def test_prompts_cut_by_measured_time_equal_whole_ones(name: str) -> None:
    """However long the steps of this run happen to take."""
    engine = make_engine(model_runner("cpu", name), caching=False, max_decode_slowdown=1.1)
    outputs = run(engine, {"decodes": (PROMPTS["short"], SamplingParams(max_tokens=5))} | REQUESTS)
    del outputs["decodes"]
    assert_equal("cpu", outputs, alone("cpu", name))


@each_model
def test_cached_equals_cold(backend: str, name: str) -> None:
    """A15, A16, A45: a prompt that is cached in part or wholly, also with penalties over it."""
    engine = make_engine(model_runner(backend, name))
    for request_id, request in REQUESTS.items():
        assert_equal(backend, run(engine, {request_id: request}), alone(backend, name))
    outputs = run(engine, REQUESTS)
    assert_equal(backend, outputs, alone(backend, name))
    for request_id, output in outputs.items():
        assert output.num_cached_tokens == len(REQUESTS[request_id][0]) - 1


@each_model
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48, 49])
def test_a_second_run_and_other_tails_equal_cold_runs(backend: str, name: str, length: int) -> None:
    """A15, A16: around block borders, and after copying part of a block (A09)."""
    params = SamplingParams(temperature=0, max_tokens=6)
    prompts = [prompt(7, length), prompt(7, length), *([*prompt(7, length), t] for t in range(3))]
    warm = make_engine(model_runner(backend, name))
    for number, ids in enumerate(prompts):
        cold = run(make_engine(model_runner(backend, name)), {"x": (ids, params)})["x"]
        again = run(warm, {"x": (ids, params)})["x"]
        assert again.outputs[0].token_ids == cold.outputs[0].token_ids
        assert cold.num_cached_tokens == 0
        assert number == 0 or again.num_cached_tokens == min(length, len(ids) - 1)


@each_model
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_equals_undisturbed(backend: str, name: str, caching: bool) -> None:
    """A24, A26: no doubled or missing token, and penalties, `min_tokens` and stops know the output still."""
    engine = make_engine(
        model_runner(backend, name), num_blocks=10, caching=caching, max_num_batched_tokens=64
    )
    outputs = run(engine, REQUESTS)
    assert sum(o.metrics.num_preemptions for o in outputs.values()) > 0
    assert_equal(backend, outputs, alone(backend, name))
    for request_id, output in outputs.items():
        assert output.metrics.num_prompt_tokens == len(REQUESTS[request_id][0])
        assert output.metrics.num_output_tokens == len(output.outputs[0].token_ids)


@each_model
def test_two_that_start_alike_do_not_disturb_each_other(backend: str, name: str) -> None:
    """A09: B arrives with A's prompt while A decodes in the block that holds the prompt's end."""
    runner = model_runner(backend, name)
    shared = prompt(9, 24)
    requests = {str(s): (shared, SamplingParams(temperature=1.5, seed=s, max_tokens=20)) for s in range(3)}
    expected: dict[str, list[int]] = {}
    for request_id, request in requests.items():
        expected |= tokens(run(make_engine(runner, caching=False), {request_id: request}))
    assert len({tuple(t) for t in expected.values()}) == 3
    engine = make_engine(runner)
    outputs = []
    for request_id, (ids, params) in requests.items():
        engine.add_request(request_id, ids, params)
        for _ in range(3):
            outputs += engine.step()
            check_state(engine.scheduler)
    while engine.has_unfinished:
        outputs += engine.step()
    assert tokens({o.request_id: o for o in outputs}) == expected


@each_model
def test_choices_equal_requests_with_their_seeds(backend: str, name: str) -> None:
    """B33: choice 0 of n is the request itself; order and company of the others do not matter."""
    runner = model_runner(backend, name)

    def choices(n: int, **options: Any) -> list[Sequence[int]]:
        params = SamplingParams(n=n, temperature=1.0, seed=99, max_tokens=12)
        output = run(make_engine(runner, **options), {"x": (prompt(5, 20), params)})["x"]
        return [c.token_ids for c in output.outputs]

    four = choices(4)
    assert choices(1) == four[:1]
    assert choices(2, caching=False, max_num_batched_tokens=9) == four[:2]
    assert choices(4, num_blocks=4) == four


@each_model
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [1, 5, 16, 17, 32, 37])
def test_forked_choices_equal_requests_of_their_own(
    backend: str, name: str, caching: bool, length: int
) -> None:
    """A09, B33, B34: the prompt is computed once, and each choice is what its seed alone would give."""
    runner = model_runner(backend, name)
    params = SamplingParams(n=3, temperature=1.1, seed=7, max_tokens=10, logprobs=0)
    forked = make_engine(runner, caching=caching)
    output = run(forked, {"x": (prompt(6, length), params)})["x"]
    assert forked.scheduler.num_forked_tokens == 2 * (length - 1)
    for index, choice in enumerate(output.outputs):
        own = replace(params, n=1, seed=choice_seed(7, index))
        alone = run(make_engine(runner, caching=False), {"x": (prompt(6, length), own)})["x"].outputs[0]
        assert choice.token_ids == alone.token_ids
        assert backend != "cpu" or choice.logprobs == alone.logprobs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_choices_that_read_their_prompt_together_equal_requests_of_their_own(
    name: str, num_threads: int
) -> None:
    """Attention reads the blocks of a common prefix once for all; a request with another tail joins them."""
    runner = model_runner("cpu", name, num_threads)
    native = cast("CPUModel", runner.model).native
    ids = prompt(6, 300)
    params = SamplingParams(n=4, temperature=1.1, seed=7, max_tokens=10, logprobs=0, ignore_eos=True)
    tail = ([*ids[:280], *prompt(7, 25)], SamplingParams(temperature=0, max_tokens=30, logprobs=0))
    native.set_prefix_sharing("always")
    try:
        engine = make_engine(runner, max_model_len=512)
        engine.add_request("tail", *tail)
        engine.add_request("choices", ids, params)
        outputs, num_shared_tiles = {}, 0
        while engine.has_unfinished:
            outputs |= {o.request_id: o for o in engine.step() if o.finished}
            num_shared_tiles += sum(native.num_shared_tiles)
    finally:
        native.set_prefix_sharing("auto")
    assert (num_shared_tiles > 0) == (name != "llama-window")  # its window is shorter than a chunk of keys
    own: Requests = {"tail": tail} | {
        str(i): (ids, replace(params, n=1, seed=choice_seed(7, i))) for i in range(4)
    }
    for request_id, request in own.items():
        alone = run(make_engine(runner, caching=False, max_model_len=512), {"x": request})["x"].outputs[0]
        choice = (
            outputs["tail"].outputs[0]
            if request_id == "tail"
            else outputs["choices"].outputs[int(request_id)]
        )
        assert (choice.token_ids, choice.logprobs) == (alone.token_ids, alone.logprobs)


@each_model
def test_prompt_logprobs_are_those_of_sampling(backend: str, name: str) -> None:
    """B21: what the model answers greedily has, as a prompt, the log-probabilities it was answered with."""
    runner = model_runner(backend, name)
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=3)
    requests: Requests = {"x": (PROMPTS["long"], params)}
    choice = run(make_engine(runner), requests)["x"].outputs[0]
    whole = [*PROMPTS["long"], *choice.token_ids]
    params = SamplingParams(max_tokens=0, prompt_logprobs=3)
    for budget in (512, 13):
        scored = run(make_engine(runner, max_num_batched_tokens=budget), {"x": (whole, params)})["x"]
        assert scored.prompt_logprobs is not None and choice.logprobs is not None
        for expected, found in zip(
            choice.logprobs, scored.prompt_logprobs[len(PROMPTS["long"]) :], strict=True
        ):
            assert found is not None and list(found) == list(expected)
            for token_id, entry in expected.items():
                assert found[token_id].logprob == pytest.approx(entry.logprob, abs=1e-4)
                assert found[token_id].rank == entry.rank


def test_windowed_layers_hold_their_window_and_hits_need_no_more() -> None:
    """A20, A22: a pool of seven blocks is enough for windowed layers at any length, cold and cached.

    Blocks behind the window are gone when the prompt comes again; the hit covers it all the same, and
    what follows is what a cold run says, to the last bit.
    """
    runner = model_runner("cpu", "hf-gemma3")
    windowed = next(i for i, group in enumerate(runner._spec.groups) if group.window is not None)
    num_blocks = [7 if i == windowed else NUM_BLOCKS for i in range(2)]
    request = (prompt(8, 170), SamplingParams(temperature=0, max_tokens=40, logprobs=1))
    cold = run(make_engine(runner, caching=False), {"x": request})["x"]

    engine = make_engine(runner, num_blocks=num_blocks, max_num_batched_tokens=32)
    most_held = [0, 0]
    for request_id, num_cached in (("first", 0), ("again", 169)):
        engine.add_request(request_id, *request)
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
            check_state(engine.scheduler)
            most_held = [
                max(m, u.num_held) for m, u in zip(most_held, engine.scheduler.kv.usage(), strict=True)
            ]
        assert outputs[-1].num_cached_tokens == num_cached
        assert outputs[-1].outputs[0].token_ids == cold.outputs[0].token_ids
        assert outputs[-1].outputs[0].logprobs == cold.outputs[0].logprobs
    assert most_held[windowed] <= 4  # a window of 20 and a step of 32
    assert most_held[1 - windowed] == -(-208 // BLOCK_SIZE)
