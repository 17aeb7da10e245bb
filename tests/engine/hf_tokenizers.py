"""Small tokenizers in the shapes of published ones, trained here with the package that defines the format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from pagoda.weights.hf_folder import read_hf_folder
from tests.engine.tokenizer_corpus import TEXTS

VOCAB_SIZE = 1100
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACES = "▁"


def corpus() -> list[str]:
    english = Path(__file__).parents[1] / "golden" / "english_text.txt"
    # Without what looks like a control token, or training would make pieces of them.
    return [*english.read_text().splitlines(), *(text for text in TEXTS if "<" not in text)]


def byte_level(split: str | None, normalizer: Any = None, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps: list[Any] = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def pieces(**model: Any) -> Tokenizer:
    """BPE over pieces with `▁` for spaces and byte fallback, `<unk>`, `<s>` and `</s>` first."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True, **model))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=specials, limit_alphabet=90, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    # Byte tokens are no special ones, which the trainer makes of them.
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = values["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(values))


def gpt2() -> Tokenizer:
    tokenizer = byte_level(None)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def llama3() -> Tokenizer:
    tokenizer = byte_level(LLAMA3, ignore_merges=True)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
            ),
        ]
    )
    return tokenizer


def qwen() -> Tokenizer:
    tokenizer = byte_level(LLAMA3.replace("{1,3}", ""), normalizers.NFC())
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def llama2() -> Tokenizer:
    tokenizer = pieces()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACES), normalizers.Replace(" ", SPACES)]
    )
    tokenizer.pre_tokenizer = None
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def llama2_first() -> Tokenizer:
    """As transformers writes it since `legacy=False`: a space before the text, none after special tokens."""
    tokenizer = pieces()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def phi3() -> Tokenizer:
    """Special tokens that take the white space after them along."""
    tokenizer = llama2()
    tokenizer.add_special_tokens(
        [AddedToken(text, rstrip=True, normalized=False) for text in ("<|user|>", "<|end|>")]
    )
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    return tokenizer


def gemma() -> Tokenizer:
    tokenizer = pieces()
    tokenizer.normalizer = normalizers.Replace(" ", SPACES)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_special_tokens(["<end_of_turn>"])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "<table>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "llama3": llama3,
    "qwen": qwen,
    "llama2": llama2,
    "llama2-first": llama2_first,
    "phi3": phi3,
    "gemma": gemma,
    "unigram": unigram,
}


@cache
def tokenizer_json(kind: str) -> str:
    text: str = KINDS[kind]().to_str()
    return text


def write_tokenizer_folder(folder: Path, tokenizer: str | Mapping[str, Any], **files: Any) -> Any:
    """The `HFFolder` of a folder with that tokenizer.json; `files` by name without `.json`, as objects."""
    folder.mkdir(exist_ok=True)
    text = tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer)
    (folder / "tokenizer.json").write_text(text)
    for name, content in {"config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_hf_folder(folder)
