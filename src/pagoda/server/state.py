"""What the routes of one server share: its configuration, its engine, and what is being answered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.tokenizer import Tokenizer
from pagoda.server.errors import APIError
from pagoda.server.metrics import ServerMetrics

if TYPE_CHECKING:
    from pagoda.server.generation import Generation

RETRY_AFTER_S = 5


class Phase(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP side; those of the engine are its own. None is no limit."""

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    max_num_queued_reqs: int | None = 1024
    max_num_queued_tokens: int | None = None
    max_output_tokens: int | None = None  # of one choice, whatever the client asks for
    max_body_bytes: int = 16 * 2**20
    shutdown_timeout_s: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    tool_call_parser: str | None = None  # a name of `TOOL_FORMATS`; None reads it off the chat template


@dataclass(slots=True)
class ServerState:
    config: ServerConfig
    metrics: ServerMetrics
    phase: Phase = Phase.LOADING
    created_s: int = field(default_factory=lambda: int(time.time()))
    active: dict[str, Generation] = field(default_factory=dict)  # by the id that the client sees
    _engine: AsyncEngine | None = None

    @property
    def model_name(self) -> str:
        return self.config.served_model_names[0]

    @property
    def loaded_engine(self) -> AsyncEngine | None:
        return self._engine

    def set_engine(self, engine: AsyncEngine) -> None:
        """The model is loaded: requests are answered from now on."""
        self._engine = engine
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    @property
    def engine(self) -> AsyncEngine:
        """
        Raises:
            APIError: 503, the server does not answer requests now.
        """
        if self.phase is not Phase.READY or self._engine is None:
            told = {
                Phase.LOADING: "the model is still loading",
                Phase.DRAINING: "the server is shutting down and takes no more requests",
            }
            message = told.get(self.phase, "the model could not be loaded")
            raise APIError(503, message, code=self.phase.value, headers={"Retry-After": str(RETRY_AFTER_S)})
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.engine.engine.tokenizer
        if tokenizer is None:
            raise APIError(400, "the model has no tokenizer", code="unsupported")
        return tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.engine.max_model_len

    def served_name(self, name: str | None) -> str:
        """
        Raises:
            APIError: 404, no model of that name is served.
        """
        if name is None:
            return self.model_name
        if name not in self.config.served_model_names:
            served = ", ".join(self.config.served_model_names)
            raise APIError(
                404,
                f"the model {name!r} is not served here; this server has: {served}",
                param="model",
                code="model_not_found",
            )
        return name

    def check_queue(self, num_requests: int, num_tokens: int) -> None:
        """
        Raises:
            APIError: 429, the queue would become longer than it may.
        """
        num_queued, num_queued_tokens = self.engine.queue_length()
        limits = (
            ("requests", num_queued, num_requests, self.config.max_num_queued_reqs),
            ("prompt tokens", num_queued_tokens, num_tokens, self.config.max_num_queued_tokens),
        )
        for what, queued, num_new, limit in limits:
            # An empty queue takes any request, so that one that is larger than the limit can be served.
            if limit is not None and queued and queued + num_new > limit:
                self.metrics.num_refused += 1
                raise APIError(
                    429,
                    f"{queued} {what} are waiting and at most {limit} may; try again later",
                    code="queue_full",
                    headers={"Retry-After": str(self.metrics.retry_after_s(num_queued))},
                )
