"""`IncrementalDetokenizer` and `StopChecker`: streamed text is the whole text, no more and no less."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.engine.detokenizer import IncrementalDetokenizer, StopChecker
from pagoda.engine.tokenizer import Tokenizer
from tests.engine import tiny_vocabularies as tiny

# Of every kind of piece: bytes, whole words, parts of characters, control and user-defined tokens.
BYTE_LEVEL = Tokenizer.from_gguf(tiny.byte_level(merges=["t h", "Ġ t", "Ġt h", "ð Ł", "ðŁ ĺ", "ä ¸", "Ģ Ģ"]))
SPM = Tokenizer.from_gguf(tiny.spm({"▁": -2.0, "a": -3.0, "▁a": -1.0, "世": -4.0}, add_space_prefix=True))
TOKENIZERS = (BYTE_LEVEL, SPM)


def byte_ids(raw: bytes) -> list[int]:
    """One token of `BYTE_LEVEL` for each byte."""
    return list(raw)  # the first 256 tokens are the bytes, in order


def pushed(tokenizer: Tokenizer, token_ids: Sequence[int], sizes: Iterable[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    texts, start = [], 0
    for size in sizes:
        texts.append(detokenizer.push(token_ids[start : start + size]))
        start += size
    return [*texts, detokenizer.push(token_ids[start:]), detokenizer.flush()]


@given(st.data())
def test_pushes_and_flush_join_to_the_decoded_text(data: st.DataObject) -> None:
    """B04: any ids, cut anywhere. The text is that of the tokens' bytes, decoded at once."""
    tokenizer = data.draw(st.sampled_from(TOKENIZERS))
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=20))
    text = tokenizer.decode(token_ids)
    assert "".join(pushed(tokenizer, token_ids, sizes)) == text
    shown = [t for t in token_ids if not tokenizer.is_special(t)]
    raw = b"".join(map(tokenizer.token_bytes, shown))
    if token_ids[:1] == [tokenizer.bos_token_id]:
        raw = raw.removeprefix(b" ")
    assert text == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("step", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "text",
    [
        "😊",
        "👨‍👩‍👧‍👦 👩🏽‍🚀",
        "안녕하세요, 한국어 문장을 한 글자씩 보냅니다. 값은 얼마입니까?",
        "สวัสดีชาวโลก ภาษาไทย",
        "世界 A世a 世ab",
        "mixed 中文 😀 e\u0301",
    ],
)
def test_characters_split_over_tokens_arrive_whole(text: str, step: int) -> None:
    """B01, B04: bytes one by one and in steps that cut characters; nothing is lost, no U+FFFD appears."""
    token_ids = byte_ids(text.encode())
    texts = pushed(BYTE_LEVEL, token_ids, [step] * (len(token_ids) // step))
    assert "".join(texts) == text
    assert texts[-1] == ""


def test_what_was_sent_is_never_sent_again() -> None:
    """B02: a complete character before an incomplete one is sent once."""
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    steps = ["A 世".encode() + b"\xe4\xb8", b"\x96a", b"b"]
    assert [detokenizer.push(byte_ids(step)) for step in steps] == ["A 世", "世a", "b"]
    assert detokenizer.flush() == ""


def test_bytes_that_never_become_a_character_do_not_wait() -> None:
    """B03: a lone continuation byte is sent at once; an unfinished character waits, at most three bytes."""
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    lone = byte_ids(b"\x80")
    assert [detokenizer.push(lone) for _ in range(2000)] == ["\ufffd"] * 2000
    assert detokenizer.flush() == ""
    unfinished = [detokenizer.push([token_id]) for token_id in byte_ids(b"\xf0\x9f\x98a")]
    assert unfinished == ["", "", "", "\ufffda"]
    assert detokenizer.push(byte_ids(b"\xe4\xb8")) == ""
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("raw", [b"\x80", b"\xef\xbf\xbd", b"a", b"\xe4"])
def test_the_cost_of_a_token_does_not_grow(raw: bytes) -> None:
    """B03: ten times the tokens cost about ten times as much, not a hundred times."""
    token_ids = byte_ids(raw)

    def seconds(num_tokens: int) -> float:
        detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
        start = time.process_time()
        for _ in range(num_tokens):
            detokenizer.push(token_ids)
        return time.process_time() - start

    assert min(seconds(40_000) for _ in range(3)) < 30 * min(seconds(4_000) for _ in range(3))


def test_control_tokens_show_only_when_asked() -> None:
    control = BYTE_LEVEL.encode("<|im_end|>")
    token_ids = [*byte_ids(b"a"), *control, *BYTE_LEVEL.encode("<tool_call>")]
    assert BYTE_LEVEL.decode(token_ids) == "a<tool_call>"
    shown = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=False)
    assert shown.push(token_ids) + shown.flush() == "a<|im_end|><tool_call>"


# Stop strings


def run(checker: StopChecker, texts: Iterable[str]) -> tuple[list[str], str | None]:
    """What each push emits, then the flush; and the hit."""
    emitted, hit = [], None
    for text in texts:
        emit, hit = checker.push(text)
        emitted.append(emit)
        if hit is not None:
            break
    return [*emitted, checker.flush()], hit


def expected_end(text: str, stop: Sequence[str], include_stop: bool) -> tuple[str, str | None]:
    """Read the text character by character and look for each stop string at its end."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            hit = max(hits, key=len)
            return text[: end if include_stop else end - len(hit)], hit
    return text, None


pieces = st.lists(st.text("ab\n", max_size=4), max_size=10)
stops = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


@given(pieces, stops, st.booleans())
def test_the_text_ends_at_the_first_complete_stop_string(
    texts: list[str], stop: list[str], include_stop: bool
) -> None:
    """Whatever the pieces, stop strings that overlap or begin one another included."""
    emitted, hit = run(StopChecker(stop, include_stop), texts)
    assert ("".join(emitted), hit) == expected_end("".join(texts), stop, include_stop)


@given(pieces, stops)
def test_only_the_beginning_of_a_stop_string_is_held_back(texts: list[str], stop: list[str]) -> None:
    checker = StopChecker(stop, False)
    pushed_text = emitted = ""
    for text in texts:
        emit, hit = checker.push(text)
        if hit is not None:
            return
        pushed_text += text
        emitted += emit
        held = pushed_text.removeprefix(emitted)
        assert pushed_text == emitted + held
        assert held == max(
            (s[:n] for s in stop for n in range(len(s)) if pushed_text.endswith(s[:n])), key=len, default=""
        )


def test_no_part_of_a_stop_string_is_streamed() -> None:
    """B06: a match is never shown; a near miss is, whole and once; the stop that is complete first hits."""
    assert run(StopChecker(["DEFGHIJ"], False), ["abc", "DEF", "G", "HI", "J"]) == (
        ["abc", "", "", "", "", ""],
        "DEFGHIJ",
    )
    assert run(StopChecker(["DEFGHIJ"], False), ["DEF", "G", "HI", "X"]) == (
        ["", "", "", "DEFGHIX", ""],
        None,
    )
    assert run(StopChecker(["DEFGHIJ", "DEF"], False), ["aD", "EFG"]) == (["a", "", ""], "DEF")


@pytest.mark.parametrize("text", ["?\n", "é?\n", "안녕\n", "😀\n"])
def test_text_before_the_stop_in_the_same_piece_is_kept(text: str) -> None:
    """B07: one token holds the end of the answer and the stop string."""
    assert run(StopChecker(["\n"], False), [text]) == ([text[:-1], ""], "\n")
    assert run(StopChecker(["\n"], True), [text]) == ([text, ""], "\n")


def test_held_text_is_flushed_when_generation_ends() -> None:
    """B08: at EOS, at the token limit, on abort."""
    assert run(StopChecker(["assistant<|x|>"], False), ["ple", "as"]) == (["ple", "", "as"], None)


def test_a_stop_string_before_checking_starts_does_not_cut_the_answer() -> None:
    """B11: the cut is at the hit that ended generation; text that was not pushed does not count."""
    before = "think END think EN"
    checker = StopChecker(["END"], False)
    emitted, hit = run(checker, ["D answer ", "END more"])
    assert (before + "".join(emitted), hit) == ("think END think END answer ", "END")


def test_nothing_follows_a_hit() -> None:
    checker = StopChecker(["x"], False)
    assert checker.push("axb") == ("a", "x")
    assert checker.push("c") == ("", "x")
    assert checker.flush() == ""


def test_without_stop_strings_nothing_is_held() -> None:
    assert run(StopChecker([], False), ["a", "b"]) == (["a", "b", ""], None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker([""], False)
