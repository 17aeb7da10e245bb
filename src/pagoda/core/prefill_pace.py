"""`PrefillPace`: how many prompt tokens a step may hold so that those who decode hardly notice."""

from __future__ import annotations

from pagoda.core.step import SchedulerOutput

MIN_PREFILL_TOKENS = 4  # a prompt gets on, whatever the measurements say
DECODE_WEIGHT = 0.2  # of the latest step in the running averages
PREFILL_WEIGHT = 0.5  # the further a prompt has got, the dearer its next token
SURE_TOKENS = 16  # a prefill of fewer weighs less
BASE_STREAMS = 8  # reading the weights takes as long as so many streams: a guess, see `_decode_s`


class PrefillPace:
    """Learns from the duration of steps what decoding and what a prompt token costs.

    Steps that only decode give the one, and what steps with prompt tokens take beyond it the other; so an
    error in the second, as contexts grow, is made good by the next steps. Until a step has only decoded,
    and with a clock that stands still, there is no limit. Durations are all it depends on: with a virtual
    clock it repeats itself.
    """

    def __init__(self, max_decode_slowdown: float) -> None:
        self._max_slowdown = max_decode_slowdown
        self._stream_s: float | None = None
        self._token_s: float | None = None

    def observe(self, step: SchedulerOutput, duration_s: float) -> None:
        num_decoding = sum(len(r.token_ids) == 1 for r in step.requests)
        num_prefill_tokens = step.num_scheduled_tokens - num_decoding
        if not num_prefill_tokens:
            self._stream_s = _averaged(
                self._stream_s, duration_s / (BASE_STREAMS + num_decoding), DECODE_WEIGHT
            )
        else:
            token_s = max(0.0, duration_s - self._decode_s(num_decoding)) / num_prefill_tokens
            weight = PREFILL_WEIGHT * min(1.0, num_prefill_tokens / SURE_TOKENS)
            self._token_s = _averaged(self._token_s, token_s, weight)

    def max_tokens(self, budget: int, num_decoding: int, num_prefilling: int) -> int:
        """Prompt tokens of a step beside `num_decoding` tokens that are decoded: so many that it takes
        `max_decode_slowdown` times as long as without them. `num_prefilling` requests wait for their first
        token, and each of them gets that much: a stream may wait for one prompt, not a burst for a stream."""
        if not self._max_slowdown or not num_decoding or not self._stream_s:
            return budget
        if not self._token_s:
            return min(budget, MIN_PREFILL_TOKENS)
        prefill_s = (self._max_slowdown - 1.0) * self._decode_s(num_decoding)
        prefill_s *= max(1, num_prefilling)
        return min(budget, max(MIN_PREFILL_TOKENS, int(prefill_s / self._token_s)))

    def _decode_s(self, num_decoding: int) -> float:
        """Of a step with so many streams. The guess matters only while their number is another than in the
        steps that have been measured, as when prompts come one after the other."""
        return (self._stream_s or 0.0) * (BASE_STREAMS + num_decoding)


def _averaged(average: float | None, value: float, weight: float) -> float:
    return value if average is None else average + weight * (value - average)
