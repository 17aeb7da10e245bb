"""The bytes that a token stands for."""

from __future__ import annotations

from pagoda.engine.spm import SPACE_SYMBOL
from pagoda.engine.vocabulary import TokenType, Vocabulary


class TokenBytes:
    """Token id to bytes, worked out on first use."""

    def __init__(self, vocabulary: Vocabulary, *, byte_level: bool) -> None:
        self._vocabulary = vocabulary
        self._byte_by_symbol = (
            {symbol: byte for byte, symbol in enumerate(byte_alphabet())} if byte_level else {}
        )
        self._known: list[bytes | None] = [None] * len(vocabulary.texts)

    def __getitem__(self, token_id: int) -> bytes:
        if token_id < 0:
            raise IndexError(f"there is no token {token_id}")
        if token_id >= len(self._known):
            return b""
        known = self._known[token_id]
        if known is None:
            known = self._known[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        text, kind = self._vocabulary.texts[token_id], self._vocabulary.types[token_id]
        if token_id in self._vocabulary.control_ids:
            return text.encode()
        if kind == TokenType.BYTE:
            byte = parse_byte_token(text)
            return text.encode() if byte is None else bytes([byte])
        if not self._byte_by_symbol:
            return text.replace(SPACE_SYMBOL, " ").encode()
        if kind == TokenType.USER_DEFINED:
            return text.encode()
        try:
            return bytes(self._byte_by_symbol[symbol] for symbol in text)
        except KeyError:  # not in the byte alphabet: the file spells this token as plain text
            return text.encode()


def byte_alphabet() -> list[str]:
    """The characters that stand for bytes in byte-level BPE: themselves if they print, else from U+0100 on.

    Source: Radford et al. 2019, GPT-2.
    """
    symbols = []
    num_replaced = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(0x100 + num_replaced))
            num_replaced += 1
    return symbols


def parse_byte_token(text: str) -> int | None:
    """The value of a byte token, spelled `<0x0A>`."""
    if len(text) != 6 or not text.startswith("<0x") or not text.endswith(">"):
        return None
    try:
        return int(text[3:5], 16)
    except ValueError:
        return None
