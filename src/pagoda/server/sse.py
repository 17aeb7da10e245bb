"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from pagoda.server.errors import APIError, encode_json

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    return b"data: " + encode_json(content) + b"\n\n"


class EventStreamResponse(Response):
    """Sends events as they come. `on_end` is called once, however it ends: client gone, error, or done."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self.headers["X-Accel-Buffering"] = "no"  # a proxy that collects chunks defeats streaming
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await finish_unless_gone(self._send(send), receive)
        finally:
            self._on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def finish_unless_gone(work: Awaitable[T], receive: Receive) -> T | None:
    """The result of `work`, or None as soon as the client closes the connection; `work` is cancelled then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, gone):
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await pending


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_event(error: APIError) -> bytes:
    """The last event of a stream that failed; no [DONE] follows."""
    return event(error.body())
