"""Byte-level BPE: `tokenizer.ggml.model` "gpt2", through the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagoda.engine.pretokenizers import PreTokenizer, build_normalizer, build_pre_tokenizer
from pagoda.errors import ModelFileError


class ByteLevelEncoder:
    """Encodes text that holds no token to be matched whole.

    Args:
        token_ids: Every token's text, in the byte alphabet, and its id.
        merges: "left right", best first.
        pre_tokenizer: How text is cut into words.

    Raises:
        ModelFileError: a merge is malformed, or names what is no token.
    """

    def __init__(
        self, token_ids: Mapping[str, int], merges: Sequence[str], pre_tokenizer: PreTokenizer
    ) -> None:
        from tokenizers import Tokenizer, models

        pairs = [tuple(merge.split(" ")) for merge in merges]
        try:
            model = models.BPE(dict(token_ids), pairs, ignore_merges=pre_tokenizer.ignore_merges)  # type: ignore[arg-type]
        except Exception as error:  # the package raises plain Exception
            raise ModelFileError(f"tokenizer.ggml.merges do not fit the vocabulary: {error}") from None
        self._backend = Tokenizer(model)
        self._backend.pre_tokenizer = build_pre_tokenizer(pre_tokenizer)
        normalizer = build_normalizer(pre_tokenizer)
        if normalizer is not None:
            self._backend.normalizer = normalizer

    def encode(self, text: str, *, is_start: bool = True) -> list[int]:
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return token_ids
