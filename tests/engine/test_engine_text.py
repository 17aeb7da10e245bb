"""From tokens to text: stop strings, streaming, and log-probabilities beside them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.engine.output import OutputKind
from pagoda.sampling_params import SamplingParams
from tests.engine.engines import EOS, PIECES, byte_tokenizer, drain, scripted_engine, token


def answer(script: Sequence[int], **params: object) -> tuple[str, str | None, int | str | None]:
    """Text, finish reason and stop reason; the same streamed and at once."""
    engine = scripted_engine([*script, EOS])
    sampling = SamplingParams(**{"max_tokens": 40, **params})  # type: ignore[arg-type]
    engine.add_request("final", b"p", sampling)
    engine.add_request("delta", b"p", sampling, output_kind=OutputKind.DELTA)
    outputs = drain(engine)
    final = next(o for o in outputs if o.request_id == "final").outputs[0]
    deltas = [o.outputs[0] for o in outputs if o.request_id == "delta"]
    assert "".join(d.text for d in deltas) == final.text
    assert [t for d in deltas for t in d.token_ids] == list(final.token_ids)
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (final.finish_reason, final.stop_reason)
    return final.text, final.finish_reason, final.stop_reason


STOPPED = [token("DEF"), token("G"), token("HI"), token("J")]
NEAR_MISS = [token("DEF"), token("G"), token("HI"), token("X")]


@pytest.mark.parametrize(
    ("script", "stop", "expected"),
    [
        (STOPPED, ["DEFGHIJ"], ("", "stop", "DEFGHIJ")),
        (NEAR_MISS, ["DEFGHIJ"], ("DEFGHIX", "stop", None)),
        (STOPPED, ["DEFGHIJ", "DEFG"], ("", "stop", "DEFG")),
        (STOPPED, ["GH", "EFGH"], ("D", "stop", "EFGH")),
        ([token("X"), *STOPPED], ["J"], ("XDEFGHI", "stop", "J")),
        (STOPPED, ["HI", "I"], ("DEFG", "stop", "HI")),
    ],
)
def test_stop_strings_across_tokens(
    script: Sequence[int], stop: list[str], expected: tuple[str, str, str | None]
) -> None:
    """B06: nothing of a match is emitted, a near miss is emitted whole and once."""
    assert answer(script, stop=stop) == expected


def test_text_before_a_stop_string_in_the_same_token_is_delivered() -> None:
    """B07"""
    assert answer([token("?\n")], stop=["\n"]) == ("?", "stop", "\n")
    assert answer([*"né".encode(), token("?\n")], stop=["\n"]) == ("né?", "stop", "\n")
    assert answer([token("?\n")], stop=["\n"], include_stop_str_in_output=True) == ("?\n", "stop", "\n")


@pytest.mark.parametrize("max_tokens", [2, 40])
def test_held_back_text_is_delivered_at_every_end(max_tokens: int) -> None:
    """B08"""
    text, reason, _ = answer([token("ple"), token("as")], stop=["assistant<|x|>"], max_tokens=max_tokens)
    assert (text, reason) == ("pleas", "length" if max_tokens == 2 else "stop")


def test_what_min_tokens_cover_is_not_searched_for_stop_strings() -> None:
    """B11: the cut is at the hit that ended generation, not at the first occurrence."""
    script = [token("G"), token("X"), token("G"), token("X")]
    assert answer(script, stop=["G"], min_tokens=2) == ("GX", "stop", "G")
    assert answer(script, stop=["GX"], min_tokens=1) == ("GX", "stop", "GX")
    assert answer(script, stop=["XG"], min_tokens=2) == ("GXGX", "stop", None)


@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stop_token_is_shown_on_request_only(include: bool) -> None:
    params = {"stop_token_ids": (token("J"),), "include_stop_str_in_output": include}
    expected = "DEFGHIJ" if include else "DEFGHI"
    assert answer(STOPPED, **params) == (expected, "stop", token("J"))


def test_the_end_of_sequence_token_leaves_no_text() -> None:
    """C20: whether special tokens are shown or not."""
    for skip in (True, False):
        assert answer([token("X")], skip_special_tokens=skip) == ("X", "stop", None)
    inside = [token("X"), EOS, token("G")]
    assert answer(inside, skip_special_tokens=False, ignore_eos=True, max_tokens=3)[0] == "X<|eos|>G"
    assert answer(inside, ignore_eos=True, max_tokens=3)[0] == "XG"


@pytest.mark.parametrize("text", ["😊", "世界", "👩‍👩‍👧‍👦 family", "한국어 ไทย", "é"])
def test_characters_spread_over_tokens_come_out_whole(text: str) -> None:
    """B01, B02, B04: no U+FFFD, no repetition, nothing lost, streamed or not."""
    assert answer(list(text.encode())) == (text, "stop", None)


def test_bytes_that_never_become_a_character_are_flushed() -> None:
    """B03"""
    assert answer([0x80] * 30)[0] == "\ufffd" * 30
    assert answer([0xF0, 0x9F])[0] == "\ufffd"


@settings(max_examples=40, deadline=None)
@given(
    script=st.lists(st.sampled_from([token(p) for p in PIECES] + list("aé".encode())), max_size=12),
    stop=st.lists(st.sampled_from(["GHI", "IG", "J", "XX", "EFG", "é", "?", "DEFX", "plea"]), max_size=3),
    include=st.booleans(),
)
def test_the_answer_ends_at_the_first_complete_stop_string(
    script: list[int], stop: list[str], include: bool
) -> None:
    text = byte_tokenizer().decode(script)
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    expected: tuple[str, str, str | None] = (text, "stop", None)
    if ends:
        end, negative_length, hit = min(ends)
        expected = (text[: end if include else end + negative_length], "stop", hit)
    assert answer(script, stop=stop, include_stop_str_in_output=include) == expected


def test_each_token_has_its_own_logprobs_also_when_text_is_held_back() -> None:
    """B22: several tokens whose text comes out together keep their entries."""
    engine = scripted_engine([*NEAR_MISS, EOS])
    params = SamplingParams(stop="DEFGHIJ", logprobs=1)
    engine.add_request("x", b"p", params, output_kind=OutputKind.DELTA)
    outputs = [o.outputs[0] for o in drain(engine)]
    for delta in outputs:
        assert delta.logprobs is not None
        assert [next(iter(entry)) for entry in delta.logprobs] == list(delta.token_ids)
        assert all(entry[t].rank == 1 for t, entry in zip(delta.token_ids, delta.logprobs, strict=True))
    decoded = [
        entry[t].decoded_token
        for d in outputs
        for t, entry in zip(d.token_ids, d.logprobs or (), strict=True)
    ]
    assert "".join(str(t) for t in decoded) == "DEFGHIX" == "".join(d.text for d in outputs)


def test_a_character_cut_by_the_token_limit_is_marked() -> None:
    assert answer(list("世".encode()), max_tokens=2)[0] == "\ufffd"
