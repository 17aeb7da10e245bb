"""Token ids of Hugging Face transformers and of sentencepiece for tests/engine.

    python tests/golden/make_tokenizer_golden.py [--check] [NAME ...]

Writes tests/golden/tokenizer/NAME.json, all of them without NAME; with --check compares them with what is
there and fails when they differ. Needs transformers, gguf and sentencepiece (extra `golden`) and the files of
the real models. The texts and chats are those of tests/engine/tokenizer_corpus.py.

transformers builds a tokenizer from a GGUF file, but not always the model's own: the file only names the way
text is cut, and transformers does not know every name. What it leaves out is put back, as published in the
models' tokenizer.json:

- smollm2: transformers cuts as GPT-2 does. The model's pre-tokenizer also makes every numeric character a
  word of its own: Sequence[Digits(individual_digits), ByteLevel].
- qwen2.5: transformers leaves out the NFC normalizer, which its own Qwen2Tokenizer class has.
- gemma3: taken as it is. transformers merges runs of spaces by rank, sentencepiece takes the longest piece
  first; they differ beyond 31 spaces, where pagoda follows sentencepiece, and the corpus does not go there.

`llama` and `llama-user-defined` are small sentencepiece vocabularies trained here, as llama 2 files have: a
space before the text, byte fallback, scores. Their ids are sentencepiece's; for `llama`, transformers with
the normalizer of llama 2's tokenizer.json (Prepend, Replace) has to agree.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import generate_merges

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.engine.tokenizer_corpus import CHATS, PLAIN_TEMPLATE, TEXTS, TOOL_CHATS  # noqa: E402

GOLDEN = Path(__file__).parent / "tokenizer"
REAL_MODELS = {
    "smollm2": "smollm2-135m-instruct-q4_1.gguf",
    "qwen2.5": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "gemma3": "gemma-3-270m-q4_k_m.gguf",
}
LLAMA_USER_DEFINED = {"llama": [], "llama-user-defined": ["▁▁", "▁▁▁▁", "<b>", "</b>", "\n"]}
CONTROL_TEXTS = ("<unk>", "<s>", "</s>")


def real_model_tokenizer(name: str) -> PreTrainedTokenizerBase:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("PAGODA_TEST_MODELS") or cache / "pagoda-test-models")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=REAL_MODELS[name])
    backend: Tokenizer = tokenizer.backend_tokenizer
    if name == "smollm2":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if name == "qwen2.5":
        backend.normalizer = normalizers.NFC()
    return tokenizer


def real_model_golden(name: str) -> dict[str, Any]:
    tokenizer = real_model_tokenizer(name)
    template = tokenizer.chat_template or PLAIN_TEMPLATE
    chats = {**CHATS, **(TOOL_CHATS if "tools" in template else {})}
    rendered = {}
    for chat_name, options in chats.items():
        messages = options["messages"]
        others = {**options, "chat_template": template}
        del others["messages"]
        text = tokenizer.apply_chat_template(messages, **others, tokenize=False)
        token_ids = tokenizer.apply_chat_template(messages, **others, return_dict=False)
        rendered[chat_name] = {"text": text, "token_ids": token_ids}
    return {
        "texts": [{"text": text, "token_ids": tokenizer(text)["input_ids"]} for text in TEXTS],
        "chats": rendered,
    }


def train_llama(user_defined: list[str]) -> sentencepiece.SentencePieceProcessor:
    sentences = (Path(__file__).parent / "english_text.txt").read_text().splitlines() + list(TEXTS)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentence for sentence in sentences if sentence.strip()),
        model_writer=model,
        model_type="bpe",
        vocab_size=640,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=user_defined,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def llama_metadata(
    processor: sentencepiece.SentencePieceProcessor, user_defined: list[str]
) -> dict[str, Any]:
    """The vocabulary as converters write it to GGUF: user-defined pieces are spelled with real spaces."""
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    kinds = [
        6 if processor.is_byte(i) else 2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 1
        for i in range(len(pieces))
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [p.replace("▁", " ") if p in user_defined else p for p in pieces],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [
            4 if piece in user_defined else kind for piece, kind in zip(pieces, kinds, strict=True)
        ],
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
    }


def llama_golden(name: str) -> dict[str, Any]:
    user_defined = LLAMA_USER_DEFINED[name]
    processor = train_llama(user_defined)
    metadata = llama_metadata(processor, user_defined)
    # sentencepiece itself never reads control tokens from text.
    texts = [text for text in TEXTS if text and not any(control in text for control in CONTROL_TEXTS)]
    golden = [{"text": text, "token_ids": [processor.bos_id(), *processor.encode(text)]} for text in texts]
    if not user_defined:
        tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
        vocab = {token: index for index, token in enumerate(tokens)}
        merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)), skip_tokens=CONTROL_TEXTS)
        tokenizer = LlamaTokenizer(vocab=vocab, merges=merges)
        tokenizer.backend_tokenizer.pre_tokenizer = None
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        for entry in golden:
            if tokenizer.encode(entry["text"], add_special_tokens=False) != entry["token_ids"][1:]:
                raise SystemExit(f"{name}: transformers and sentencepiece disagree on {entry['text']!r}")
    return {"metadata": metadata, "texts": golden}


def to_json(golden: dict[str, Any]) -> str:
    """One line a text, chat or metadata entry, so that a change is readable."""

    def lines(value: Any, depth: int) -> str:
        pad = "\n" + " " * depth
        if depth < 2 and isinstance(value, dict):
            entries = [f"{json.dumps(k, ensure_ascii=True)}: {lines(v, depth + 1)}" for k, v in value.items()]
            return "{" + pad + f",{pad}".join(entries) + pad[:-1] + "}"
        if depth < 2 and isinstance(value, list):
            return "[" + pad + f",{pad}".join(lines(item, depth + 1) for item in value) + pad[:-1] + "]"
        return json.dumps(value, ensure_ascii=True)

    return lines(golden, 0) + "\n"


def write_or_check(name: str, text: str, *, check: bool) -> bool:
    path = GOLDEN / f"{name}.json"
    if not check:
        path.write_text(text)
        print(f"{path.name}: written, {len(text)} bytes")
        return True
    same = path.exists() and path.read_text() == text
    print(f"{path.name}: {'same' if same else 'DIFFERS' if path.exists() else 'MISSING'}")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="which files; default: all")
    parser.add_argument("--check", action="store_true", help="compare with the stored files, do not write")
    args = parser.parse_args()
    makers = dict.fromkeys(REAL_MODELS, real_model_golden) | dict.fromkeys(LLAMA_USER_DEFINED, llama_golden)
    unknown = set(args.names) - set(makers)
    if unknown:
        parser.error(f"no golden file is called {sorted(unknown)}; there are {sorted(makers)}")
    ok = True
    for name in args.names or makers:
        ok &= write_or_check(name, to_json(makers[name](name)), check=args.check)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
