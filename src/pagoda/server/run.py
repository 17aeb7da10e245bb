"""Running a server: the port opens first, then the model loads; a signal drains, a second one aborts."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import uvicorn
from fastapi import FastAPI

from pagoda.core.events import EventSink
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.engine import Engine
from pagoda.errors import ConfigError
from pagoda.server.app import create_app
from pagoda.server.busy_log import log_while_busy
from pagoda.server.metrics import EngineState, ServerMetrics
from pagoda.server.state import Phase, ServerConfig, ServerState

log = logging.getLogger(__name__)
KEEP_ALIVE_S = 75  # longer than the pools of usual clients and proxies keep a connection
FLUSH_S = 5  # for answers on their way when the engine has finished

EngineLoader = Callable[[EventSink], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    access_log: bool = False


class Server:
    """`run` serves until a signal, or `stop`, and returns.

    `load` makes the engine, in a thread, while health is answered already; what it raises is in `error`.
    `on_ready` is told once requests are answered.
    """

    def __init__(
        self,
        config: ServerConfig,
        load: EngineLoader,
        listen: ListenConfig | None = None,
        *,
        on_ready: Callable[[Engine], None] | None = None,
    ) -> None:
        self.state = ServerState(config, ServerMetrics(config.served_model_names[0]))
        self.error: Exception | None = None
        self._load = load
        self._on_ready = on_ready
        self._num_signals = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listen = listen = listen or ListenConfig()
        self.uvicorn = _UvicornServer(
            uvicorn.Config(
                create_app(self.state, self._lifespan),
                host=listen.host,
                port=listen.port,
                ssl_certfile=listen.ssl_certfile,
                ssl_keyfile=listen.ssl_keyfile,
                access_log=listen.access_log,
                log_level="info" if listen.access_log else "warning",
                lifespan="on",
                ws="none",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FLUSH_S,
            ),
            self.stop,
        )

    def run(self) -> None:
        """
        Raises:
            ConfigError: the port is taken, the address is not this machine's, or the certificate is bad.
        """
        try:
            self.uvicorn.config.load()
        except (OSError, ValueError) as error:
            raise ConfigError(f"the certificate cannot be used: {error}", param="ssl_certfile") from None
        self.uvicorn.run(sockets=[_listen(self._listen)])

    def stop(self) -> None:
        """Take no more requests, finish those there are within the shutdown timeout, then end. A second
        call aborts them. May come from any thread and from a signal handler."""
        self._num_signals += 1
        if self._loop is None:
            self.uvicorn.should_exit = True
            return
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._begin_stop, self._num_signals)

    def _begin_stop(self, num_signals: int) -> None:
        self.state.phase = Phase.DRAINING
        timeout_s = self.state.config.shutdown_timeout_s if num_signals == 1 else 0.0
        self._spawn(self._drain(timeout_s))

    async def _drain(self, timeout_s: float) -> None:
        engine = self.state.loaded_engine
        if engine is not None:
            num_unfinished = engine.num_unfinished
            if num_unfinished:
                log.info("finishing %d requests within %g s", num_unfinished, timeout_s)
            if not await engine.drain(timeout_s):
                log.warning("requests were still running after %g s and have been aborted", timeout_s)
        self.uvicorn.should_exit = True

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._spawn(self._start())
        self._spawn(log_while_busy(self.state))
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            if (engine := self.state.loaded_engine) is not None:
                await engine.close()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self) -> None:
        try:
            engine = await _in_daemon_thread(lambda: self._load(self.state.metrics.on_event))
        except Exception as error:
            self.error = error
            self.state.phase = Phase.FAILED
            self.uvicorn.should_exit = True
            return
        async_engine = AsyncEngine(
            engine, observer=self.state.metrics.on_outputs, on_step=self.state.metrics.on_step
        )
        async_engine.start()
        self.state.metrics.read_engine = lambda: _engine_state(async_engine)
        self.state.set_engine(async_engine)
        if self._on_ready is not None:
            self._on_ready(engine)


class _UvicornServer(uvicorn.Server):
    """Signals go to `stop`, which drains before uvicorn closes connections."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stop()


def _listen(listen: ListenConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off, which would hold back chunks, for sockets that say they are TCP.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((listen.host, listen.port))
        listening.listen(2048)
        return listening
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {listen.host}, port {listen.port}: {error}",
            param="port",
            hint="choose another one with --port",
        ) from None


async def _in_daemon_thread(function: Callable[[], Engine]) -> Engine:
    """As `asyncio.to_thread`, but a process that is told to end does not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Engine] = loop.create_future()

    def settle(engine: Engine | None, error: Exception | None) -> None:
        if future.done():
            return
        if engine is not None:
            future.set_result(engine)
        elif error is not None:
            future.set_exception(error)

    def run() -> None:
        engine, failure = None, None
        try:
            engine = function()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed: the server has ended meanwhile
            loop.call_soon_threadsafe(settle, engine, failure)

    threading.Thread(target=run, name="pagoda-load", daemon=True).start()
    return await future


def _engine_state(engine: AsyncEngine) -> EngineState:
    queue = engine.queue
    return EngineState(queue.num_running, queue.num_waiting, engine.engine.scheduler.kv.usage())
