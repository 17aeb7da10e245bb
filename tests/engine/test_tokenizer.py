"""`Tokenizer` on small vocabularies: round trips, control tokens, chats, and files that are wrong."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.engine.added_tokens import AddedTokens
from pagoda.engine.tokenizer import Tokenizer
from pagoda.errors import ModelFileError, RequestError, UnsupportedError
from tests.engine import tiny_vocabularies as tiny
from tests.engine.tokenizer_corpus import TEXTS

BYTE_LEVEL = Tokenizer.from_gguf(tiny.byte_level(chat_template=tiny.CHATML))
TRIMMING = BYTE_LEVEL.with_chat_template(tiny.TRIMMING)
CHARACTERS = {"▁": -9.0, "a": -8.0, "b": -8.0, "c": -8.0}
PIECES = {**CHARACTERS, "ab": -1.0, "bc": -2.0, "▁a": -3.0, "abc": -4.0, "cc": -5.0}
SPM = Tokenizer.from_gguf(tiny.spm(PIECES, add_bos_token=True))

FRAGMENTS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|im_",
    "end|>",
    "<",
    "|",
    ">",
    "the ",
    "\n",
    " ",
    "é",
    "😀",
    "\ufdd0",
]
texts = st.text() | st.lists(st.sampled_from(FRAGMENTS)).map("".join) | st.sampled_from(TEXTS)


@given(texts)
def test_byte_level_text_comes_back(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode(token_ids, skip_special_tokens=False) == text


@given(texts)
def test_pieces_with_byte_fallback_give_text_back(text: str) -> None:
    text = text.replace("▁", "")
    assert SPM.decode(SPM.encode(text, parse_special=False)) == text


@given(texts)
def test_text_without_special_tokens_holds_none(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SPM):
        token_ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert not any(map(tokenizer.is_special, token_ids))


def test_a_lone_surrogate_becomes_a_replacement_character() -> None:
    assert BYTE_LEVEL.encode("a\ud800b") == BYTE_LEVEL.encode("a\ufffdb")
    assert BYTE_LEVEL.encode("\ud83d\ude00") == BYTE_LEVEL.encode("😀")


def test_ids_past_the_vocabulary_have_no_bytes_and_negative_ones_do_not_exist() -> None:
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.vocab_size) == b""
    with pytest.raises(IndexError):
        BYTE_LEVEL.token_bytes(-1)


def test_numpy_arrays_and_lists_mean_the_same() -> None:
    metadata = tiny.spm(PIECES)
    arrays = metadata | {
        "tokenizer.ggml.tokens": np.array(metadata["tokenizer.ggml.tokens"], dtype=object),
        "tokenizer.ggml.token_type": np.array(metadata["tokenizer.ggml.token_type"], dtype=np.int32),
        "tokenizer.ggml.scores": np.array(metadata["tokenizer.ggml.scores"], dtype=np.float32),
        "tokenizer.ggml.bos_token_id": np.uint32(1),
    }
    assert Tokenizer.from_gguf(arrays).encode("abc é") == Tokenizer.from_gguf(metadata).encode("abc é")


# Added tokens


def naive_split(text: str, tokens: dict[str, int]) -> list[str | int]:
    parts: list[str | int] = []
    index = 0
    while index < len(text):
        found = max((t for t in tokens if text.startswith(t, index)), key=len, default="")
        if found:
            parts.append(tokens[found])
        elif parts and isinstance(parts[-1], str):
            parts[-1] += text[index]
        else:
            parts.append(text[index])
        index += len(found) or 1
    return parts


token_sets = st.sets(st.text("ab<|", min_size=1, max_size=4), max_size=6).map(
    lambda found: {text: index for index, text in enumerate(sorted(found))}
)


@given(token_sets, st.text("ab<|", max_size=30))
def test_split_finds_the_leftmost_longest_tokens(tokens: dict[str, int], text: str) -> None:
    assert list(AddedTokens(tokens).split(text)) == naive_split(text, tokens)


@given(token_sets, st.text("ab<|", max_size=30))
def test_marked_text_holds_no_token_and_loses_nothing(tokens: dict[str, int], text: str) -> None:
    added = AddedTokens(tokens)
    marked = added.mark(text, "\ufdd0")
    assert marked.replace("\ufdd0", "") == text
    assert "".join(map(str, added.split(marked, untrusted_mark="\ufdd0"))) == marked


# Chats

contents = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@given(st.lists(contents, min_size=1, max_size=3))
def test_only_the_template_writes_control_tokens(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    token_ids = BYTE_LEVEL.encode_chat(messages)
    start, end = (BYTE_LEVEL.encode(text)[0] for text in ("<|im_start|>", "<|im_end|>"))
    assert [t for t in token_ids if BYTE_LEVEL.is_special(t)] == [start, end] * len(messages) + [start]
    assert BYTE_LEVEL.chat_template is not None
    rendered = BYTE_LEVEL.chat_template.render(messages, add_generation_prompt=True)
    assert BYTE_LEVEL.decode(token_ids, skip_special_tokens=False) == rendered


@given(contents, contents)
def test_templates_that_trim_and_split_let_no_control_token_through(first: str, second: str) -> None:
    token_ids = TRIMMING.encode_chat([{"role": "user", "content": content} for content in (first, second)])
    assert len([t for t in token_ids if TRIMMING.is_special(t)]) == 4


def test_look_alikes_are_text_wherever_a_request_can_put_them() -> None:
    tokenizer = BYTE_LEVEL.with_chat_template(
        "{{ tools | tojson(ensure_ascii=true) }}{{ messages | tojson }}{{ extra }}{{ messages[0].content }}"
    )
    call = {"function": {"name": "<|im_end|>", "arguments": '{"<|im_start|>": "<|im_end|>"}'}}
    token_ids = tokenizer.encode_chat(
        [{"role": "<|im_start|>", "content": [{"type": "text", "text": "<|im_end|>"}], "tool_calls": [call]}],
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"<|im_end|>": {}}}}],
        template_kwargs={"extra": "<|endoftext|>"},
    )
    assert not any(map(tokenizer.is_special, token_ids))
    text = tokenizer.decode(token_ids)
    assert text.count("<|im_end|>") == 5 and "\ufdd0" not in text and "\\ufdd0" not in text


def test_an_answer_to_a_quoted_marker_reads_the_same_bytes() -> None:
    """The text around a look-alike merges as if the marker were any other text."""
    plain = BYTE_LEVEL.encode("the<|im_end|>the", parse_special=False)
    chat = BYTE_LEVEL.encode_chat([{"role": "user", "content": "the<|im_end|>the"}])
    assert any(chat[i : i + len(plain)] == plain for i in range(len(chat)))


BOS_TEMPLATE = "{{ bos_token }}{{ messages[0].content }}"


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("template_has_bos", [True, False])
def test_bos_comes_once_whoever_adds_it(add_bos: bool | None, template_has_bos: bool) -> None:
    """C02, C03: templates with and without BOS, files that ask for BOS, refuse it, or do not say."""
    more: dict[str, Any] = {} if add_bos is None else {"add_bos_token": add_bos}
    template = BOS_TEMPLATE if template_has_bos else BOS_TEMPLATE.removeprefix("{{ bos_token }}")
    tokenizer = Tokenizer.from_gguf(tiny.spm(PIECES, chat_template=template, **more))
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "abc"}])
    wanted = template_has_bos or add_bos is not False  # sentencepiece vocabularies add BOS unless told not to
    assert token_ids.count(1) == int(wanted)
    assert tokenizer.encode("abc").count(1) == int(add_bos is not False)
    assert 1 not in tokenizer.encode("abc", add_special_tokens=False)


def test_a_model_without_template_says_how_to_pass_one() -> None:
    """C13: no template, an empty one, several named ones."""
    messages = [{"role": "user", "content": "abc"}]
    for more in ({}, {"chat_template": ""}, {"chat_template": "  \n"}):
        tokenizer = Tokenizer.from_gguf(tiny.byte_level(**more))
        assert tokenizer.chat_template is None
        with pytest.raises(RequestError, match="no chat template") as raised:
            tokenizer.encode_chat(messages)
        assert "--chat-template" in (raised.value.hint or "")
        assert tokenizer.encode("completions still work")
        assert tokenizer.with_chat_template("{{ messages[0].content }}").encode_chat(messages)


def test_named_templates() -> None:
    """C13: `default` speaks unless tools are given and there is `tool_use`; a single one is the default."""
    named = tiny.byte_level() | {
        "tokenizer.chat_templates": ["default", "tool_use"],
        "tokenizer.chat_template.default": "plain",
        "tokenizer.chat_template.tool_use": "{{ tools | length }}",
    }
    tokenizer = Tokenizer.from_gguf(named)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == "plain"
    assert tokenizer.decode(tokenizer.encode_chat(messages, tools=[{}, {}])) == "2"
    only = Tokenizer.from_gguf(tiny.byte_level() | {"tokenizer.chat_template.rag": "rag"})
    assert only.decode(only.encode_chat(messages)) == "rag"


def test_a_template_that_does_not_compile_names_its_line() -> None:
    """C06: the failure comes with the line, when the template is first looked at."""
    tokenizer = Tokenizer.from_gguf(tiny.byte_level(chat_template="{{ 1 }}\n{% for %}\n"))
    with pytest.raises(ModelFileError, match="line 2"):
        _ = tokenizer.chat_template


def test_messages_that_hold_every_mark_are_refused() -> None:
    with pytest.raises(RequestError, match="not characters"):
        BYTE_LEVEL.encode_chat([{"role": "user", "content": "".join(map(chr, range(0xFDD0, 0xFDF0)))}])


# SentencePiece


def naive_spm(text: str, pieces: dict[str, float]) -> list[str]:
    """Merge the best pair again and again: best score, then longer left half, then leftmost."""
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-pieces[left + right], -len(left), -len(right), index)
            for index, (left, right) in enumerate(pairwise(symbols))
            if left in pieces and right in pieces and left + right in pieces
        ]
        if not pairs:
            return symbols
        index = min(pairs)[3]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


piece_sets = st.dictionaries(
    st.text("ab▁", min_size=2, max_size=4), st.integers(-4, 0).map(float), max_size=12
).map(lambda found: {"a": -9.0, "b": -9.0, "▁": -9.0, **found})


@settings(max_examples=150)
@given(piece_sets, st.text("ab c", max_size=24))
def test_pieces_merge_as_in_the_naive_algorithm(pieces: dict[str, float], text: str) -> None:
    """Any scores, ties included; "c" is no piece, so its byte stands between the others."""
    metadata = tiny.spm(pieces, add_bos_token=False)
    names = {text: index for index, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    expected = [names.get(symbol, names["<0x63>"]) for symbol in naive_spm(text, pieces)]
    assert Tokenizer.from_gguf(metadata).encode(text) == expected


def test_user_defined_pieces_come_before_merges() -> None:
    """C17: a run of spaces spelled with spaces in the file; the longest wins; nothing merges across it."""
    pieces = PIECES | {"▁▁": -0.5, "▁▁a": -0.1}
    tokenizer = Tokenizer.from_gguf(tiny.spm(pieces, user_defined=["  ", "    ", "<b>"], add_bos_token=False))
    shown = [tokenizer.token_bytes(t).decode() for t in tokenizer.encode("a     ab<b>c  a")]
    assert shown == ["a", "    ", " ", "ab", "<b>", "c", "  ", "a"]


def test_the_model_name_decides_the_kind_of_vocabulary() -> None:
    """C18: a file with merges as well as scores is read by its `tokenizer.ggml.model`."""
    metadata = tiny.spm(PIECES, add_bos_token=False) | {
        "tokenizer.ggml.merges": ["c c"],
        "tokenizer.ggml.pre": "gpt-2",
    }
    tokens = metadata["tokenizer.ggml.tokens"]
    as_spm = Tokenizer.from_gguf(metadata).encode("bcc")
    as_bpe = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.model": "gpt2"}).encode("bcc")
    assert [tokens[t] for t in as_spm] == ["bc", "c"]
    assert [tokens[t] for t in as_bpe] == ["b", "cc"]


@pytest.mark.parametrize("missing", ["none", "some", "newline", "all"])
def test_missing_byte_tokens_never_crash(missing: str) -> None:
    """C19: bytes are used where the vocabulary has all of a character's, else it is the unknown token."""
    gone = {"none": [], "some": [0x9F, 0x80], "newline": [0x0A], "all": range(256)}[missing]
    byte_values = [value for value in range(256) if value not in set(gone)]
    tokenizer = Tokenizer.from_gguf(tiny.spm(PIECES, byte_values=byte_values, add_bos_token=False))
    for text in ("a😀b\n\x01c", "\n", "😀😀", "é"):
        token_ids = tokenizer.encode(text)
        if missing == "none":
            assert tokenizer.decode(token_ids) == text
        for character in text:
            held = all(byte in byte_values for byte in character.encode()) or character in PIECES
            assert (0 in tokenizer.encode(character)) == (not held)
    without_unknown = tiny.spm(PIECES, byte_values=byte_values, unknown_token_id=0xFFFFFFFF)
    assert Tokenizer.from_gguf(without_unknown).encode("a😀\n")


def test_the_space_in_front_of_a_text_is_not_part_of_it() -> None:
    tokenizer = Tokenizer.from_gguf(tiny.spm(PIECES, add_space_prefix=True))
    tokens = [tokenizer.token_bytes(t) for t in tokenizer.encode("abc")]
    assert tokens == [b"<s>", b" ", b"abc"]
    for text in ("abc", " abc", "  a", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # Without BOS the ids go on a text, so their space is theirs.
    assert tokenizer.decode(tokenizer.encode("a", add_special_tokens=False)) == " a"


# Ends of an answer


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"<|im_end|>", "<|endoftext|>"}),
        ({"eos_token_id": 264}, {"<|im_end|>", "<|endoftext|>"}),
        ({"eot_token_id": 265}, {"<|im_end|>", "<|endoftext|>", "<|im_start|>"}),
        ({"eos_token_id": 0, "eom_token_id": np.uint32(1)}, {"<|im_end|>", "<|endoftext|>", "!", '"'}),
        ({"eos_token_id": -1}, {"<|im_end|>", "<|endoftext|>"}),
    ],
)
def test_every_end_token_ends_an_answer(more: dict[str, Any], expected: set[str]) -> None:
    """C20: the union of those that the file names and of those known by their text."""
    tokens = tiny.byte_level()["tokenizer.ggml.tokens"]
    symbols = {tokens[0]: "!", tokens[1]: '"'}
    tokenizer = Tokenizer.from_gguf(tiny.byte_level(**more))
    found = {symbols.get(tokens[t], tokens[t]) for t in tokenizer.eos_token_ids}
    assert found == expected


def test_html_is_no_end_of_an_answer() -> None:
    """`</s>` ends an answer where it is a control token, not where it is a piece of HTML."""
    html = Tokenizer.from_gguf(tiny.byte_level(control=["<x>"], user_defined=["</s>"]))
    control = Tokenizer.from_gguf(tiny.byte_level(control=["</s>"]))
    assert not html.eos_token_ids
    assert control.eos_token_ids == {control.encode("</s>")[0]}


def test_harmony_goes_on_after_the_end_of_a_message() -> None:
    tokenizer = Tokenizer.from_gguf(tiny.byte_level(control=["<|return|>", "<|call|>", "<|end|>"]))
    assert {tokenizer.token_bytes(t) for t in tokenizer.eos_token_ids} == {b"<|return|>", b"<|call|>"}


# What is refused


def change(**more: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in more.items()}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (change(model="bert"), UnsupportedError, "'bert'"),
        (change(model="t5"), UnsupportedError, "'t5'"),
        (change(model=None), ModelFileError, "tokenizer.ggml.model"),
        (change(pre="no-such-name"), UnsupportedError, "no-such-name"),
        (change(pre=None), UnsupportedError, "tokenizer.ggml.pre"),
        (change(tokens=None), ModelFileError, "no vocabulary"),
        (change(tokens=[]), ModelFileError, "no vocabulary"),
        (change(tokens=[1, 2]), ModelFileError, "not text"),
        (change(tokens="abc"), ModelFileError, "must be an array"),
        (change(token_type=[1]), ModelFileError, "token_type has 1 entries"),
        (change(merges=None), ModelFileError, "merges"),
        (change(merges=["x y"]), ModelFileError, "merges"),
        (change(merges=["abc"]), ModelFileError, "merges"),
        (change(bos_token_id=10**6), ModelFileError, "bos_token_id is 1000000"),
        (change(eos_token_id="x"), ModelFileError, "eos_token_id"),
        (change(model="llama"), ModelFileError, "scores"),
        (change(model="llama", scores=[0.0]), ModelFileError, "scores has 1 entries"),
        (change(model=["gpt2"]), UnsupportedError, "'gpt2'"),
        (change(pre=["gpt-2"]), ModelFileError, "tokenizer.ggml.pre is"),
        (change(token_type=["1"] * 300), ModelFileError, "token_type must hold integers"),
        (change(token_type=np.ones(300, np.bool_)), ModelFileError, "token_type must hold integers"),
        (change(token_type=np.ones(300, np.float32)), ModelFileError, "token_type must hold integers"),
        (change(merges=np.arange(5)), ModelFileError, "merges holds something that is not text"),
        (change(model="llama", scores=["1"] * 300), ModelFileError, "scores must hold finite numbers"),
        (change(model="llama", scores=np.full(300, np.nan)), ModelFileError, "scores must hold finite"),
        (change(bos_token_id=1.5), ModelFileError, "bos_token_id is 1.5"),
        (change(bos_token_id=True), ModelFileError, "bos_token_id is True"),
        (change(add_bos_token="false"), ModelFileError, "add_bos_token is 'false'"),
        (change(add_bos_token=2), ModelFileError, "add_bos_token is 2"),
    ],
)
def test_wrong_files_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """D04: arrays of another element type, of another length; a truth value in words."""
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(tiny.byte_level() | changes)
