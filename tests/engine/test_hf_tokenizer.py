"""Tokenizers of Hugging Face folders: ids of the package that defines the format, and what folders add."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from pagoda.engine.hf_tokenizer import hf_tokenizer
from pagoda.engine.tokenizer import Tokenizer
from pagoda.errors import ModelFileError, PagodaError, RequestError, UnsupportedError
from tests.engine.hf_tokenizers import KINDS, VOCAB_SIZE, tokenizer_json, write_tokenizer_folder
from tests.engine.tiny_vocabularies import CHATML
from tests.engine.tokenizer_corpus import TEXTS

SPECIAL_TEXTS = [
    "<s>a</s>", "a<s> b", "<|im_start|>user\nhi<|im_end|>\n", "x <|end|>  y\n", "<|user|>\n hello <mask> z",
    "  <mask>", "<|begin_of_text|>x", "a<tool_call> b", "<table>\n\n\n\nx", "<|endoftext|><|endoftext|>",
    "<unk>",
]  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def library(kind: str) -> Library:
    return Library.from_str(tokenizer_json(kind))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        kind: hf_tokenizer(write_tokenizer_folder(folder / kind, tokenizer_json(kind)), VOCAB_SIZE)
        for kind in KINDS
    }


@each_kind
def test_ids_of_texts_equal_the_library(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """C17, C18: with BOS where the file's template has it, special tokens, and white space they take."""
    differing = {
        text: (tokenizers[kind].encode(text), library(kind).encode(text).ids)
        for text in [*TEXTS, *SPECIAL_TEXTS]
        if tokenizers[kind].encode(text) != library(kind).encode(text).ids
    }
    assert not differing


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(list(KINDS)), text=st.text(max_size=40))
def test_ids_of_any_text_equal_the_library(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    assert tokenizers[kind].encode(text) == library(kind).encode(text).ids


@each_kind
def test_control_tokens_are_text_when_they_are_not_to_be_parsed(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    for text in SPECIAL_TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        specials = [i for i in token_ids if tokenizer.is_special(i) and tokenizer.token_bytes(i) != b"<unk>"]
        assert not specials, text


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unigram"])  # which has no byte tokens
def test_decoding_gives_the_text_back(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """C19: through byte tokens where a character is no piece; a space that encoding added is not text."""
    tokenizer = tokenizers[kind]
    for text in ("The quick brown fox", "a  b\n\n\tc", "naïve 日本語 🦊 \x00", " leading", "", "1234567 <b>"):
        token_ids = tokenizer.encode(text)
        if kind == "llama2-first" and text.startswith(" "):
            continue  # which puts none before a space, so that it cannot be told from an added one
        assert tokenizer.decode(token_ids) == text


def make(folder: Path, kind: str = "qwen", change: Any = None, **files: Any) -> Tokenizer:
    values = json.loads(tokenizer_json(kind))
    if change is not None:
        change(values)
    return hf_tokenizer(write_tokenizer_folder(folder / "t", values, **files), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_config", "ends"),
    [
        ({}, {}, {}, {"<|im_end|>", "<|endoftext|>"}),  # known by their text
        ({"eos_token_id": "th"}, {}, {}, {"<|im_end|>", "<|endoftext|>", "th"}),
        ({"eos_token_id": ["th"]}, {"eos_token_id": "in"}, {}, {"<|im_end|>", "<|endoftext|>", "th", "in"}),
        ({}, {"eos_token_id": None}, {"eos_token": "th"}, {"<|im_end|>", "<|endoftext|>", "th"}),
        ({}, {}, {"eos_token": {"content": "th", "lstrip": False}}, {"<|im_end|>", "<|endoftext|>", "th"}),
    ],
)  # fmt: skip
def test_every_end_token_ends_an_answer(
    tmp_path: Path, generation: Any, config: Any, tokenizer_config: Any, ends: set[str]
) -> None:
    """C20: one id, a list, or none, in any of the files; together with those known by their text."""
    ids = library("qwen").get_vocab()

    def with_ids(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: [ids[t] for t in value] if isinstance(value, list) else ids.get(value)
            for name, value in values.items()
        }

    tokenizer = make(
        tmp_path,
        generation_config=with_ids(generation),
        config=with_ids(config),
        tokenizer_config=tokenizer_config,
    )
    assert tokenizer.eos_token_ids == {ids[text] for text in ends}


@pytest.mark.parametrize("value", ["2", 1.5, True, [1, "2"], {"a": 1}, -1, 2**40])
def test_ends_that_are_no_token_ids_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelFileError, match="'eos_token_id' must be a token id or a list of them"):
        make(tmp_path, generation_config={"eos_token_id": value})


@pytest.mark.parametrize(
    ("kind", "tokenizer_config", "adds"),
    [
        ("llama3", {}, True),
        ("llama3", {"add_bos_token": False}, False),
        ("qwen", {"bos_token": "<|endoftext|>"}, False),
        ("qwen", {"bos_token": "<|endoftext|>", "add_bos_token": True}, True),
        ("qwen", {"bos_token": None, "add_bos_token": True}, False),
        ("qwen", {"bos_token": "<|endoftext|>", "tokenizer_class": "LlamaTokenizerFast"}, True),
        ("qwen", {"bos_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"}, False),
    ],
)
@pytest.mark.parametrize("template_has_bos", [True, False])
def test_bos_comes_once_whoever_adds_it(
    tmp_path: Path, kind: str, tokenizer_config: Any, adds: bool, template_has_bos: bool
) -> None:
    """C02, C03: a chat has BOS once where the model wants it, in the template or not."""
    config = {"bos_token": "<|begin_of_text|>"} if kind == "llama3" else {}
    template = ("{{ bos_token }}" if template_has_bos else "") + "{{ messages[0].content }}"
    tokenizer = make(
        tmp_path, kind, tokenizer_config={**config, **tokenizer_config, "chat_template": template}
    )
    bos = tokenizer.bos_token_id
    assert (tokenizer.encode("a")[0] == bos) is (adds and bos is not None)
    chat = tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert chat.count(bos) == (bos is not None and (adds or template_has_bos))  # type: ignore[arg-type]


def test_templates_come_from_the_file_that_goes_first(tmp_path: Path) -> None:
    """C13: chat_template.jinja, else chat_template.json, else tokenizer_config.json; one name or several."""
    named = [{"name": "default", "template": "c"}, {"name": "tool_use", "template": "tools: {{ tools }}"}]
    tokenizer = make(tmp_path, tokenizer_config={"chat_template": named})
    assert tokenizer.chat_template is not None and tokenizer.tool_template is not None
    assert (tokenizer.chat_template.source, tokenizer.tool_template.source) == (
        "c",
        "tools: {{ tools }}",
    )
    tokenizer = make(tmp_path, tokenizer_config={"chat_template": "c"}, chat_template={"chat_template": "b"})
    assert tokenizer.chat_template is not None and tokenizer.chat_template.source == "b"
    (tmp_path / "t" / "chat_template.jinja").write_text(CHATML)
    tokenizer = make(tmp_path, tokenizer_config={"chat_template": "c"})
    assert tokenizer.chat_template is not None and tokenizer.chat_template.source == CHATML
    start = library("qwen").token_to_id("<|im_start|>")
    assert tokenizer.encode_chat([{"role": "user", "content": "<|im_start|>"}]).count(start) == 2


@pytest.mark.parametrize("template", [None, "", []])
def test_a_folder_without_a_template_says_how_to_pass_one(tmp_path: Path, template: Any) -> None:
    """C13."""
    tokenizer = make(tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert "--chat-template" in (caught.value.hint or "")


@pytest.mark.parametrize("template", [1, [1], {"a": 1}, [{"name": "a"}]])
def test_templates_that_are_no_text_are_refused(tmp_path: Path, template: Any) -> None:
    with pytest.raises(ModelFileError, match="'chat_template' must be text"):
        make(tmp_path, tokenizer_config={"chat_template": template})


def test_added_tokens_past_the_model_are_text(tmp_path: Path) -> None:
    """Gemma's text models have an image token that their embedding has no row for."""

    def add(values: Any) -> None:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        values["added_tokens"].append(flags | {"id": VOCAB_SIZE, "content": "<image>"})

    tokenizer = make(tmp_path, change=add)
    assert tokenizer.encode("a<image>b") == make(tmp_path).encode("a<image>b")
    assert tokenizer.vocab_size <= VOCAB_SIZE


def remove(*path: str) -> Any:
    def change(values: Any) -> None:
        for name in path[:-1]:
            values = values[name]
        del values[path[-1]]

    return change


def put(value: Any, *path: str) -> Any:
    def change(values: Any) -> None:
        for name in path[:-1]:
            values = values[name]
        values[path[-1]] = value

    return change


@pytest.mark.parametrize("value", [None, -1, 10**6, "0"])
def test_unigrams_need_a_token_for_what_is_unknown(tmp_path: Path, value: Any) -> None:
    """C19: without one the package fails on the first character that is no piece, while it serves."""
    with pytest.raises(ModelFileError, match="'unk_id' is"):
        make(tmp_path, "unigram", put(value, "model", "unk_id"))


GMASK = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[gMASK]"}}]}
NAMES = ("type", "vocab", "merges", "single", "id", "content", "special", "normalizers", "prepend_scheme")
KIND_NAMES = ("Sequence", "ByteLevel", "Metaspace", "TemplateProcessing", "BPE", "Unigram")
PATHS = [
    *(f"model.{name}" for name in ("type", "vocab", "merges", "unk_token", "unk_id", "byte_fallback")),
    *("model", "model.ignore_merges", "added_tokens", "normalizer", "pre_tokenizer", "decoder"),
    *("post_processor", "truncation", "padding", "version"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (put({"type": "WordPiece", "vocab": {}}, "model"), UnsupportedError, "'WordPiece'"),
        (put({"type": "WordLevel", "vocab": {}}, "model"), UnsupportedError, "'WordLevel'"),
        (put(None, "model"), ModelFileError, "'model' must be an object"),
        (put([], "model", "vocab"), ModelFileError, "'vocab' must map text to ids"),
        (put({}, "model", "vocab"), ModelFileError, "the vocabulary is empty|cannot be built|ids run from"),
        (put({"a": "1"}, "model", "vocab"), ModelFileError, "'vocab' must map text to ids"),
        (put({"a": 2**31}, "model", "vocab"), ModelFileError, "token ids run from"),
        (put({"a": -1}, "model", "vocab"), ModelFileError, "token ids run from"),
        (put([["a", "zz"]], "model", "merges"), ModelFileError, "the tokenizer cannot be built"),
        (put("x", "added_tokens"), ModelFileError, "'added_tokens' must be a list"),
        (put([{"id": 1}], "added_tokens"), ModelFileError, "an added token is"),
        (put([{"id": 1, "content": "x", "single_word": 1}], "added_tokens"), UnsupportedError, "whole words"),
        (put({"type": "BertPreTokenizer"}, "pre_tokenizer"), None, ""),
        (put({"type": "RobertaProcessing"}, "post_processor"), UnsupportedError, "'RobertaProcessing'"),
        (put(GMASK, "post_processor"), UnsupportedError, r"puts '\[gMASK\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, change: Any, error: Any, message: str) -> None:
    if error is None:  # spelled otherwise than byte-level or with symbols for spaces
        error, message = UnsupportedError, "spells neither"

        def both(values: Any) -> None:
            change(values)
            values["decoder"] = None

        with pytest.raises(error, match=message):
            make(tmp_path, change=both)
        return
    with pytest.raises(error, match=message):
        make(tmp_path, change=change)


def test_a_folder_without_tokenizer_json_says_so(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path / "t", "{}")
    (tmp_path / "t" / "tokenizer.json").unlink()
    (tmp_path / "t" / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json .tokenizer\.model alone is not enough"):
        hf_tokenizer(folder, VOCAB_SIZE)


def test_a_tokenizer_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path / "t", tokenizer_json("qwen"))
    with pytest.raises(ModelFileError, match=r"has ids up to \d+, the model 300 tokens"):
        hf_tokenizer(folder, 300)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["qwen", "llama2", "unigram"]),
    path=st.sampled_from(PATHS),
    value=st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-5, 2**40),
            st.text(max_size=4),
            st.sampled_from(KIND_NAMES),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)
def test_any_change_of_a_tokenizer_is_read_or_refused(
    tmp_path: Path, kind: str, path: str, value: Any
) -> None:
    try:
        tokenizer = make(tmp_path, kind, put(value, *path.split(".")))
        tokenizer.decode(tokenizer.encode("a b<s>\n日<|im_end|>"))
    except PagodaError as error:
        assert error.message
        assert len(error.message) < 1000
