"""Tokenizers of Hugging Face folders: `tokenizer.json`, and what the files beside it say.

How text is cut and merged is left to the `tokenizers` package, which defines the format. Tokens matched
whole, ends of answers and chat templates are treated as those of GGUF files are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagoda.engine.added_tokens import AddedTokens
from pagoda.engine.hf_encoder import HFEncoder
from pagoda.engine.token_bytes import TokenBytes, parse_byte_token
from pagoda.engine.tokenizer import Tokenizer
from pagoda.engine.tokenizer_json import TokenizerJSON, wrong
from pagoda.engine.vocabulary import TokenType, Vocabulary, make_vocabulary
from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.weights.hf_folder import TOKENIZER_FILE, HFFolder
from pagoda.weights.json_file import parse_json

if TYPE_CHECKING:
    from pagoda.weights.checkpoint import Checkpoint

_MAX_UNUSED_IDS = 1 << 17  # between ids that are tokens
# Classes of transformers that put BOS first unless told otherwise, whatever tokenizer.json says.
_CLASSES_WITH_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of an open model, from wherever its files have it.

    Raises:
        ModelFileError: the tokenizer's files are missing, or contradict themselves.
        UnsupportedError: a kind of tokenizer that is not implemented.
    """
    if checkpoint.folder is None:
        return Tokenizer.from_gguf(checkpoint.metadata)
    return hf_tokenizer(checkpoint.folder, checkpoint.config.vocab_size)


def hf_tokenizer(folder: HFFolder, vocab_size: int) -> Tokenizer:
    """The tokenizer of a folder whose model has `vocab_size` tokens; tokens past those are left out.

    Raises:
        ModelFileError: tokenizer.json is missing, or contradicts itself or the model.
        UnsupportedError: a model of tokenizers other than BPE and Unigram, or a template of special tokens
            that is more than BOS and EOS.
    """
    raw, file = folder.read_tokenizer(), str(folder.path / TOKENIZER_FILE)
    content = TokenizerJSON(parse_json(raw, file), vocab_size)
    byte_level = content.is_byte_level()
    vocabulary = _vocabulary(folder, content, vocab_size)
    adds_bos, adds_eos = _adds_special(folder.tokenizer_config, content, vocabulary)
    added = list(content.added_tokens())
    strips: dict[str, list[str]] = {
        "strips_left": [token.text for token in added if token.strips_left],
        "strips_right": [token.text for token in added if token.strips_right],
    }
    user_defined = {vocabulary.texts[i]: i for i in vocabulary.user_defined_ids}
    control = {vocabulary.texts[i]: i for i in vocabulary.control_ids}
    templates = folder.chat_templates
    return Tokenizer(
        vocabulary,
        HFEncoder(raw if content.is_unchanged else None, content.values, control, file),
        TokenBytes(vocabulary, byte_level=byte_level),
        (AddedTokens(user_defined, **strips), AddedTokens({**user_defined, **control}, **strips)),
        add_bos=adds_bos,
        add_eos=adds_eos,
        has_space_prefix=content.has_space_prefix(),
        chat_templates=templates if len(templates) != 1 else {"default": next(iter(templates.values()))},
    )


def _vocabulary(folder: HFFolder, content: TokenizerJSON, vocab_size: int) -> Vocabulary:
    by_id = content.vocabulary()
    added = {token.id: token for token in content.added_tokens()}
    by_id |= {index: token.text for index, token in added.items()}
    if not by_id:
        raise wrong("the vocabulary is empty")
    if min(by_id) < 0 or max(by_id) >= len(by_id) + _MAX_UNUSED_IDS:
        raise wrong(f"token ids run from {min(by_id)} to {max(by_id)}, there are {len(by_id)} tokens")
    num_tokens = max(by_id) + 1
    if num_tokens > vocab_size:
        raise ModelFileError(
            f"{folder.path}: {TOKENIZER_FILE} has ids up to {num_tokens - 1}, the model {vocab_size} tokens",
            hint="the files belong to different models; fetch them again",
        )
    texts = [by_id.get(index, "") for index in range(num_tokens)]
    unknown = _unknown_id(content, by_id)
    types = [int(TokenType.NORMAL) if text else int(TokenType.UNUSED) for text in texts]
    if content.model.get("byte_fallback"):
        for index, text in by_id.items():
            if parse_byte_token(text) is not None:
                types[index] = int(TokenType.BYTE)
    if unknown is not None:
        types[unknown] = int(TokenType.UNKNOWN)
    for index, token in added.items():
        if index != unknown:
            types[index] = int(TokenType.CONTROL if token.is_special else TokenType.USER_DEFINED)
    named = {
        "bos": _named_token(folder, "bos", by_id, content.special_template()[0]),
        "eos": _named_token(folder, "eos", by_id, content.special_template()[1]),
        "unknown": unknown,
    }
    ends = [index for index in folder.end_token_ids() if index < num_tokens]
    return make_vocabulary(texts, types, named, ends)


def _unknown_id(content: TokenizerJSON, by_id: Mapping[int, str]) -> int | None:
    if content.kind == "Unigram":
        index = content.model.get("unk_id")
        if type(index) is not int or index not in by_id:
            raise wrong(f"'unk_id' is {index!r:.80}; a Unigram model cannot do without one of its tokens")
        return index
    text = content.model.get("unk_token")
    return next((index for index, found in by_id.items() if found == text), None) if text else None


def _named_token(folder: HFFolder, name: str, by_id: Mapping[int, str], template: list[str]) -> int | None:
    """BOS or EOS: the text that tokenizer_config.json gives it, else that of the template of special tokens,
    else the id of the configurations.
    """
    value = folder.tokenizer_config.get(f"{name}_token")
    texts = [value.get("content") if isinstance(value, dict) else value, *template[:1]]
    for text in texts:
        found = [index for index, known in by_id.items() if known == text]
        if found:
            return found[-1]
    for values in (folder.generation_config, folder.config):
        index = values.get(f"{name}_token_id")
        if isinstance(index, list):
            index = index[0] if index else None
        if type(index) is int and index in by_id:
            return index
    return None


def _adds_special(
    tokenizer_config: Mapping[str, Any], content: TokenizerJSON, vocabulary: Vocabulary
) -> tuple[bool, bool]:
    """Whether texts get BOS before and EOS after them."""
    before, after = content.special_template()
    bos, eos = (
        "" if index is None else vocabulary.texts[index]
        for index in (vocabulary.bos_token_id, vocabulary.eos_token_id)
    )
    if before not in ([], [bos]) or after not in ([], [eos]):
        puts = " and ".join(
            f"{' '.join(texts)!r:.80} {where}"
            for texts, where in ((before, "before"), (after, "after"))
            if texts
        )
        raise UnsupportedError(
            f"{TOKENIZER_FILE} puts {puts} a text",
            hint=f"only the model's BOS ({bos!r}) and EOS ({eos!r}) can be added",
        )
    kind = str(tokenizer_config.get("tokenizer_class", "")).removesuffix("Fast")
    adds_bos = tokenizer_config.get("add_bos_token", True if kind in _CLASSES_WITH_BOS else bool(before))
    adds_eos = tokenizer_config.get("add_eos_token", bool(after))
    return bool(adds_bos), bool(adds_eos)
