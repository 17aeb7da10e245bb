"""`RequestQueue`: requests in the order in which they are served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from pagoda.config import SchedulerConfig
from pagoda.core.request import Request


class RequestQueue:
    """Sorted by `Request.queue_key`, so a request that comes back takes its old place."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self._requests[index]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_key)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.queue_key, key=_key)
        assert self._requests[index] is request
        del self._requests[index]


def queue_key(request: Request, number: int, config: SchedulerConfig) -> tuple[float, int]:
    """Smallest first: order of arrival, or priority (lower is sooner) with ageing.

    After `priority_ageing_s` of waiting a request is worth one level more. All age at the same rate, so
    the order of two requests never changes, and arrival time alone can stand for ageing.
    """
    if config.scheduling_policy == "fcfs":
        return 0.0, number
    if config.priority_ageing_s == 0:
        return float(request.priority), number
    return request.priority + request.arrival_s / config.priority_ageing_s, number


def admission_order(
    waiting: Sequence[Request],
    config: SchedulerConfig,
    now_s: float,
    num_cached_blocks: Callable[[Request], int],
) -> list[Request]:
    """`waiting`, which is in the order of its queue, with the best cached first among those of equal
    priority (after SGLang's longest-prefix-match order).

    Nobody gets past a request that has waited for `max_overtaken_s` or was preempted, so that none starves.
    """
    ordered: list[Request] = []
    equals: list[Request] = []

    def take_equals() -> None:
        ordered.extend(sorted(equals, key=num_cached_blocks, reverse=True))  # stable: ties stay in order
        equals.clear()

    for request in waiting:
        is_settled = request.num_preemptions > 0 or now_s - request.queued_s >= config.max_overtaken_s
        is_other = (
            config.scheduling_policy == "priority" and equals and request.priority != equals[0].priority
        )
        if is_settled or is_other:
            take_equals()
        (ordered if is_settled else equals).append(request)
    take_equals()
    return ordered


def _key(request: Request) -> tuple[float, int]:
    return request.queue_key
