"""Token ids equal those of transformers and sentencepiece (tests/golden/make_tokenizer_golden.py)."""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pagoda.engine.tokenizer import Tokenizer
from pagoda.weights.gguf import read_gguf
from tests.engine.tokenizer_corpus import CHATS, PLAIN_TEMPLATE, TEXTS, TOOL_CHATS
from tests.real_models import GEMMA3, QWEN2_5_CODER, SMOLLM2, real_model

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer"
MODELS = {"smollm2": SMOLLM2, "qwen2.5": QWEN2_5_CODER, "gemma3": GEMMA3}
LLAMAS = ("llama", "llama-user-defined")

each_model = pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.real_model) for n in MODELS])


@cache
def golden(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return content


@cache
def tokenizer_of(name: str) -> Tokenizer:
    if name in LLAMAS:
        return Tokenizer.from_gguf(golden(name)["metadata"])
    with read_gguf(real_model(MODELS[name])) as file:
        return Tokenizer.from_gguf(file.metadata)


def chat_tokenizer(name: str) -> Tokenizer:
    tokenizer = tokenizer_of(name)
    return tokenizer if tokenizer.chat_template else tokenizer.with_chat_template(PLAIN_TEMPLATE)


@each_model
def test_ids_of_texts_equal_transformers(name: str) -> None:
    """C17, C18: among the texts are runs of spaces, tabs and newlines, code and HTML."""
    stored = golden(name)["texts"]
    assert [entry["text"] for entry in stored] == list(TEXTS)
    tokenizer = tokenizer_of(name)
    differing = [entry["text"] for entry in stored if tokenizer.encode(entry["text"]) != entry["token_ids"]]
    assert not differing


@pytest.mark.parametrize("name", LLAMAS)
def test_ids_of_texts_equal_sentencepiece(name: str) -> None:
    """C17: user-defined pieces, runs of spaces among them, come before merges."""
    tokenizer = tokenizer_of(name)
    stored = golden(name)["texts"]
    differing = [entry["text"] for entry in stored if tokenizer.encode(entry["text"]) != entry["token_ids"]]
    assert stored and not differing


@each_model
def test_chats_render_and_encode_as_with_transformers(name: str) -> None:
    """C02, C08: text and ids of whole chats, tools with non-ASCII descriptions included."""
    tokenizer = chat_tokenizer(name)
    for chat_name, expected in golden(name)["chats"].items():
        options = dict({**CHATS, **TOOL_CHATS}[chat_name])
        messages = options.pop("messages")
        assert tokenizer.chat_template is not None
        assert tokenizer.chat_template.render(messages, **options) == expected["text"], chat_name
        assert tokenizer.encode_chat(messages, **options) == expected["token_ids"], chat_name


@each_model
def test_decoding_gives_the_text_back(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for entry in golden(name)["texts"]:
        text = entry["text"]
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        decoded = tokenizer.decode(token_ids, skip_special_tokens=False)
        if name == "gemma3":  # "▁" is how its pieces spell a space
            text = text.replace("▁", " ")
        if name == "qwen2.5":  # composes characters before encoding
            text = unicodedata.normalize("NFC", text)
        assert decoded == text


@each_model
def test_the_ends_of_an_answer_are_all_known(name: str) -> None:
    """C20: the file names one end token, the vocabulary has more."""
    tokenizer = tokenizer_of(name)
    texts = {"smollm2": ["<|im_end|>", "<|endoftext|>"], "qwen2.5": ["<|im_end|>", "<|endoftext|>"]}
    expected = texts.get(name, ["<eos>", "<end_of_turn>"])
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in expected]
    assert tokenizer.eos_token_ids == {token_id for (token_id,) in encoded}
    assert all(map(tokenizer.is_special, tokenizer.eos_token_ids))


@each_model
@pytest.mark.parametrize("look_alike", ["<|im_end|>", "<|im_start|>", "<end_of_turn>", "<bos>"])
def test_look_alikes_in_a_real_chat_stay_text(name: str, look_alike: str) -> None:
    tokenizer = chat_tokenizer(name)

    def control_ids(content: str) -> list[int]:
        token_ids = tokenizer.encode_chat([{"role": "user", "content": content}])
        return [token_id for token_id in token_ids if tokenizer.is_special(token_id)]

    content = f"what does {look_alike}{look_alike} mean?"
    assert control_ids(content) == control_ids("what does that mean?")
    token_ids = tokenizer.encode_chat([{"role": "user", "content": content}])
    assert content in tokenizer.decode(token_ids)
