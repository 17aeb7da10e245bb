"""`EngineThread`: an `Engine` in a thread of its own, for one event loop.

The thread owns the engine. The loop posts calls to it, which run between two steps, and gets what a step
brought for all requests in one hand-over. Without work the thread sleeps.

Waking a loop is a system call, for which a thread lets go of the interpreter lock; the loop would take it
and work on the outputs while the next step waits to be planned. So a third thread does the waking: it gets
the lock when the engine thread enters native code, and the loop works while the step runs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from pagoda.core.request import RequestStatus
from pagoda.engine.engine import Engine, describe_error
from pagoda.engine.output import RequestOutput
from pagoda.engine.request_stream import EngineRequest, failed_output

log = logging.getLogger(__name__)
T = TypeVar("T")
Observer = Callable[[Sequence[RequestOutput]], None]


@dataclass(frozen=True, slots=True)
class QueueState:
    """Requests (every choice is one) by state, as the engine thread last saw them."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # of those that wait
    num_left_waiting: int = 0  # by the last step, which had no place for them


class EngineThread:
    """`start` starts it; `post`, `call` and `hand_over` are for any thread, `add` and `abort` for calls that
    run in this one. `deliver` gets the outputs of every step in the loop. For the others see `AsyncEngine`.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[RequestOutput]], None],
        *,
        observer: Observer | None,
        on_step: Callable[[float], None] | None,
    ) -> None:
        self.engine = engine
        self.queue = QueueState()
        self.failure: str | None = None  # what the last step broke on, while none has succeeded since
        self.live: set[str] = set()  # unfinished requests
        self._deliver = deliver
        self._observer = observer
        self._on_step = on_step
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="pagoda-engine", daemon=True)
        self._waker = threading.Thread(target=self._wake_loop, name="pagoda-waker", daemon=True)
        self._outbox: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._num_left_waiting = 0

    @property
    def is_started(self) -> bool:
        return self._loop is not None

    def start(self) -> None:
        """Outputs go to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._waker.start()

    def stop(self) -> None:
        """End it, once the calls there are have run."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._outbox.put(None)

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run between two steps."""
        self._calls.append(call)
        self._wake.set()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """The result of `function`, run between two steps."""
        assert self._loop is not None
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = function(self.engine)
            except BaseException as error:
                self.hand_over(_set_exception, future, error)
            else:
                self.hand_over(_set_result, future, result)

        self.post(run)
        return await future

    def hand_over(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have the loop call it, after what has been handed over before."""
        self._outbox.put((function, arguments))  # does not let go of the interpreter lock

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """All, or none.

        Raises:
            RequestError, CapacityError: as `Engine.add_request`, for any of them.
        """
        for number, r in enumerate(requests):
            try:
                self.engine.add_request(
                    r.request_id,
                    r.prompt,
                    r.params,
                    output_kind=r.output_kind,
                    arrival_s=r.arrival_s,
                    priority=r.priority,
                    cache_salt=r.cache_salt,
                    use_cache=r.use_cache,
                    deadline_s=r.deadline_s,
                    grammar=r.grammar,
                )
            except Exception:
                self.engine.abort(added.request_id for added in requests[:number])
                raise
        self.live.update(r.request_id for r in requests)
        self._note_queue()

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        """End requests; the ids of those that were there."""
        outputs = self.engine.abort(request_ids)
        self._publish(outputs)
        return [output.request_id for output in outputs]

    def _run(self) -> None:
        started_s = time.monotonic()
        while not self._closing:
            if not self.engine.has_unfinished and not self._calls:
                self._wake.wait()
                started_s = time.monotonic()
            self._wake.clear()
            while self._calls:
                self._calls.popleft()()
            if self.engine.has_unfinished:
                outputs = self._step()
                self._num_left_waiting = self.engine.scheduler.num_waiting
                self._publish(outputs)
                ended_s = time.monotonic()
                if self._on_step is not None:
                    self._on_step(ended_s - started_s)
                started_s = ended_s
        while self._calls:
            self._calls.popleft()()

    def _step(self) -> list[RequestOutput]:
        try:
            outputs = self.engine.step()
        except Exception as error:  # a bug, and no reason to leave anybody waiting
            log.exception("the engine failed; all its requests end with an error")
            self.failure = describe_error(error)
            return self._fail_all(self.failure)
        self.failure = None
        return outputs

    def _fail_all(self, message: str) -> list[RequestOutput]:
        request_ids = list(self.live)
        try:
            ended = {output.request_id: output for output in self.engine.abort(request_ids)}
        except Exception:
            log.exception("the failed requests could not be aborted")
            ended = {}
        return [failed_output(request_id, ended.get(request_id), message) for request_id in request_ids]

    def _publish(self, outputs: list[RequestOutput]) -> None:
        self._note_queue()
        if outputs:
            self.live.difference_update(output.request_id for output in outputs if output.finished)
            if self._observer is not None:
                self._observer(outputs)
            self.hand_over(self._deliver, outputs)

    def _note_queue(self) -> None:
        scheduler = self.engine.scheduler
        num_tokens = 0
        if scheduler.num_waiting:
            num_tokens = sum(
                r.num_tokens for r in scheduler.requests.values() if r.status is not RequestStatus.RUNNING
            )
        self.queue = QueueState(
            scheduler.num_running, scheduler.num_waiting, num_tokens, self._num_left_waiting
        )

    def _wake_loop(self) -> None:
        """In the third thread."""
        assert self._loop is not None
        while (item := self._outbox.get()) is not None:
            function, arguments = item
            try:
                self._loop.call_soon_threadsafe(function, *arguments)
            except RuntimeError:  # the loop is closed: nobody is left to tell
                self._closing = True
                self._wake.set()


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
