"""A program in a pseudo-terminal of its own, typed at and read like a person would."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Gives the new session its controlling terminal, so that Ctrl-C there reaches the program.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class PseudoTerminal:
    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self._process = process
        self._master = master
        self.shown = ""  # all that has appeared so far
        self._num_read = 0  # characters of `shown` that `expect` has gone past

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """Wait until `pattern` appears after what was expected last; returns the match."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            if found := re.search(pattern, self.shown[self._num_read :]):
                self._num_read += found.end()
                return found
            if not self._read(give_up_s - time.monotonic()):
                raise AssertionError(f"{pattern!r} did not appear in {self.shown[self._num_read :]!r}")

    def wait(self, timeout_s: float = 60.0) -> int:
        give_up_s = time.monotonic() + timeout_s
        while self._read(give_up_s - time.monotonic()):
            pass
        return self._process.wait(timeout=1)

    def _read(self, timeout_s: float) -> bool:
        """Take in what has come; False at the end of the program or of the time."""
        if not select.select([self._master], [], [], max(0.0, timeout_s))[0]:
            return False
        try:
            content = os.read(self._master, 65536)
        except OSError:  # how Linux says that nobody has the other side open
            return False
        self.shown += content.decode(errors="replace")
        return bool(content)


@contextmanager
def pseudo_terminal(*arguments: str, **environment: str) -> Iterator[PseudoTerminal]:
    """Run `python ARGUMENTS` with a terminal as its standard streams."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _TAKE_TERMINAL, sys.executable, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", **environment},
    )
    os.close(slave)
    try:
        yield PseudoTerminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
