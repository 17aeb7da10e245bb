"""The engine loop: how requests end, what they count, and that nothing of them stays behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pagoda.core.step import SchedulerOutput
from pagoda.engine.output import OutputKind, RequestOutput
from pagoda.errors import CapacityError, RequestError
from pagoda.sampling_params import SamplingParams
from tests.engine.engines import EOS, VOCAB_SIZE, byte_tokenizer, check_idle, drain, run, scripted_engine

A, B, C = b"abc"


def counting(history: Sequence[int]) -> int:
    """A script: the token after the last one, within the bytes."""
    return (history[-1] + 1) % 256


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 20])
@pytest.mark.parametrize("prompt_length", [1, 3, 4, 5, 8])
def test_length_ends_with_exactly_max_tokens(max_tokens: int, prompt_length: int) -> None:
    """B17, B18, E07: the right reason, the right count, and blocks back at every block edge."""
    engine = scripted_engine(counting)
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    output = run(engine, {"x": (range(prompt_length), params)})["x"]
    choice = output.outputs[0]
    assert choice.token_ids == list(range(prompt_length, prompt_length + max_tokens))
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)
    assert output.metrics.num_output_tokens == max_tokens
    assert output.metrics.num_prompt_tokens == prompt_length


@pytest.mark.parametrize(
    ("params", "num_tokens", "finish_reason", "stop_reason"),
    [
        (SamplingParams(), 3, "stop", None),
        (SamplingParams(max_tokens=2), 2, "length", None),
        (SamplingParams(ignore_eos=True, max_tokens=5), 5, "length", None),
        (SamplingParams(stop_token_ids=(B,)), 2, "stop", B),
        (SamplingParams(stop_token_ids=(B,), min_tokens=2), 3, "stop", None),
        (SamplingParams(stop_token_ids=(EOS,), ignore_eos=True), 3, "stop", EOS),
        (SamplingParams(stop="b"), 2, "stop", "b"),
    ],
)
def test_each_end_has_its_reason(
    params: SamplingParams, num_tokens: int, finish_reason: str, stop_reason: int | str | None
) -> None:
    """B17, B18: the token that ends a choice is counted."""
    choice = run(scripted_engine([A, B, EOS]), {"x": (b"p", params)})["x"].outputs[0]
    if params.min_tokens:  # `b` may not end the answer as its second token, so something else takes its place
        assert choice.token_ids[0] == A and B not in choice.token_ids[:1]
    assert (choice.finish_reason, choice.stop_reason) == (finish_reason, stop_reason)
    assert len(choice.token_ids) == num_tokens


def test_min_tokens_counts_output_tokens_and_masks_what_would_end_the_answer() -> None:
    """B37: a long prompt does not use up `min_tokens`, and the last id of the vocabulary is no sentinel."""
    engine = scripted_engine([EOS])
    params = SamplingParams(min_tokens=3, max_tokens=10, logit_bias={VOCAB_SIZE - 1: 100})
    choice = run(engine, {"x": (b"a long prompt", params)})["x"].outputs[0]
    assert choice.token_ids == [VOCAB_SIZE - 1] * 3 + [EOS]
    assert choice.finish_reason == "stop"


def test_max_tokens_none_goes_on_to_the_end_of_the_context() -> None:
    params = SamplingParams(max_tokens=None)
    output = run(scripted_engine(counting, max_model_len=20), {"x": (b"12345", params)})["x"]
    assert len(output.outputs[0].token_ids) == 15
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("use_cache", [True, False])
def test_max_tokens_zero_computes_the_prompt_and_nothing_else(use_cache: bool) -> None:
    """B21: what log-likelihood evaluations ask for; the whole context may be prompt."""
    prompt = [5, 6, 7, 9, 10, 11, 12, 13]
    engine = scripted_engine(counting, max_model_len=8, max_num_batched_tokens=3)
    for _ in range(2):
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        output = run(engine, {"x": (prompt, params)}, use_cache=use_cache)["x"]
        assert output.outputs[0].token_ids == [] and output.outputs[0].text == ""
        assert output.outputs[0].finish_reason == "length"
        assert output.metrics.num_output_tokens == 0
        entries = output.prompt_logprobs
        assert entries is not None and len(entries) == len(prompt)
        assert entries[0] is None
        for previous, token_id, entry in zip(prompt[:-1], prompt[1:], entries[1:], strict=True):
            assert entry is not None and next(iter(entry)) == token_id
            expected = 0.0 if token_id == previous + 1 else -1e4
            assert entry[token_id].logprob == pytest.approx(expected, abs=1e-3)
            assert entry[previous + 1].rank == 1


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 16])
def test_prompt_logprobs_do_not_depend_on_chunks_or_company(budget: int) -> None:
    engine = scripted_engine(
        lambda history: np.sin(np.arange(VOCAB_SIZE) * sum(history)), max_num_batched_tokens=budget
    )
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=1, temperature=0)
    prompts = {"x": b"hello there", "y": b"a", "z": b"hello there, too"}
    together = run(engine, {k: (p, params) for k, p in prompts.items()})
    whole = scripted_engine(lambda history: np.sin(np.arange(VOCAB_SIZE) * sum(history)))
    for name, prompt in prompts.items():
        alone = run(whole, {name: (prompt, params)})[name]
        assert alone.prompt_logprobs == together[name].prompt_logprobs
        assert alone.outputs == together[name].outputs
        assert alone.prompt_logprobs is not None and len(alone.prompt_logprobs) == len(prompt)


@pytest.mark.parametrize("length", [63, 64, 65, 640])
def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(length: int) -> None:
    """B25, B26, B27: the same answer at every length, and later requests are served."""
    engine = scripted_engine(counting, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=1)
    if length == 63:
        assert run(engine, {"x": ([1] * length, params)})["x"].outputs[0].finish_reason == "length"
    else:
        with pytest.raises(RequestError, match=f"{length} tokens.*64") as caught:
            engine.add_request("x", [1] * length, params)
        assert caught.value.param == "prompt"
    assert run(engine, {"y": (b"short", params)})["y"].finished


def test_prompt_and_max_tokens_beyond_the_context_are_refused_with_the_numbers() -> None:
    """B25: refused, not cut silently."""
    engine = scripted_engine(counting)
    with pytest.raises(RequestError, match="60 tokens and max_tokens is 5, together 65; max_model_len is 64"):
        engine.add_request("x", [1] * 60, SamplingParams(max_tokens=5))
    assert not engine.has_unfinished


def test_a_prompt_larger_than_the_kv_cache_is_refused_and_others_are_served() -> None:
    """E01: a request that can never fit does not block the queue; one that cannot grow ends with length."""
    engine = scripted_engine(counting, num_blocks=8)
    with pytest.raises(CapacityError, match=r"36 tokens.*32"):
        engine.add_request("never", [1] * 36, SamplingParams(max_tokens=1))
    outputs = run(
        engine,
        {
            "grows": ([1] * 28, SamplingParams(max_tokens=30)),
            "small": ([1] * 4, SamplingParams(max_tokens=1)),
        },
    )
    assert outputs["grows"].outputs[0].finish_reason == "length"
    assert len(outputs["grows"].outputs[0].token_ids) == 5
    assert outputs["small"].outputs[0].token_ids == [2]


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**40, 1.5, "1", None, True])
@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "prompt"])
def test_token_ids_outside_the_vocabulary_are_refused(field: str, token_id: object) -> None:
    """B31: checked at the edge, and the engine keeps running."""
    engine = scripted_engine(counting)
    with pytest.raises(RequestError) as caught:
        prompt: list[object] = [1, token_id] if field == "prompt" else [1]
        params = {
            "logit_bias": lambda: SamplingParams(logit_bias={token_id: 1.0}),  # type: ignore[dict-item]
            "stop_token_ids": lambda: SamplingParams(stop_token_ids=(token_id,)),  # type: ignore[arg-type]
            "prompt": SamplingParams,
        }[field]()
        engine.add_request("x", prompt, params)  # type: ignore[arg-type]
    assert caught.value.param == field
    last = SamplingParams(logit_bias={VOCAB_SIZE - 1: 1.0}, stop_token_ids=(VOCAB_SIZE - 1,), max_tokens=2)
    assert run(engine, {"y": ([VOCAB_SIZE - 1], last)})["y"].finished


def test_an_empty_prompt_is_refused() -> None:
    engine = scripted_engine(counting)
    for prompt in ("", []):
        with pytest.raises(RequestError, match="empty"):
            engine.add_request("x", prompt, SamplingParams())


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = scripted_engine(counting)
    engine.add_request("x", b"ab", SamplingParams(n=2))
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("x", b"ab", SamplingParams())
    with pytest.raises(RequestError, match="in use"):  # the scheduler's id of a choice
        engine.add_request("x/1", b"ab", SamplingParams())
    drain(engine)
    assert run(engine, {"x": (b"ab", SamplingParams())})["x"].finished


def test_what_an_engine_without_tokenizer_cannot_do_is_refused() -> None:
    engine = scripted_engine(counting, with_tokenizer=False)
    with pytest.raises(RequestError, match="tokenizer"):
        engine.add_request("x", "text", SamplingParams())
    with pytest.raises(RequestError, match="tokenizer"):
        engine.add_request("x", [1], SamplingParams(stop="a"))
    output = run(engine, {"x": ([1], SamplingParams(max_tokens=2, logprobs=0))})["x"]
    assert output.outputs[0].token_ids == [2, 3] and output.outputs[0].text == ""


BAD_ROWS: list[Callable[[], np.ndarray]] = [
    lambda: np.full(VOCAB_SIZE, np.nan),
    lambda: np.where(np.arange(VOCAB_SIZE) == 0, np.nan, 0.0),
    lambda: np.where(np.arange(VOCAB_SIZE) == VOCAB_SIZE // 2, np.nan, 0.0),
    lambda: np.where(np.arange(VOCAB_SIZE) == VOCAB_SIZE - 1, np.inf, 0.0),
    lambda: np.full(VOCAB_SIZE, -np.inf),
]


@pytest.mark.parametrize("bad_row", BAD_ROWS)
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(presence_penalty=1, logprobs=2)]
)
def test_bad_logits_fail_their_own_request_only(
    bad_row: Callable[[], np.ndarray], params: SamplingParams
) -> None:
    """B42: an error, not token 0 for ever; the others in the batch do not notice."""
    engine = scripted_engine({"bad": [A, bad_row()], "good": [A, B, EOS]})
    outputs = run(engine, {"bad": (b"p", params), "good": (b"p", SamplingParams())})
    bad, good = outputs["bad"].outputs[0], outputs["good"].outputs[0]
    assert (bad.finish_reason, bad.token_ids) == ("error", [A])
    assert bad.error is not None and "not finite" in bad.error
    assert (good.finish_reason, good.text, good.error) == ("stop", "ab", None)


def test_an_executor_that_raises_ends_running_requests_and_leaves_the_rest() -> None:
    """Principle 7: each accepted request ends once; waiting ones are served by later steps."""
    failures = iter([False, False, True])

    def fail_once(_: SchedulerOutput) -> None:
        if next(failures, False):
            raise MemoryError("out of scratch memory")

    engine = scripted_engine(counting, max_num_seqs=2, before_step=fail_once)
    outputs = run(
        engine, {name: (b"prompt " + name.encode(), SamplingParams(max_tokens=9)) for name in "abc"}
    )
    for name in "ab":
        choice = outputs[name].outputs[0]
        assert choice.finish_reason == "error"
        assert choice.error == "MemoryError: out of scratch memory"
        assert 0 < len(choice.token_ids) < 9
    assert outputs["c"].outputs[0].finish_reason == "length"
    # What the failed step computed is in doubt, so it is computed again.
    assert run(engine, {"d": (b"prompt a", SamplingParams(max_tokens=9))})["d"].outputs[0].error is None


def test_an_interrupted_step_ends_its_requests_and_hands_them_out_next() -> None:
    """Ctrl-C in the middle of a step: the exception goes up, the engine can go on."""
    pressed = iter([False, True])

    def interrupt(_: SchedulerOutput) -> None:
        if next(pressed, False):
            raise KeyboardInterrupt

    engine = scripted_engine(counting, before_step=interrupt)
    engine.add_request("x", b"ab", SamplingParams())
    assert engine.step() == []
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs = drain(engine)
    assert [(o.request_id, o.outputs[0].finish_reason) for o in outputs] == [("x", "error")]


def test_abort_frees_blocks_at_once_and_returns_what_there_is() -> None:
    """B08: held-back text is delivered; E12: nothing is remembered."""
    engine = scripted_engine([A, B, C])
    params = SamplingParams(stop="abcd", max_tokens=50)
    engine.add_request("x", b"prompt", params)
    engine.add_request("y", b"prompt", params, output_kind=OutputKind.DELTA)
    streamed = [o for _ in range(3) for o in engine.step()]
    outputs = engine.abort(["x", "y", "x", "nobody"])
    assert [o.request_id for o in outputs] == ["x", "y"]
    assert all(o.finished and o.outputs[0].finish_reason == "abort" for o in outputs)
    assert outputs[0].outputs[0].text == "abc"
    assert "".join(o.outputs[0].text for o in [*streamed, outputs[1]]) in ("ab", "abc")
    check_idle(engine)
    assert engine.abort(["x"]) == []


def test_choices_are_separate_and_reproducible() -> None:
    """B33, B34: derived seeds; n = 1 equals choice 0; each choice has its own length and reason."""

    def flat(history: Sequence[int]) -> np.ndarray:
        row = np.zeros(VOCAB_SIZE)
        row[EOS] = 4.0
        return row

    def texts(**params: object) -> list[list[int]]:
        engine = scripted_engine(flat)
        output = run(engine, {"x": (b"abcdef", SamplingParams(max_tokens=40, **params))})["x"]  # type: ignore[arg-type]
        assert [c.index for c in output.outputs] == list(range(len(output.outputs)))
        assert all((c.token_ids[-1] == EOS) == (c.finish_reason == "stop") for c in output.outputs)
        assert output.metrics.num_output_tokens == sum(len(c.token_ids) for c in output.outputs)
        assert output.metrics.num_prompt_tokens == 6
        return [list(c.token_ids) for c in output.outputs]

    four = texts(n=4, seed=7)
    assert len({tuple(t) for t in four}) == 4
    assert len({len(t) for t in four}) > 1
    assert four == texts(n=4, seed=7)
    assert texts(n=1, seed=7) == four[:1]
    assert texts(n=4, seed=8) != four
    assert texts(n=2) != texts(n=2)  # without a seed each request draws a new one


def test_the_engine_seed_makes_unseeded_requests_reproducible() -> None:
    def tokens(seed: int) -> list[int]:
        engine = scripted_engine([np.zeros(VOCAB_SIZE)], seed=seed)
        outputs = run(engine, {name: (b"p", SamplingParams(ignore_eos=True)) for name in "ab"})
        assert outputs["a"].outputs[0].token_ids != outputs["b"].outputs[0].token_ids
        return [t for o in outputs.values() for t in o.outputs[0].token_ids]

    assert tokens(3) == tokens(3) != tokens(4)


def test_choices_stream_separately() -> None:
    """B34: indexes do not mix, exactly one finish a choice."""
    engine = scripted_engine({"x/0": [A, EOS], "x/1": [B, B, B, EOS], "x/2": [C, C, EOS]})
    engine.add_request("x", b"p", SamplingParams(n=3), output_kind=OutputKind.DELTA)
    texts, reasons = {}, {}
    outputs = drain(engine)
    for output in outputs:
        for choice in output.outputs:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: "a", 1: "bbb", 2: "cc"}
    assert reasons == dict.fromkeys(range(3), "stop")
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


def test_no_output_before_the_first_token() -> None:
    """G02, G09: the chunks of a prompt are no events."""
    engine = scripted_engine(counting, max_num_batched_tokens=4)
    engine.add_request(
        "x", b"twelve bytes", SamplingParams(max_tokens=2, prompt_logprobs=1), output_kind=OutputKind.DELTA
    )
    assert [engine.step() for _ in range(2)] == [[], []]
    first, last = drain(engine)
    assert first.outputs[0].token_ids == [ord("t")] and last.outputs[0].token_ids == [ord("u")]
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 12
    assert last.prompt_logprobs is None


@pytest.mark.parametrize("kind", OutputKind)
def test_output_kinds_hold_the_same_answer(kind: OutputKind) -> None:
    engine = scripted_engine(counting)
    engine.add_request("x", "hello", SamplingParams(max_tokens=4, logprobs=1), output_kind=kind)
    outputs = drain(engine)
    assert len(outputs) == (1 if kind is OutputKind.FINAL else 4)
    if kind is OutputKind.DELTA:
        joined = [t for o in outputs for t in o.outputs[0].token_ids]
        text = "".join(o.outputs[0].text for o in outputs)
        logprobs = [p for o in outputs for p in o.outputs[0].logprobs or ()]
    else:
        joined, text = list(outputs[-1].outputs[0].token_ids), outputs[-1].outputs[0].text
        logprobs = list(outputs[-1].outputs[0].logprobs or ())
    assert text == "pqrs" and joined == list(b"pqrs")
    assert [next(iter(entry)) for entry in logprobs] == joined
    assert [o.finished for o in outputs][-1] and not any(o.finished for o in outputs[:-1])


def test_cached_tokens_are_always_there_and_never_the_whole_prompt() -> None:
    """B58, A16: 0 on a miss; a full hit still computes the last token, also with logprobs."""
    for num_blocks in (1, 2, 3):
        engine = scripted_engine(counting)
        prompt = list(range(4 * num_blocks))
        for params in (SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, logprobs=1)):
            before = run(engine, {"x": (prompt, params)})["x"]
            again = run(engine, {"x": (prompt, params)})["x"]
            assert again.num_cached_tokens == len(prompt) - 1
            assert again.outputs[0] == before.outputs[0]
    cold = run(scripted_engine(counting), {"x": (b"p", SamplingParams())})["x"]
    assert cold.num_cached_tokens == 0


def test_metrics_follow_the_clock_of_the_engine() -> None:
    """F11: time to first token starts at arrival and includes waiting."""
    now = [100.0]

    def tick(_: SchedulerOutput) -> None:
        now[0] += 1.0

    engine = scripted_engine(counting, max_num_seqs=1, before_step=tick, clock=lambda: now[0])
    outputs = run(engine, {name: (b"p", SamplingParams(max_tokens=3)) for name in "ab"})
    a, b = outputs["a"].metrics, outputs["b"].metrics
    assert (a.arrival_s, a.first_token_s, a.last_token_s, a.finished_s) == (100.0, 101.0, 103.0, 103.0)
    assert a.ttft_s == 1.0 and a.e2e_s == 3.0
    assert b.ttft_s == 4.0 and b.e2e_s == 6.0


def test_logprobs_belong_to_the_token_that_was_sampled() -> None:
    """B22: the chosen token comes first in its entry, whether or not it is among the best."""
    engine = scripted_engine(lambda history: np.linspace(2, 0, VOCAB_SIZE))
    params = SamplingParams(temperature=100, logprobs=2, max_tokens=20, seed=3, ignore_eos=True)
    choice = run(engine, {"x": (b"p", params)})["x"].outputs[0]
    assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids) == 20
    total = 0.0
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert {0, 1} <= set(entry) and len(entry) == 2 + (token_id > 1)
        assert entry[token_id].rank == (token_id + 1 if token_id < 2 else None)
        assert entry[token_id].decoded_token == byte_tokenizer().decode([token_id])
        assert entry[token_id].logprob < 0
        total += entry[token_id].logprob
    assert choice.cumulative_logprob is not None and math.isclose(total, choice.cumulative_logprob)
    assert len(set(choice.token_ids)) > 10


def test_a_closed_engine_holds_nothing_and_takes_nothing() -> None:
    closed = []
    engine = scripted_engine(counting, on_close=lambda: closed.append(True))
    engine.add_request("x", b"ab", SamplingParams())
    engine.step()
    engine.close()
    engine.close()
    assert closed == [True]
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request("y", b"ab", SamplingParams())


def test_a_request_whose_text_cannot_be_made_fails_alone() -> None:
    class Broken(Exception): ...

    tokenizer = byte_tokenizer()
    real = tokenizer.token_bytes

    def token_bytes(token_id: int) -> bytes:
        if token_id == B:
            raise Broken("no bytes")
        return real(token_id)

    tokenizer.token_bytes = token_bytes  # type: ignore[method-assign]
    engine = scripted_engine({"x": [A, B, C], "y": [A, C, EOS]}, tokenizer=tokenizer)
    outputs: dict[str, RequestOutput] = run(engine, {name: (b"p", SamplingParams()) for name in "xy"})
    assert outputs["x"].outputs[0].finish_reason == "error"
    assert outputs["x"].outputs[0].error == "Broken: no bytes"
    assert outputs["y"].outputs[0].text == "ac"


def test_a_request_past_its_deadline_ends_with_an_error() -> None:
    now = [0.0]

    def tick(_: SchedulerOutput) -> None:
        now[0] += 1.0

    engine = scripted_engine(counting, before_step=tick, clock=lambda: now[0])
    engine.add_request("x", b"ab", SamplingParams(max_tokens=50), deadline_s=3.5)
    output = drain(engine)[-1]
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].error is not None and "deadline" in output.outputs[0].error
    assert len(output.outputs[0].token_ids) == 4
