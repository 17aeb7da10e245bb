"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pagoda.engine.async_engine import EngineStoppedError
from pagoda.errors import CapacityError, PagodaError, RequestError, UnsupportedError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    500: "server_error",
    503: "service_unavailable_error",
}


class APIError(Exception):
    """What a client gets instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class JSONBody(Response):
    """JSON that survives any text: lone surrogates leave as the escapes that they came as."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def encode_json(content: Any) -> bytes:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def error_response(error: APIError) -> Response:
    return JSONBody(error.body(), error.status, error.headers)


def as_api_error(error: Exception) -> APIError:
    """What a client is told about an exception; a bug is told without its details."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineStoppedError):
        return APIError(503, error.message, code="draining", headers={"Retry-After": "5"})
    if isinstance(error, RequestError):
        return APIError(400, _with_hint(error), param=error.param)
    if isinstance(error, CapacityError):
        return APIError(400, _with_hint(error), param="prompt", code="context_length_exceeded")
    if isinstance(error, UnsupportedError):
        return APIError(400, _with_hint(error), code="unsupported")
    if isinstance(error, PagodaError):
        return APIError(500, _with_hint(error), code="internal_error")
    return APIError(500, "the server failed to answer; its log says why", code="internal_error")


def add_handlers(app: FastAPI) -> None:
    """Deliberate errors become answers; `middleware.LastResort` has the others."""

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {404: f"there is no {request.url.path}"}.get(error.status_code, str(error.detail))
        if error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        return error_response(APIError(error.status_code, message, headers=error.headers))

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error.errors()))

    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_invalid)
    for kind in (APIError, PagodaError):
        app.add_exception_handler(kind, on_error)


def validation_error(errors: Sequence[Any]) -> APIError:
    """The first of pydantic's complaints, in one line that names the field."""
    first = errors[0]
    location = list(first["loc"][1:])
    kind = first["type"]
    if kind == "json_invalid":
        return APIError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}")
    if not location and kind in ("missing", "model_attributes_type", "dict_type"):
        return APIError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    param = _dotted(location)
    if kind == "missing":
        return APIError(400, f"{param} is missing", param=param)
    return APIError(400, f"{param}: {first['msg']}", param=param)


def _dotted(location: Sequence[str | int]) -> str:
    """`messages[0].role` of ("messages", 0, "role"); what names a member of a union is left out."""
    text = ""
    for number, part in enumerate(location):
        if isinstance(part, int):
            text += f"[{part}]"
        elif number == 0 or not _is_union_member(part):
            text += f".{part}" if text else part
    return text


def _is_union_member(part: str) -> bool:
    return part in ("str", "int", "float", "bool") or "[" in part


def _with_hint(error: PagodaError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message
