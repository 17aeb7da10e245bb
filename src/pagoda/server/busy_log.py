"""One line every ten seconds while requests are answered."""

from __future__ import annotations

import asyncio
import logging

from pagoda.server.metrics import ServerMetrics
from pagoda.server.state import ServerState

log = logging.getLogger("pagoda.server")
INTERVAL_S = 10.0


async def log_while_busy(state: ServerState, interval_s: float = INTERVAL_S) -> None:
    metrics = state.metrics
    before = _counts(metrics)
    while True:
        await asyncio.sleep(interval_s)
        now = _counts(metrics)
        if now != before or state.active:
            log.info(busy_line(metrics, [b - a for a, b in zip(before, now, strict=True)], interval_s))
        before = now


def busy_line(metrics: ServerMetrics, increases: list[float], interval_s: float) -> str:
    num_prefilled, num_generated, num_queried, num_hits, num_preemptions = increases
    engine = metrics.read_engine()
    usage = max((u.num_held / (u.num_held + u.num_reusable + u.num_free) for u in engine.usage), default=0.0)
    hit_share = num_hits / num_queried if num_queried else 0.0
    return (
        f"running {engine.num_running}, waiting {engine.num_waiting} | "
        f"prefill {num_prefilled / interval_s:.0f} tok/s, decode {num_generated / interval_s:.0f} tok/s | "
        f"KV used {usage:.0%} | prefix hits {hit_share:.0%} | preempted {num_preemptions:.0f}"
    )


def _counts(metrics: ServerMetrics) -> list[float]:
    num_prefilled = max(0.0, metrics.step_tokens.sum - metrics.num_output_tokens)
    return [
        num_prefilled,
        metrics.num_output_tokens,
        metrics.num_queried_tokens,
        metrics.num_hit_tokens,
        metrics.num_preemptions,
    ]
