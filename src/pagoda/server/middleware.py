"""What surrounds every call: its id, the limit of its body, and who may call. Plain ASGI, so that streams
and the news that a client has gone pass through untouched."""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Sequence
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.server.errors import APIError, as_api_error, error_response
from pagoda.server.state import ServerConfig

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
ADMIN_PREFIXES = ("/cache", "/requests")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIdMiddleware:
    """Answers with the `X-Request-Id` of the call, or one of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        return await self._app(scope, receive, send_with_id)


class RootPathMiddleware:
    """Routes below a path that a proxy in front uses, whether the proxy takes it off or not."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if not path.startswith(f"{self._root_path}/"):
                path = self._root_path + path
            scope = {**scope, "root_path": self._root_path, "path": path}
        await self._app(scope, receive, send)


class AuthMiddleware:
    """Guards everything but health. Keys of the administrator open every route, and alone the admin routes
    when there are any."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = [key.encode() for key in (*config.api_keys, *config.admin_api_keys)]
        self._admin_keys = [key.encode() for key in (config.admin_api_keys or config.api_keys)]
        self._guards_all = bool(config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            error = APIError(
                401,
                "this needs a valid API key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            return await error_response(error)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        if path in OPEN_PATHS:
            return True
        is_admin = path.startswith(ADMIN_PREFIXES)
        keys = self._admin_keys if is_admin else (self._keys if self._guards_all else [])
        return not keys or _matches(Headers(scope=scope).get("authorization", ""), keys)


def _matches(authorization: str, keys: Sequence[bytes]) -> bool:
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "bearer":
        return False
    given_bytes = given.strip().encode("utf-8", "surrogateescape")
    found = False
    for key in keys:  # all of them, in constant time each: time must not tell how much is right
        found |= hmac.compare_digest(given_bytes, key)
    return found


class BodyLimitMiddleware:
    """413 for a body of more than `max_bytes`, announced or not, before it is held in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            return await self._refuse(scope, receive, send)
        num_bytes = 0
        has_started = False

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    raise _BodyTooLargeError
            return message

        async def send_noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            return await self._app(scope, receive_limited, send_noting)
        except _BodyTooLargeError:
            if not has_started:
                return await self._refuse(scope, receive, send)
            raise

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = APIError(
            413,
            f"the body has more than {self._max_bytes} bytes (--max-body-bytes)",
            code="body_too_large",
            headers={"Connection": "close"},
        )
        await error_response(error)(scope, receive, send)


class LastResort:
    """Whatever escapes a route is a bug: it goes to the log, and the client gets 500 on a connection that
    stays usable."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except Exception as error:
            if scope["type"] != "http" or has_started:
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            await error_response(as_api_error(error))(scope, receive, send)


class _BodyTooLargeError(BaseException):
    """Not an `Exception`, so that what reads the body does not take it for malformed JSON."""
