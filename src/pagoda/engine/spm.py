"""SentencePiece-style BPE with byte fallback: `tokenizer.ggml.model` "llama" (llama 1 and 2, mistral, gemma).

A piece has a score instead of a list of merges: two neighbours merge when their concatenation is a piece,
best score first (Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226). This module merges by score
directly. Turning scores into an explicit merge list first, as converters to other formats do, costs seconds
for a vocabulary of 262k pieces; the order of merges here is the order such a list has.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from pagoda.engine.added_tokens import AddedTokens

SPACE_SYMBOL = "\u2581"  # stands for a space in pieces
_MAX_CACHED_WORDS = 1 << 16
_MAX_CACHED_WORD_CHARS = 64


class SpmEncoder:
    """Encodes text that holds no control tokens.

    Args:
        piece_ids: The ordinary pieces, spelled with `SPACE_SYMBOL`, and their ids.
        scores: The score of every id.
        byte_ids: Byte value to token id; bytes may be missing.
        user_defined: Pieces matched whole before anything is merged.
        unknown_id: Stands for a character that is no piece and whose bytes are not all tokens; None drops it.
        space_prefix: Whether each stretch of text starts with a space of its own.
    """

    def __init__(
        self,
        piece_ids: Mapping[str, int],
        scores: Sequence[float],
        byte_ids: Mapping[int, int],
        user_defined: AddedTokens,
        *,
        unknown_id: int | None,
        space_prefix: bool,
    ) -> None:
        self._piece_ids = piece_ids
        self._scores = scores
        self._byte_ids = byte_ids
        self._user_defined = user_defined
        self._unknown_id = unknown_id
        self._space_prefix = space_prefix
        self._word_boundary = _word_boundary(piece_ids)
        self._cached_words: dict[str, list[int]] = {}

    def encode(self, text: str, *, is_start: bool = True) -> list[int]:
        if not text:
            return []
        if self._space_prefix:
            text = " " + text
        token_ids: list[int] = []
        for part in self._user_defined.split(text.replace(" ", SPACE_SYMBOL)):
            if isinstance(part, int):
                token_ids.append(part)
            else:
                for word in self._word_boundary.split(part):
                    token_ids += self._encode_word(word)
        return token_ids

    def _encode_word(self, word: str) -> list[int]:
        cached = self._cached_words.get(word)
        if cached is not None:
            return cached
        token_ids = self._ids_of_symbols(self._merge(word))
        if len(word) <= _MAX_CACHED_WORD_CHARS:
            if len(self._cached_words) >= _MAX_CACHED_WORDS:
                self._cached_words.clear()
            self._cached_words[word] = token_ids
        return token_ids

    def _merge(self, word: str) -> list[str]:
        """Merge the characters of `word`: best score first, then the longer left half, then leftmost.

        A heap holds every pair of neighbours that may merge; pairs that a later merge made stale are
        recognised when they come up. O(n log n) in the length of the word.
        """
        piece_ids, scores = self._piece_ids, self._scores
        symbols = list(word)
        following = list(range(1, len(symbols) + 1))  # index of the next live symbol
        preceding = list(range(-1, len(symbols) - 1))
        heap: list[tuple[float, int, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            left_symbol, right_symbol = symbols[left], symbols[right]
            merged_id = piece_ids.get(left_symbol + right_symbol)
            if merged_id is not None and left_symbol in piece_ids and right_symbol in piece_ids:
                order = (-scores[merged_id], -len(left_symbol), -len(right_symbol), left, right)
                heapq.heappush(heap, order)

        for index in range(len(symbols) - 1):
            offer(index, index + 1)
        while heap:
            _, minus_left_length, minus_right_length, left, right = heapq.heappop(heap)
            # A merged-away symbol is empty, so both lengths still match only where nothing has changed.
            if len(symbols[left]) != -minus_left_length or len(symbols[right]) != -minus_right_length:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after = following[right]
            following[left] = after
            if after < len(symbols):
                preceding[after] = left
                offer(left, after)
            if preceding[left] >= 0:
                offer(preceding[left], left)
        return [symbol for symbol in symbols if symbol]

    def _ids_of_symbols(self, symbols: list[str]) -> list[int]:
        token_ids: list[int] = []
        after_unknown = False
        for symbol in symbols:
            piece_id = self._piece_ids.get(symbol)
            if piece_id is not None:
                token_ids.append(piece_id)
                after_unknown = False
                continue
            byte_ids = [self._byte_ids.get(byte) for byte in symbol.encode()]
            present = [byte_id for byte_id in byte_ids if byte_id is not None]
            if len(present) == len(byte_ids):
                token_ids += present
                after_unknown = False
            elif self._unknown_id is not None and not after_unknown:
                token_ids.append(self._unknown_id)  # one for a whole run of unknown characters
                after_unknown = True
        return token_ids


def _word_boundary(piece_ids: Mapping[str, int]) -> re.Pattern[str]:
    """Where a cut does not change the ids: before a space, unless some piece goes on across such a space.

    Gemma, for one, has the piece ">▁</", so its text is not cut between ">" and a space.
    """
    before_space = {SPACE_SYMBOL}
    for piece in piece_ids:
        if piece.rfind(SPACE_SYMBOL) > 0:
            before_space.update(a for a, b in pairwise(piece) if b == SPACE_SYMBOL)
    no_cut_after = "".join(map(re.escape, sorted(before_space)))
    return re.compile(f"(?<=[^{no_cut_after}])(?={SPACE_SYMBOL})")
