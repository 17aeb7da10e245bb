"""`Deadlines`: which requests have run out of time."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from pagoda.core.request import Request


class Deadlines:
    """Requests by deadline, soonest first. Those that have ended meanwhile are passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, num_unfinished: int) -> None:
        """`num_unfinished` requests are there, which bounds what is kept of those that have ended."""
        if request.deadline_s is None:
            return
        if len(self._heap) > 2 * num_unfinished + 64:  # mostly of requests that are gone
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapify(self._heap)
        self._num_added += 1
        heappush(self._heap, (request.deadline_s, self._num_added, request))

    def take_expired(self, now_s: float) -> list[Request]:
        """Unfinished requests whose deadline has passed, each once."""
        expired = []
        while self._heap and self._heap[0][0] <= now_s:
            _, _, request = heappop(self._heap)
            if not request.is_finished:
                expired.append(request)
        return expired
