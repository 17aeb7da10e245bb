"""Token ids to text while a request runs: bytes to characters, and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagoda.engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns token ids into text as they arrive; what it has returned never changes.

    The texts of all `push` calls and of `flush`, joined, are `tokenizer.decode` of all ids, however the ids
    are cut into calls. A character whose bytes are spread over tokens comes out with its last byte, so at
    most three bytes wait; bytes that cannot become a character come out as U+FFFD at once, one for each
    maximal subpart (The Unicode Standard, 3.9). The cost of a token does not depend on what came before.

    Args:
        tokenizer: Gives each token's bytes.
        skip_special_tokens: Whether control tokens leave no text.
        shown_special_token_ids: Control tokens that do nevertheless.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_special_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._shown_special_token_ids = frozenset(shown_special_token_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self._prefix_space_is_next = False

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is final once `token_ids` follow those of earlier calls."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        at_start, self._at_start = self._at_start, False
        if self._tokenizer.is_special(token_id):
            if at_start and token_id == self._tokenizer.bos_token_id:
                # Encoding put a space in front of the text that follows; it is not part of the text.
                self._prefix_space_is_next = self._tokenizer.has_space_prefix
            is_hidden = self._skip_special_tokens and token_id not in self._shown_special_token_ids
            return b"" if is_hidden else self._tokenizer.token_bytes(token_id)
        token_bytes = self._tokenizer.token_bytes(token_id)
        if self._prefix_space_is_next:
            self._prefix_space_is_next = False
            return token_bytes.removeprefix(b" ")
        return token_bytes


class StopChecker:
    """Ends a text at the first stop string and holds back only what may still become one.

    The hit is the stop string that is complete first, of those complete at the same character the longest,
    so the result does not depend on how the text is cut into calls. Text that stop strings do not apply to
    (before `min_tokens`, say) is simply not pushed: the search starts with the first text pushed.

    Args:
        stop: Stop strings, none empty.
        include_stop: Whether the text ends with the stop string or before it.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool) -> None:
        self._searches = [_PrefixSearch(text) for text in stop]
        self._include_stop = include_stop
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string once one is complete; text after it is lost."""
        if self._hit is not None or not self._searches:
            return ("" if self._hit is not None else text), self._hit
        pending = self._held + text
        for index in range(len(self._held), len(pending)):
            hits = [search.pattern for search in self._searches if search.advance(pending[index])]
            if hits:
                self._hit = max(hits, key=len)
                self._held = ""
                end = index + 1
                return pending[: end if self._include_stop else end - len(self._hit)], self._hit
        num_held = max(search.num_matched for search in self._searches)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held], None

    def flush(self) -> str:
        """What was held back, when generation ends without a stop string."""
        held, self._held = self._held, ""
        for search in self._searches:
            search.num_matched = 0
        return held


class _PrefixSearch:
    """Knuth-Morris-Pratt search; `num_matched` is the longest prefix of `pattern` that ends the text."""

    def __init__(self, pattern: str) -> None:
        if not pattern:
            raise ValueError("a stop string is empty")
        self.pattern = pattern
        self.num_matched = 0
        self._fallback = [0] * len(pattern)  # of each prefix, its longest proper suffix that is a prefix too
        matched = 0
        for index in range(1, len(pattern)):
            while matched and pattern[index] != pattern[matched]:
                matched = self._fallback[matched - 1]
            matched += pattern[index] == pattern[matched]
            self._fallback[index] = matched

    def advance(self, character: str) -> bool:
        """Take one more character; True when the pattern is complete."""
        while self.num_matched and character != self.pattern[self.num_matched]:
            self.num_matched = self._fallback[self.num_matched - 1]
        self.num_matched += character == self.pattern[self.num_matched]
        return self.num_matched == len(self.pattern)
