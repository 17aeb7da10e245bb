"""How a transfer goes, on stderr: a bar on a terminal, a line now and then elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_INTERVAL_S = 2.0


@contextmanager
def show_progress(label: str, total_bytes: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of bytes there are so far."""
    if not enabled:
        yield lambda num_bytes: None
    elif sys.stderr.isatty():
        with _bar(label, total_bytes) as report:
            yield report
    else:
        yield _lines(label, total_bytes)


def note(message: str, *, enabled: bool) -> None:
    """One line about what is going on, beside the progress."""
    if enabled:
        print(f"pagoda: {message}", file=sys.stderr, flush=True)


def format_bytes(num_bytes: float) -> str:
    """In decimal units, as download sizes are given: 98.4 MB."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


@contextmanager
def _bar(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda num_bytes: bar.update(task, completed=num_bytes)


def _lines(label: str, total_bytes: int) -> Callable[[int], None]:
    next_line_s = 0.0
    last_share = -1

    def report(num_bytes: int) -> None:
        nonlocal next_line_s, last_share
        share = 100 * num_bytes // max(1, total_bytes)
        if share != last_share and time.monotonic() >= next_line_s:
            next_line_s = time.monotonic() + LINE_INTERVAL_S
            last_share = share
            note(f"{label}: {share} % of {format_bytes(total_bytes)}", enabled=True)

    return report
