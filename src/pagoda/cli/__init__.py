"""The command `pagoda`. Commands import what they need when they run, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pagoda.cli import arguments, bench, info, pull, run, serve, terminal

COMMANDS = (serve, run, pull, bench, info)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 success, 1 a deliberate error (one `pagoda: error:` line on stderr, and a hint), 2 wrong usage,
    130 stopped by Ctrl-C. `PAGODA_DEBUG=1` lets errors through with their tracebacks.
    """
    try:
        chosen = arguments.parse(COMMANDS, sys.argv[1:] if argv is None else argv)
        code: int = chosen.execute(chosen)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a reader who has gone is no error
        return code
    except SystemExit as end:  # argparse, after --help or wrong usage
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone; python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("PAGODA_DEBUG") == "1":
            raise
        terminal.print_error(error)
        return 1
