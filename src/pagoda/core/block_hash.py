"""Names of cached blocks: a chain of strong hashes over all that their keys and values depend on.

A name is the same in every process, so that caches outside this one can use it as a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

HASH_BYTES = 32
TOKEN_BYTES = 4  # token ids are hashed and compared as native int32


class ExtraKey(NamedTuple):
    """Something other than tokens that a block depends on; `kind` keeps equal values of two kinds apart."""

    kind: str
    value: bytes


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Prompt positions [start, end) that stand for attached content, whose token ids are placeholders.

    `digest` identifies the content. Without one nothing at or after the span is ever reused.
    """

    start: int
    end: int
    digest: bytes | None


def encode_extra_keys(keys: Iterable[ExtraKey]) -> bytes:
    """Unambiguous bytes: lengths go first, so no two lists of keys look alike."""
    return b"".join(
        len(part).to_bytes(8, "little") + part for key in keys for part in (key.kind.encode(), key.value)
    )


def content_keys(spans: Sequence[ContentSpan], start: int, end: int) -> bytes:
    """Encoded keys of the content that overlaps the block of positions [start, end).

    A block in the middle of a span depends on where in the content it lies, hence the offset.
    """
    return encode_extra_keys(
        ExtraKey("content", (span.start - start).to_bytes(8, "little", signed=True) + (span.digest or b""))
        for span in spans
        if span.start < end and span.end > start
    )


def root_hash(namespace: str, block_size: int, extra: bytes) -> bytes:
    """Where a chain starts. `namespace` stands for weights and KV type, `extra` for salt and adapter."""
    keys = [ExtraKey("namespace", namespace.encode()), ExtraKey("block_size", str(block_size).encode())]
    return blake2b(encode_extra_keys(keys) + extra, digest_size=HASH_BYTES, person=b"pagoda-kv-1").digest()


def hash_block(parent: bytes, token_bytes: bytes, extra: bytes = b"") -> bytes:
    """Hash of a full block. Parent and tokens have fixed lengths, so the three parts cannot be confused."""
    return blake2b(parent + token_bytes + extra, digest_size=HASH_BYTES).digest()
