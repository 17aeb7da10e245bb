"""`AsyncEngine`: an `Engine` for many requests at a time, asked from an event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

from pagoda.engine.engine import Engine
from pagoda.engine.engine_thread import EngineThread, Observer, QueueState
from pagoda.engine.output import RequestOutput
from pagoda.engine.request_stream import EngineRequest, RequestStream
from pagoda.engine.structured_output import MAX_COMPILE_S
from pagoda.errors import PagodaError, RequestError
from pagoda.sampling_params import SamplingParams

log = logging.getLogger(__name__)
T = TypeVar("T")


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
        self._thread = EngineThread(engine, self._deliver, observer=observer, on_step=on_step)
        self._stopping = False  # takes no more calls
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
        self._thread.start()

    @property
    def queue(self) -> QueueState:
        return self._thread.queue

    @property
    def failure(self) -> str | None:
        """What the last step broke on, while none has succeeded since."""
        return self._thread.failure

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
                self._add(requests, stream)
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
        return await self.call(lambda engine: self._thread.abort(wanted))

    def abort_soon(self, request_ids: Iterable[str]) -> None:
        """`abort`, without waiting for it."""
        wanted = list(request_ids)

        def run() -> None:
            try:
                self._thread.abort(wanted)
            except Exception:
                log.exception("requests could not be aborted")

        self._thread.post(run)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """The result of `function`, run in the engine thread between two steps.

        Raises:
            EngineStoppedError: the engine is closing.
        """
        if self._stopping or not self._thread.is_started:
            raise EngineStoppedError(
                "the engine is shutting down" if self._thread.is_started else "start the engine first"
            )
        return await self._thread.call(function)

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
        if self._thread.is_started:
            await self._thread.call(lambda engine: self._thread.abort(list(self._thread.live)))
            await asyncio.to_thread(self._thread.stop)
        self.engine.close()

    async def __aenter__(self) -> AsyncEngine:
        if not self._thread.is_started:
            self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _add(self, requests: Sequence[EngineRequest], stream: RequestStream) -> None:
        """In the engine thread."""
        self._thread.add(requests)
        # Before the first output can come.
        for r in requests:
            self._streams[r.request_id] = stream
        self._thread.hand_over(self._idle.clear)

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
