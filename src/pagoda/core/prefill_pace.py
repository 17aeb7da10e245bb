"""`PrefillPace`: how many prompt tokens a step may hold so that those who decode hardly notice."""

from __future__ import annotations

from pagoda.core.step import SchedulerOutput

MIN_PREFILL_TOKENS = 16  # a prompt gets on, whatever the measurements say
WEIGHT = 0.2  # of the latest step in the running averages


class PrefillPace:
    """Learns from the duration of steps what a decode and what a prompt token costs.

    Steps that only decode give the one, steps with prompt tokens the other. Until both are known, and
    with a clock that stands still, there is no limit.
    """

    def __init__(self, max_decode_slowdown: float) -> None:
        self._max_slowdown = max_decode_slowdown
        self._decode_step_s: float | None = None
        self._prefill_token_s: float | None = None

    def observe(self, step: SchedulerOutput, duration_s: float) -> None:
        lengths = [len(r.token_ids) for r in step.requests]
        num_prefill_tokens = sum(n for n in lengths if n > 1)
        if not num_prefill_tokens:
            self._decode_step_s = _averaged(self._decode_step_s, duration_s)
        elif num_prefill_tokens >= MIN_PREFILL_TOKENS:
            decode_s = self._decode_step_s or 0.0 if 1 in lengths else 0.0
            token_s = max(0.0, duration_s - decode_s) / num_prefill_tokens
            self._prefill_token_s = _averaged(self._prefill_token_s, token_s)

    def max_tokens(self, budget: int) -> int:
        """Prompt tokens of a step in which others decode: so many that it takes `max_decode_slowdown` times
        as long as without them."""
        if not self._max_slowdown or not self._decode_step_s or not self._prefill_token_s:
            return budget
        num_tokens = int((self._max_slowdown - 1.0) * self._decode_step_s / self._prefill_token_s)
        return min(budget, max(MIN_PREFILL_TOKENS, num_tokens))


def _averaged(average: float | None, value: float) -> float:
    return value if average is None else average + WEIGHT * (value - average)
