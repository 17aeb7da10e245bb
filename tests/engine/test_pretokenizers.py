"""How text is cut into words, by the name that a model file gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.engine.pretokenizers import build_normalizer, build_pre_tokenizer, find_pre_tokenizer
from pagoda.engine.tokenizer import Tokenizer
from tests.engine import tiny_vocabularies as tiny
from tests.engine.tokenizer_corpus import TEXTS

NAMES = (
    "gpt-2",
    "smollm",
    "qwen2",
    "llama-bpe",
    "dbrx",
    "tekken",
    "gpt-4o",
    "command-r",
    "starcoder",
    "llama4",
)


def words(name: str, text: str) -> list[str]:
    spec = find_pre_tokenizer(name)
    pieces = build_pre_tokenizer(spec).pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["It", "'s", " 12345", " days", ",", " a", "  ", " b", "\n", "\n", "C"]),
        ("smollm", ["It", "'s", " ", *"12345", " days", ",", " a", "  ", " b", "\n", "\n", "C"]),
        ("qwen2", ["It", "'s", " ", *"12345", " days", ",", " a", "  ", " b", "\n\n", "C"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " days", ",", " a", "  ", " b", "\n\n", "C"]),
        ("tekken", ["It", "'s", " ", *"12345", " days", ",", " a", "  ", " b", "\n\n", "C"]),
        ("gpt-4o", ["It's", " ", "123", "45", " days", ",", " a", "  ", " b", "\n\n", "C"]),
    ],
)
def test_words_of_one_sentence(name: str, expected: list[str]) -> None:
    assert words(name, "It's 12345 days, a   b\n\nC") == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'LL x.y", ["I", "'", "LL", " x", ".", "y"]),
        ("llama-bpe", "I'LL x.y", ["I", "'LL", " x", ".y"]),
        ("gpt-4o", "camelCase HTTPServer", ["camel", "Case", " HTTPServer"]),
        ("tekken", "camelCase", ["camel", "Case"]),
        ("qwen2", "a!\n b", ["a", "!\n", " b"]),
        ("gpt-2", "a!\n b", ["a", "!", "\n", " b"]),
    ],
)
def test_where_they_differ(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


@given(st.sampled_from(NAMES), st.text() | st.sampled_from(TEXTS))
def test_words_join_to_the_text(name: str, text: str) -> None:
    assert "".join(words(name, text)) == text


def test_only_some_compose_characters() -> None:
    composed = {name for name in NAMES if build_normalizer(find_pre_tokenizer(name)) is not None}
    assert composed == {"qwen2", "command-r"}


def test_a_word_that_is_a_token_stays_whole_where_merges_are_ignored() -> None:
    """Llama 3 has tokens that its merges do not reach."""
    metadata = tiny.byte_level(merges=["a b"], control=["<|eot_id|>"], user_defined=[])
    extra = {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "abc"],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], tiny.NORMAL],
        "tokenizer.ggml.add_bos_token": False,
    }

    def shown(name: str) -> list[bytes]:
        tokenizer = Tokenizer.from_gguf(metadata | extra | {"tokenizer.ggml.pre": name})
        return [tokenizer.token_bytes(t) for t in tokenizer.encode("abc")]

    assert shown("llama-bpe") == [b"abc"]
    assert shown("dbrx") == [b"ab", b"c"]


@pytest.mark.parametrize(("name", "adds_bos"), [("llama-bpe", True), ("gpt-2", False), ("qwen2", False)])
def test_files_that_do_not_say_whether_bos_is_added(name: str, adds_bos: bool) -> None:
    token_ids = Tokenizer.from_gguf(tiny.byte_level(pre=name, bos_token_id=0)).encode("x")
    assert token_ids == [0] * adds_bos + [ord("x")]
