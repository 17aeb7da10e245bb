"""`AsyncEngine`: an `Engine` in a thread of its own, asked from an event loop.

The engine thread owns the engine. The loop posts calls to it, which run between two steps, and gets what a
step brought for all requests in one hand-over. Without work the thread sleeps.

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
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, TypeVar
from uuid import uuid4

from pagoda.core.request import RequestStatus
from pagoda.engine.engine import Engine, describe_error
from pagoda.engine.output import RequestOutput
from pagoda.engine.request_stream import EngineRequest, RequestStream, failed_output
from pagoda.engine.structured_output import MAX_COMPILE_S
from pagoda.errors import PagodaError, RequestError
from pagoda.sampling_params import SamplingParams

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


class EngineStoppedError(PagodaError):
    """The engine is closing, or closed, and takes no more requests."""


class AsyncEngine:
    """Many requests at a time, from one event loop.

        async with await AsyncEngine.from_model("smollm2-135m") as engine:
            async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text, end="")

    In the engine thread, `observer` sees the outputs of every step before anybody else does, and `on_step`
    is told how many seconds a step took: from the last one, or from waking up, until its outputs are handed
    over, with the calls that ran before it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        observer: Observer | None = None,
        on_step: Callable[[float], None] | None = None,
    ) -> None:
        self.engine = engine
        self.queue = QueueState()
        self.failure: str | None = None  # what the last step broke on, while none has succeeded since
        self._observer = observer
        self._on_step = on_step
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._waker: threading.Thread | None = None
        self._outbox: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False  # takes no more calls
        self._closing = False  # the thread ends
        self._num_left_waiting = 0
        self._live: set[str] = set()  # unfinished requests, as the engine thread knows them
        self._streams: dict[str, RequestStream] = {}
        self._num_submitted = self._num_submitted_tokens = 0  # choices and their prompts, ever
        self._num_seen = self._num_seen_tokens = 0  # of these, by the engine thread
        self._compiling = asyncio.Semaphore(2)  # grammars at a time
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def from_model(cls, model: str, **options: Any) -> AsyncEngine:
        """Load a model, without holding up the loop, and start. `options` are those of `LLM`.

        Raises:
            PagodaError: the model cannot be found, read or held in memory; a setting is out of range.
        """
        from pagoda.engine.llm import LLM

        llm = await asyncio.to_thread(lambda: LLM(model, **options))
        engine = cls(llm.engine)
        engine.start()
        return engine

    def start(self) -> None:
        """Start the engine thread; outputs go to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="pagoda-engine", daemon=True)
        self._waker = threading.Thread(target=self._wake_loop, name="pagoda-waker", daemon=True)
        self._thread.start()
        self._waker.start()

    @property
    def num_unfinished(self) -> int:
        """Requests that have been submitted and have not ended."""
        return len(self._streams)

    def queue_length(self) -> tuple[int, int]:
        """Requests that will have to wait, and the tokens of their prompts.

        Those that came since the last step count as far as there was no free place for them in it.
        """
        queue = self.queue
        num_free = self.engine.scheduler.config.max_num_seqs - queue.num_running
        if queue.num_left_waiting:
            num_free = 0
        num_queued = queue.num_waiting + self._num_submitted - self._num_seen - max(0, num_free)
        if num_queued <= 0:
            return 0, 0
        return num_queued, queue.num_waiting_tokens + self._num_submitted_tokens - self._num_seen_tokens

    # Asking.

    async def submit(self, requests: Sequence[EngineRequest]) -> RequestStream:
        """Accept all requests, or none.

        Raises:
            RequestError, CapacityError: as `Engine.add_request`, for any of them.
            EngineStoppedError: the engine is closing.
        """
        requests = [await self._with_grammar(r) for r in requests]
        stream = RequestStream((r.request_id for r in requests), self.abort_soon)
        num_choices = sum(r.params.n for r in requests)
        num_tokens = sum(len(r.prompt) * r.params.n for r in requests)
        self._num_submitted += num_choices
        self._num_submitted_tokens += num_tokens

        def add(engine: Engine) -> None:
            try:
                self._add(engine, requests, stream)
            finally:
                self._num_seen += num_choices
                self._num_seen_tokens += num_tokens

        try:
            await self.call(add)
        except asyncio.CancelledError:
            stream.cancel()  # runs after the call that adds them
            raise
        return stream

    async def _with_grammar(self, request: EngineRequest) -> EngineRequest:
        """The request with its grammar compiled, away from the engine thread and the event loop."""
        wanted = request.params.structured_outputs
        if wanted is None or request.grammar is not None:
            return request
        try:
            async with self._compiling:
                compiling = asyncio.to_thread(self.engine.compile_grammar, wanted)
                return replace(request, grammar=await asyncio.wait_for(compiling, MAX_COMPILE_S))
        except asyncio.TimeoutError:
            raise RequestError(
                f"the grammar is not compiled after {MAX_COMPILE_S:g} s", param="structured_outputs"
            ) from None

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield what each step adds to the answer of one prompt; leaving the iterator aborts it.

        `options` are further fields of `EngineRequest`.
        """
        request = EngineRequest(
            request_id=request_id or uuid4().hex, prompt=prompt, params=params or SamplingParams(), **options
        )
        async with await self.submit([request]) as stream:
            async for output in stream:
                yield output

    async def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests; the ids of those that were there. Their streams get a last output."""
        wanted = list(request_ids)
        return await self.call(lambda engine: self._abort(engine, wanted))

    def abort_soon(self, request_ids: Iterable[str]) -> None:
        """`abort`, without waiting for it."""
        wanted = list(request_ids)

        def run() -> None:
            try:
                self._abort(self.engine, wanted)
            except Exception:
                log.exception("requests could not be aborted")

        self._post(run)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """The result of `function`, run in the engine thread between two steps.

        Raises:
            EngineStoppedError: the engine is closing.
        """
        if self._stopping or self._loop is None:
            raise EngineStoppedError(
                "the engine is shutting down" if self._loop else "start the engine first"
            )
        return await self._call(function)

    async def _call(self, function: Callable[[Engine], T]) -> T:
        assert self._loop is not None
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = function(self.engine)
            except BaseException as error:
                self._hand_over(_set_exception, future, error)
            else:
                self._hand_over(_set_result, future, result)

        self._post(run)
        return await future

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no request is left, and abort those that are after `timeout_s`; whether none was."""
        await self.call(lambda engine: None)  # what has been submitted is seen from here on
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            return True
        except asyncio.TimeoutError:
            await self.abort(list(self._streams))
            return False

    async def close(self) -> None:
        """Abort what is unfinished, end the thread and give the engine's memory back."""
        if self._stopping:
            return
        self._stopping = True
        if self._thread is not None:
            await self._call(lambda engine: self._abort(engine, list(self._live)))
            self._closing = True
            self._wake.set()
            await asyncio.to_thread(self._thread.join)
            self._outbox.put(None)
        self.engine.close()

    async def __aenter__(self) -> AsyncEngine:
        if self._thread is None:
            self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # In the engine thread.

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
        request_ids = list(self._live)
        try:
            ended = {output.request_id: output for output in self.engine.abort(request_ids)}
        except Exception:
            log.exception("the failed requests could not be aborted")
            ended = {}
        return [failed_output(request_id, ended.get(request_id), message) for request_id in request_ids]

    def _add(self, engine: Engine, requests: Sequence[EngineRequest], stream: RequestStream) -> None:
        for number, r in enumerate(requests):
            try:
                engine.add_request(
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
                engine.abort(added.request_id for added in requests[:number])
                raise
        # Before the first output can come, and in this thread, so that a failure sees all that was added.
        for r in requests:
            self._streams[r.request_id] = stream
            self._live.add(r.request_id)
        self._hand_over(self._idle.clear)
        self._note_queue()

    def _abort(self, engine: Engine, request_ids: Sequence[str]) -> list[str]:
        outputs = engine.abort(request_ids)
        self._publish(outputs)
        return [output.request_id for output in outputs]

    def _publish(self, outputs: list[RequestOutput]) -> None:
        self._note_queue()
        if outputs:
            self._live.difference_update(output.request_id for output in outputs if output.finished)
            if self._observer is not None:
                self._observer(outputs)
            self._hand_over(self._deliver, outputs)

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

    # From thread to thread.

    def _post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wake.set()

    def _hand_over(self, function: Callable[..., None], *arguments: Any) -> None:
        self._outbox.put((function, arguments))  # does not let go of the interpreter lock

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

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            stream.put(output)
        if not self._streams:
            self._idle.set()


AsyncLLM = AsyncEngine


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
