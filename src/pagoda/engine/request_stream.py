"""What goes into `AsyncEngine` and what comes out: `EngineRequest` and `RequestStream`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from pagoda.engine.output import CompletionOutput, OutputKind, RequestMetrics, RequestOutput
from pagoda.engine.structured_output import CompiledGrammar
from pagoda.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What `AsyncEngine.submit` takes; the fields are those of `Engine.add_request`."""

    request_id: str
    prompt: str | Sequence[int]
    params: SamplingParams
    output_kind: OutputKind = OutputKind.DELTA
    arrival_s: float | None = None
    priority: int = 0
    cache_salt: str | None = None
    use_cache: bool = True
    deadline_s: float | None = None
    grammar: CompiledGrammar | None = None  # compiled by `submit` where it is missing


class RequestStream:
    """Outputs of the requests of one `submit`, in the order in which they come; ends after the last.

    Leaving early is the caller's to say: `cancel`, or `async with`, aborts what is unfinished.
    """

    def __init__(self, request_ids: Iterable[str], abort: Callable[[Iterable[str]], None]) -> None:
        self.unfinished = set(request_ids)
        self._abort = abort
        self._outputs: deque[RequestOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if not self.unfinished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        if output.finished:
            self.unfinished.discard(output.request_id)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """Abort what is unfinished; its blocks are free before the next step."""
        if self.unfinished:
            self._abort(self.unfinished)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cancel()


def failed_output(request_id: str, output: RequestOutput | None, message: str) -> RequestOutput:
    """The last output of a request that the engine broke on."""
    if output is None:
        choice = CompletionOutput(0, "", [], finish_reason="error", error=message)
        return RequestOutput(request_id, None, [], [choice], True, 0, RequestMetrics(0.0))
    for choice in output.outputs:
        choice.finish_reason, choice.error = "error", message
    return output
