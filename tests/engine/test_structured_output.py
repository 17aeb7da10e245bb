"""Structured output through the engine, where random logits leave everything to the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from numpy.typing import NDArray

from pagoda.core.step import SchedulerOutput
from pagoda.engine.engine import Engine
from pagoda.engine.llm import LLM
from pagoda.engine.structured_output import GrammarCompiler
from pagoda.engine.tokenizer import Tokenizer
from pagoda.errors import RequestError
from pagoda.sampling_params import SamplingParams, StructuredOutputsParams
from pagoda.sim.scripted_executor import ScriptedExecutor
from pagoda.weights.checkpoint import load_checkpoint
from tests.engine.engines import EOS, VOCAB_SIZE, byte_tokenizer, run, scripted_engine
from tests.engine.schema_corpus import REFUSED, SCHEMAS
from tests.engine.tiny_vocabularies import byte_level
from tests.real_models import SMOLLM2, real_model

PAIR = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "maximum": 99},
        "b": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip


def structured(max_tokens: int = 300, seed: int = 1, n: int = 1, **constraint: Any) -> SamplingParams:
    wanted = StructuredOutputsParams(**constraint)
    return SamplingParams(max_tokens=max_tokens, seed=seed, n=n, structured_outputs=wanted)


def random_logits(tokenizer: Tokenizer, vocab_size: int) -> Callable[[Sequence[int]], NDArray[np.float32]]:
    """Noise that depends on the length of the text, and leans to what ends strings, lists and answers."""
    rng = np.random.default_rng(5)
    rows = rng.normal(scale=2.0, size=(61, vocab_size)).astype(np.float32)
    # A real vocabulary is large: what ends something must stand out from all the rest together.
    lift = np.float32(np.log(vocab_size / 256))
    for token_id in range(vocab_size):
        token = tokenizer.token_bytes(token_id)
        if token in (b'"', b"}", b"]", b"Z"):
            rows[:, token_id] += 5 + lift
        elif token in (b"@", b".", b",") or (len(token) == 1 and token.isdigit()):
            rows[:, token_id] += 3 + lift
        elif token in (b"{", b"["):
            rows[:, token_id] -= 3
    rows[:, sorted(tokenizer.eos_token_ids)] += 7 + lift
    return lambda history: rows[len(history) * 7 % len(rows)]


def byte_engine(**options: Any) -> Engine:
    logits = random_logits(byte_tokenizer(), VOCAB_SIZE)
    return scripted_engine(logits, **{"max_model_len": 600, "num_blocks": 400, **options})


def answer(engine: Engine, params: SamplingParams) -> Any:
    (output,) = run(engine, {"x": (b"prompt", params)})["x"].outputs
    return output


def check_valid(text: str, schema: Any) -> None:
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(
        json.loads(text)
    )


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - REFUSED))
def test_every_answer_keeps_to_its_schema(name: str) -> None:
    choices = run(byte_engine(), {"x": (b"p", structured(400, n=2, json=SCHEMAS[name]))})["x"].outputs
    for choice in choices:
        assert choice.finish_reason == "stop", choice.text
        check_valid(choice.text, SCHEMAS[name])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_kept_to_is_refused_before_any_token(name: str) -> None:
    """B49, B50: never an answer that is not held to anything."""
    engine = byte_engine()
    with pytest.raises(RequestError) as refusal:
        engine.add_request("x", b"p", structured(json=SCHEMAS[name]))
    assert refusal.value.param == "structured_outputs.json"
    assert "\n" not in refusal.value.message and not engine.has_unfinished


def test_the_corpus_is_as_large_as_it_should_be() -> None:
    assert len(SCHEMAS) - len(REFUSED) >= 60 and len(REFUSED) >= 15


@cache
def smollm2() -> tuple[Tokenizer, int]:
    with load_checkpoint(real_model(SMOLLM2)) as checkpoint:
        return Tokenizer.from_gguf(checkpoint.metadata), checkpoint.config.vocab_size


@pytest.mark.real_model
def test_a_real_vocabulary_keeps_to_every_schema() -> None:
    """Tokens that span the marks of JSON, and characters spread over tokens."""
    tokenizer, vocab_size = smollm2()
    compiler = GrammarCompiler(tokenizer, vocab_size, tokenizer.eos_token_ids)
    logits = random_logits(tokenizer, vocab_size)
    rng = np.random.default_rng(2)
    for name in sorted(SCHEMAS.keys() - REFUSED):
        grammar = compiler.compile(StructuredOutputsParams(json=SCHEMAS[name])).start()
        token_ids: list[int] = []
        while len(token_ids) < 300:
            allowed = np.unpackbits(np.frombuffer(grammar.allowed_mask(), np.uint8), bitorder="little")[
                :vocab_size
            ]
            noise = rng.gumbel(size=vocab_size)
            token_id = int(np.argmax(np.where(allowed, logits(token_ids) + noise, -np.inf)))
            assert allowed[token_id]
            if token_id in tokenizer.eos_token_ids:
                break
            assert grammar.accept(token_id)
            token_ids.append(token_id)
        assert len(token_ids) < 300, (name, tokenizer.decode(token_ids))
        check_valid(tokenizer.decode(token_ids), SCHEMAS[name])


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[a-c]{3}[0-9]{2}x"}, "[a-c]{3}[0-9]{2}x"),
        ({"choice": ["yes", "no", "Grüße 😀"]}, "yes|no|Grüße 😀"),
        ({"grammar": 'start: "a" b "!"\nb: "c" | "d" b'}, "ad*c!"),
        ({"grammar": 'root ::= "a" b "!"\nb ::= "c" | "d" b'}, "ad*c!"),
        ({"json_object": True}, r"\{.*\}"),
        ({"json": PAIR, "disable_any_whitespace": True}, r'\{"a":-?\d+,"b":\[(true|false|,)*\]\}'),
    ],
)
def test_other_constraints(constraint: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        text = answer(byte_engine(), structured(seed=seed, **constraint)).text
        assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(a"},
        {"regex": "(?=a)b"},
        {"grammar": "start: missing"},
        {"grammar": ""},
        {"json": "no JSON"},
        {"json": "[1]"},
        {"json": {"enum": ["x" * 20] * 100_000}},
        {"json": '{"not": ' * 500 + "{}" + "}" * 500},
        {"json": {"type": "array", "minItems": 10**9, "items": {"enum": [f"v{i}" for i in range(20_000)]}}},
        {"json": {"const": "\ud800"}},
        {"json": {"type": "integer", "minimum": 10**40}},
    ],
)
def test_bad_constraints_are_refused_soon(constraint: dict[str, Any]) -> None:
    """B49"""
    engine = byte_engine()
    try:
        engine.add_request("x", b"p", structured(5, **constraint))
    except RequestError as refusal:
        assert (refusal.param or "").startswith("structured_outputs")
    else:
        assert "minItems" in str(constraint), "only the long list is a grammar"
        engine.abort(["x"])


@pytest.mark.parametrize(
    "constraint", [{}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": [""]}, {"regex": 5}]
)
def test_exactly_one_constraint(constraint: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        StructuredOutputsParams(**constraint)


def prefer(*texts: bytes) -> Callable[[Sequence[int]], NDArray[np.float32]]:
    """Wants the bytes in this order of preference, whatever has been said."""
    row = np.zeros(VOCAB_SIZE, dtype=np.float32)
    for rank, text in enumerate(texts):
        row[list(text)] = 1000 - 10 * rank
    return lambda history: row


@pytest.mark.parametrize("space", [b"\n", b" ", b"\t", b"\n ", b" \n"])
def test_white_space_is_bounded_and_none_follows_the_end(space: bytes) -> None:
    """B52: a model that prefers white space everywhere still ends."""
    engine = scripted_engine(prefer(space, b'"}]:,ab01truefals'), max_model_len=600, num_blocks=200)
    output = answer(engine, structured(500, json=PAIR))
    assert output.finish_reason == "stop"
    check_valid(output.text, PAIR)
    assert output.text.endswith("}") and len(output.text) < 420


def test_the_end_token_waits_for_the_end_and_is_forced_there() -> None:
    """B53: a model that wants to end at once, and one that never wants to."""
    eager = np.zeros(VOCAB_SIZE, dtype=np.float32)
    eager[EOS] = 1000
    engine = scripted_engine(lambda history: eager, max_model_len=600, num_blocks=200)
    output = answer(engine, structured(json=PAIR))
    assert output.finish_reason == "stop" and output.token_ids[-1] == EOS
    check_valid(output.text, PAIR)
    output = answer(scripted_engine([*b'{"a": 1, "b": []}', ord("x")]), structured(40, json=PAIR))
    assert (output.text, output.finish_reason) == ('{"a": 1, "b": []}', "stop")
    assert len(output.token_ids) == len(output.text) + 1


def test_several_end_tokens_are_all_taken() -> None:
    """B53: models with two."""
    tokenizer = Tokenizer.from_gguf(byte_level(eos_token_id=256 + 8 + 2, eot_token_id=256 + 8))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    grammar = compiler.compile(StructuredOutputsParams(choice=["the"])).start()
    allowed = _allowed(grammar.allowed_mask())
    assert len(tokenizer.eos_token_ids) == 2 and not allowed & tokenizer.eos_token_ids
    assert grammar.accept(tokenizer.encode("the")[0])
    assert _allowed(grammar.allowed_mask()) == tokenizer.eos_token_ids and grammar.is_complete


def test_a_grammar_that_has_ended_takes_nothing_more() -> None:
    """B53: and keeps its state."""
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, [EOS])
    grammar = compiler.compile(StructuredOutputsParams(choice=["a"])).start()
    assert not grammar.is_complete and grammar.accept(ord("a"))
    assert not grammar.accept(ord("a")) and not grammar.accept(EOS)
    assert grammar.is_complete and _allowed(grammar.allowed_mask()) == {EOS}


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, [EOS])
    grammar = compiler.compile(StructuredOutputsParams(choice=["a"])).start()
    assert not grammar.accept(ord("b"))
    assert grammar.error and not any(grammar.allowed_mask())


def _allowed(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def test_least_tokens_give_way_to_the_end_of_the_grammar() -> None:
    output = answer(byte_engine(), replace(structured(60, choice=["yes"]), min_tokens=30))
    assert (output.text, output.finish_reason, output.error) == ("yes", "stop", None)
    output = answer(byte_engine(), replace(structured(60, regex="[ab]{1,40}"), min_tokens=30))
    assert len(output.token_ids) >= 30 and output.finish_reason == "stop"
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputsParams(choice=["a"]))


def test_state_follows_the_request_through_preemption_and_company() -> None:
    """E10: a pool that is far too small, neighbours without a grammar, and some that leave."""
    texts = {}
    for num_blocks in (400, 24):
        engine = byte_engine(num_blocks=num_blocks, max_num_batched_tokens=64, max_model_len=90)
        for number in range(12):
            params = SamplingParams(max_tokens=30, seed=number, min_tokens=20)
            if number % 3:
                params = structured(70, seed=number, json=PAIR)
            engine.add_request(str(number), bytes([65 + number] * 9), params)
        final = {}
        for step in range(2000):
            for output in engine.step():
                if output.finished:
                    final[output.request_id] = output
            if step == 8:
                engine.abort(["3", "4"])
            if not engine.has_unfinished:
                break
        num_preemptions = sum(o.metrics.num_preemptions for o in final.values())
        assert (num_preemptions > 0) == (num_blocks == 24)
        texts[num_blocks] = {r: (o.outputs[0].text, o.outputs[0].finish_reason) for r, o in final.items()}
        assert len(final) == 10
        for number in range(12):
            if number % 3 and number != 4:
                text, reason = texts[num_blocks][str(number)]
                assert reason == "stop"
                check_valid(text, PAIR)
    assert texts[400] == texts[24]


def test_choices_have_states_of_their_own() -> None:
    outputs = run(byte_engine(), {"x": (b"p", structured(n=4, json=PAIR))})["x"].outputs
    assert len({output.text for output in outputs}) > 1
    for output in outputs:
        check_valid(output.text, PAIR)


def test_logprobs_and_stop_strings_go_along() -> None:
    params = SamplingParams(
        max_tokens=50,
        logprobs=2,
        stop=('"b"',),
        structured_outputs=StructuredOutputsParams(json=PAIR),
        seed=1,
    )
    output = answer(byte_engine(), params)
    assert output.stop_reason == '"b"' and '"b"' not in output.text
    assert len(output.logprobs) == len(output.token_ids)


def test_llm_takes_them() -> None:
    llm = LLM.from_engine(byte_engine())
    (output,) = llm.generate("p", structured(choice=["left", "right"]))
    assert output.outputs[0].text in ("left", "right")


def test_grammars_are_compiled_once() -> None:
    engine = byte_engine()
    first = engine.compile_grammar(StructuredOutputsParams(json=PAIR))
    assert engine.compile_grammar(StructuredOutputsParams(json=json.dumps(PAIR))) is first


def test_an_engine_without_tokenizer_refuses() -> None:
    engine = scripted_engine([1], with_tokenizer=False, max_model_len=600)
    with pytest.raises(RequestError, match="tokenizer"):
        engine.add_request("x", [1], structured(choice=["a"]))


def test_rows_without_a_grammar_are_free() -> None:
    seen: list[SchedulerOutput] = []
    engine = scripted_engine([ord("z"), EOS], before_step=seen.append, max_model_len=600)
    assert isinstance(engine.executor, ScriptedExecutor)
    outputs = run(engine, {"free": (b"p", SamplingParams()), "bound": (b"p", structured(choice=["a"]))})
    assert outputs["free"].outputs[0].text == "z" and outputs["bound"].outputs[0].text == "a"
    assert any(len(step.requests) == 2 for step in seen)


def test_jsonschema_checks_what_these_tests_rely_on() -> None:
    with pytest.raises(jsonschema.ValidationError):
        check_valid('"1.2.3"', SCHEMAS["ipv4"])
