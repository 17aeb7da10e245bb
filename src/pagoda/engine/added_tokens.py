"""Finding the tokens that are matched on text before any merging: control and user-defined tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping


class AddedTokens:
    """A set of token texts, found in other text leftmost first and longest first.

    A vocabulary may have thousands of them (gemma has 6400), and text is full of characters that could
    start one, so candidates are filtered by first character, then by their first two.
    """

    def __init__(
        self,
        id_by_text: Mapping[str, int],
        *,
        strips_left: Collection[str] = (),
        strips_right: Collection[str] = (),
    ) -> None:
        """White space before tokens of `strips_left` and after those of `strips_right` is part of a match."""
        self._strips_left, self._strips_right = frozenset(strips_left), frozenset(strips_right)
        self._id_by_text = {text: token_id for text, token_id in id_by_text.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._id_by_text:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths_by_head = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        first_characters = {text[0] for text in self._id_by_text}
        pattern = "[" + "".join(map(re.escape, sorted(first_characters))) + "]"
        self._first_character = re.compile(pattern) if first_characters else None

    def __len__(self) -> int:
        return len(self._id_by_text)

    def split(self, text: str, *, untrusted_mark: str = "") -> Iterator[str | int]:
        """`text` cut into token ids and the non-empty plain stretches between them.

        A match of one character that `untrusted_mark` follows is plain text (see `mark`).
        """
        plain_start = 0
        for start, length in self._matches(text):
            if start < plain_start:
                continue
            end = start + length
            if untrusted_mark and length == 1 and text.startswith(untrusted_mark, end):
                continue
            token = text[start:end]
            plain = text[plain_start:start]
            if token in self._strips_left:
                plain = plain.rstrip()
            if plain:
                yield plain
            yield self._id_by_text[token]
            plain_start = end
            if token in self._strips_right:
                plain_start = len(text) - len(text[end:].lstrip())
        if plain_start < len(text):
            yield text[plain_start:]

    def mark(self, text: str, untrusted_mark: str) -> str:
        """`text` with `untrusted_mark` after the first character of each token text, so that none is left.

        Overlapping ones are marked too: breaking the first must not leave the second whole.
        """
        pieces = []
        done = 0
        for start, _ in self._matches(text):
            pieces += [text[done : start + 1], untrusted_mark]
            done = start + 1
        return "".join([*pieces, text[done:]]) if pieces else text

    def _matches(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, length) of the longest token at each position where one starts, overlaps included."""
        if self._first_character is None:
            return
        for candidate in self._first_character.finditer(text):
            start = candidate.start()
            head = text[start : start + 2]
            for length in self._lengths_by_head.get(head, ()):
                if text[start : start + length] in self._id_by_text:
                    yield start, length
                    break
            else:
                if head[0] in self._id_by_text:
                    yield start, 1
