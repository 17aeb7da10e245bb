"""What a person sees and types: styles, safe output of model text, multi-line input, Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from pagoda.errors import PagodaError

BLOCK_QUOTES = '"""'


def printable(text: str) -> str:
    """One line; line ends and control characters of foreign text, escape sequences too, become visible."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def colour_wanted(stream: TextIO) -> bool:
    """Whether to style: a terminal that is not dumb, and NO_COLOR (no-color.org) unset or empty."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    return f"\033[2m{text}\033[0m" if colour_wanted(stream) else text


def tell(text: str) -> None:
    """One line for the person on stderr, so that stdout carries answers only."""
    print(dim(printable(text), sys.stderr), file=sys.stderr, flush=True)


def print_error(error: Exception) -> None:
    """`pagoda: error: ...` and `hint: ...` on stderr, one line each."""
    if isinstance(error, PagodaError):
        message, hint = error.message, error.hint
    elif isinstance(error, MemoryError):
        message, hint = "out of memory", "`pagoda info` says what this process may use"
    else:
        message = f"{type(error).__name__}: {error}"
        hint = "this is a bug in pagoda; PAGODA_DEBUG=1 shows where"
    print(f"pagoda: error: {printable(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {printable(hint)}", file=sys.stderr, flush=True)


def write_answer(text: str) -> None:
    """Model text to stdout at once. A terminal gets no control characters: they could reprogram it."""
    if sys.stdout.isatty():
        text = "".join(c for c in text if c in "\n\t" or not _is_control(c))
    sys.stdout.write(text)
    sys.stdout.flush()


def _is_control(character: str) -> bool:
    return character < " " or "\x7f" <= character <= "\x9f"


def accept_any_text() -> None:
    """Make stdout write what its encoding lacks as `?`, and stdin read bytes that are not text as U+FFFD."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def read_message(prompt: str = ">>> ", continuation: str = "... ") -> str:
    """What the person types: one line; more after a trailing backslash, or all between lines of `\"\"\"`.

    Raises:
        EOFError: the input has ended and there is nothing.
        KeyboardInterrupt: Ctrl-C; what was typed is gone.
    """
    line = _input(prompt)
    if line.startswith(BLOCK_QUOTES):
        return _read_block(line.removeprefix(BLOCK_QUOTES), continuation)
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = _input(continuation)
    return "\n".join([*lines, line])


def _read_block(first: str, continuation: str) -> str:
    lines = [first] if first else []
    while not (lines and lines[-1].endswith(BLOCK_QUOTES)):
        lines.append(_input(continuation))
    lines[-1] = lines[-1].removesuffix(BLOCK_QUOTES)
    return "\n".join(lines).strip("\n")


def _input(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # stdout carries answers only
    return input()


def enable_line_editing() -> None:
    """Cursor keys, history within the session and pasting of many lines, where readline is there."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into a flag, so that it cannot cut a step in two; yields a function that reads it.

    A second Ctrl-C ends the program, should a step take too long.
    """
    num_seen = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen > 1:
            raise SystemExit(130)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: num_seen > 0
    finally:
        signal.signal(signal.SIGINT, previous)
