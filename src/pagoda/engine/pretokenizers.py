"""How byte-level vocabularies cut text into words before merging, by GGUF's `tokenizer.ggml.pre`.

A vocabulary's merges were learned on words cut in one particular way; cutting otherwise still round-trips
but gives other token ids than the model was trained on. So a name that is not in the table is refused.
The patterns are those of the models' published `tokenizer.json` files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagoda.errors import ModelFileError, UnsupportedError

if TYPE_CHECKING:
    from tokenizers import normalizers, pre_tokenizers

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """One way of cutting text. `split` None means GPT-2's own pattern, which `tokenizers` builds in."""

    split: str | None = None
    individual_digits: bool = False  # every numeric character is a word of its own
    nfc: bool = False  # text is composed (Unicode NFC) first
    ignore_merges: bool = False  # a word that is a token stays whole, whatever the merges say
    add_bos: bool = False  # when the file does not say: tokenizer.ggml.add_bos_token


_GPT2 = PreTokenizer()
_GPT2_DIGITS = PreTokenizer(individual_digits=True)
_LLAMA3_WHOLE = PreTokenizer(split=_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN2_NFC = PreTokenizer(split=_QWEN2, nfc=True)
_GPT4O_PLAIN = PreTokenizer(split=_GPT4O)

_BY_NAME: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "roberta-bpe": _GPT2,
    "olmo": PreTokenizer(nfc=True),
    "mpt": PreTokenizer(nfc=True),
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "codeshell": _GPT2_DIGITS,
    "command-r": PreTokenizer(individual_digits=True, nfc=True),
    "llama-bpe": _LLAMA3_WHOLE,
    "llama3": _LLAMA3_WHOLE,
    "llama-v3": _LLAMA3_WHOLE,
    "falcon3": _LLAMA3_WHOLE,
    "dbrx": PreTokenizer(split=_LLAMA3),
    "smaug-bpe": PreTokenizer(split=_LLAMA3),
    "qwen2": _QWEN2_NFC,
    "deepseek-r1-qwen": _QWEN2_NFC,
    "tekken": PreTokenizer(split=_TEKKEN, ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O_PLAIN,
    "llama4": PreTokenizer(split=_GPT4O, ignore_merges=True, add_bos=True),
}


def find_pre_tokenizer(name: object) -> PreTokenizer:
    """The pre-tokenizer that `tokenizer.ggml.pre` names.

    Raises:
        ModelFileError: the file has something else in place of a name.
        UnsupportedError: the file names none, or one that is not in the table.
    """
    if name is not None and not isinstance(name, str):
        raise ModelFileError(f"tokenizer.ggml.pre is {name!r:.80}; it must be text")
    if name is None or name == "default":
        raise UnsupportedError(
            "the model file does not say how its vocabulary splits text (tokenizer.ggml.pre)",
            hint="convert the model again with a current converter",
        )
    found = _BY_NAME.get(name)
    if found is None:
        raise UnsupportedError(
            f"the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported",
            hint="supported: " + ", ".join(sorted(_BY_NAME)),
        )
    return found


def build_pre_tokenizer(spec: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """`spec` as a `tokenizers` object: words in the byte alphabet of byte-level BPE."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[pre_tokenizers.PreTokenizer] = []
    if spec.individual_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if spec.split is not None:
        steps.append(pre_tokenizers.Split(Regex(spec.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=spec.split is None))
    return pre_tokenizers.Sequence(steps)


def build_normalizer(spec: PreTokenizer) -> normalizers.Normalizer | None:
    """The `tokenizers` normalizer of `spec`, None when text is taken as it comes."""
    from tokenizers import normalizers

    return normalizers.NFC() if spec.nfc else None
