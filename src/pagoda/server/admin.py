"""Routes for whoever runs the server: what the cache holds, which requests run, and ending one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI, Path, Query, Response

from pagoda.core.prefix_pins import PrefixInfo
from pagoda.core.request import Request
from pagoda.engine.engine import Engine
from pagoda.errors import CapacityError, RequestError
from pagoda.server.errors import APIError, JSONBody, as_api_error
from pagoda.server.generation import tokenise
from pagoda.server.prompts import chat_prompt
from pagoda.server.protocol import PinBody, UnpinBody
from pagoda.server.state import ServerState

MAX_LISTED = 1000
_NAMES_OF_A_PREFIX = ("prompt", "messages", "hash")
_FIELDS_OF_MESSAGES = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
RequestId = Annotated[str, Path(description="Id of the answer, or the `request_id` it was sent with.")]


def add_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/cache")
    async def cache(
        limit: Annotated[int, Query(description=f"How many to list, 1 to {MAX_LISTED}.")] = 100,
        preview: Annotated[bool, Query(description="Adds the text that each begins with.")] = False,
    ) -> Response:
        """Cached prefixes of whole blocks, each as long as it goes, and all pinned ones; latest use first.

        Each has `hash`, `num_tokens`, `num_references` (requests that hold its end), `idle_s` (seconds since
        it was used), `pinned`, and `ttl_s` (seconds that the pin has left; null: for good, or not pinned).
        """
        if not 1 <= limit <= MAX_LISTED:
            raise APIError(400, f"limit is {limit}; it must be 1 to {MAX_LISTED}", param="limit")
        return JSONBody(await state.engine.call(lambda engine: _cache(engine, limit, preview)))

    @app.post("/cache/reset")
    async def reset_cache() -> Response:
        """Forget every cached block that no request holds, pinned ones too."""
        num_blocks = await state.engine.call(lambda engine: engine.reset_prefix_cache())
        return JSONBody({"num_forgotten_blocks": num_blocks})

    @app.post("/cache/pin")
    async def pin(body: PinBody) -> Response:
        """Keep a cached prefix from eviction: the longest of `prompt` or `messages`, in whole blocks, or that
        of `hash`.

        To have it cached, send a request that begins with it first, if only with `max_tokens` 0. The answer
        is the prefix as `GET /cache` lists it. Pinned again it gets its time anew. 400 if nothing of it is
        cached, or if more of the pool would be pinned than may be (code `pin_limit`).
        """
        token_ids, block_hash = await _pin_target(state, body)

        def run(engine: Engine) -> dict[str, Any]:
            pinned = engine.pin_prefix(token_ids, body.ttl_s, body.cache_salt or None, block_hash=block_hash)
            return _prefix(engine, pinned)

        try:
            return JSONBody(await state.engine.call(run))
        except CapacityError as error:
            raise APIError(400, as_api_error(error).message, code="pin_limit") from None
        except RequestError as error:
            param = "hash" if error.param == "block_hash" else error.param
            param = "messages" if param == "prompt" and body.prompt is None else param
            raise APIError(400, as_api_error(error).message, param=param) from None

    @app.post("/cache/unpin")
    async def unpin(body: UnpinBody) -> Response:
        """Take back the pin of `hash`, or the longest along `prompt` or `messages`; 404 if there is none."""
        token_ids, block_hash = await _pin_target(state, body)
        was_pinned = await state.engine.call(
            lambda engine: engine.unpin_prefix(token_ids, body.cache_salt or None, block_hash=block_hash)
        )
        if not was_pinned:
            named = next(n for n in _NAMES_OF_A_PREFIX if getattr(body, n) is not None)
            raise APIError(404, "no such prefix is pinned", param=named)
        return JSONBody({"unpinned": True})

    @app.get("/requests")
    async def requests() -> Response:
        """Unfinished sequences; a call with several prompts or choices has several."""
        return JSONBody(await state.engine.call(_requests))

    @app.delete("/requests/{request_id}")
    async def delete_request(request_id: RequestId) -> Response:
        """End a call, by the id of its answer or the `request_id` it was sent with."""
        return await _abort(state, request_id)

    @app.post("/requests/{request_id}/abort")
    async def abort_request(request_id: RequestId) -> Response:
        """The same, for clients that cannot send DELETE."""
        return await _abort(state, request_id)


async def _abort(state: ServerState, request_id: str) -> Response:
    """End a call, by the id of its answer or the `request_id` it was sent with."""
    engine = state.engine
    names = (request_id, f"chatcmpl-{request_id}", f"cmpl-{request_id}")
    generation = next((state.active[name] for name in names if name in state.active), None)
    aborted = await engine.abort(generation.request_ids) if generation is not None else []
    if not aborted:
        raise APIError(404, f"there is no unfinished request {request_id!r}", param="request_id")
    return JSONBody({"aborted": aborted})


def _requests(engine: Engine) -> dict[str, Any]:
    now_s = time.monotonic()
    return {"requests": [_request(r, now_s) for r in engine.scheduler.requests.values()]}


def _request(request: Request, now_s: float) -> dict[str, Any]:
    miss = request.prefix_miss
    return {
        "request_id": request.request_id,
        "status": request.status.value,
        "priority": request.priority,
        "age_s": round(now_s - request.arrival_s, 6),
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_output_tokens": request.num_output_tokens,
        "num_preemptions": request.num_preemptions,
        "prefix_miss": None
        if miss is None
        else {
            "reason": miss.reason.value,
            "num_matched_tokens": miss.num_matched_tokens,
            "position": miss.position,
            "prompt_token_id": miss.prompt_token_id,
            "cached_token_id": miss.cached_token_id,
        },
    }


def _cache(engine: Engine, limit: int, preview: bool) -> dict[str, Any]:
    usage = engine.scheduler.kv.usage()
    prefixes = engine.list_prefixes()
    return {
        "block_size": engine.scheduler.kv.block_size,
        "num_blocks": {
            "free": sum(u.num_free for u in usage),
            "reusable": sum(u.num_reusable for u in usage),
            "used": sum(u.num_held for u in usage),
            "pinned": sum(u.num_pinned for u in usage),
        },
        "num_prefixes": len(prefixes),
        "prefixes": [_prefix(engine, prefix, preview) for prefix in prefixes[:limit]],
    }


def _prefix(engine: Engine, prefix: PrefixInfo, preview: bool = False) -> dict[str, Any]:
    listed: dict[str, Any] = {
        "hash": prefix.hash,
        "num_tokens": prefix.num_tokens,
        "num_references": prefix.ref_count,
        "idle_s": round(max(0.0, time.monotonic() - prefix.last_use_s), 6),
        "pinned": prefix.pinned,
        "ttl_s": None if prefix.ttl_s is None else round(prefix.ttl_s, 6),
    }
    if preview and engine.tokenizer is not None:
        listed["preview"] = engine.tokenizer.decode(prefix.first_token_ids, skip_special_tokens=False)
    return listed


class _PinTarget(NamedTuple):
    """One of them is given."""

    token_ids: Sequence[int] | None
    block_hash: bytes | None


async def _pin_target(state: ServerState, body: UnpinBody) -> _PinTarget:
    """
    Raises:
        RequestError: not one of prompt, messages and hash is given, or it cannot be one.
    """
    if sum(getattr(body, name) is not None for name in _NAMES_OF_A_PREFIX) != 1:
        raise RequestError("give one of prompt, messages and hash", param="prompt")
    if body.messages is None:
        for name in _FIELDS_OF_MESSAGES:
            if getattr(body, name) is not None:
                raise RequestError(f"{name} goes with messages", param=name)
    if body.hash is not None:
        if body.cache_salt is not None:
            raise RequestError("a hash has its cache_salt in it", param="cache_salt")
        try:
            return _PinTarget(None, bytes.fromhex(body.hash))
        except ValueError:
            raise RequestError(
                f"hash is {body.hash!r}; GET /cache lists those there are", param="hash"
            ) from None
    if body.messages is not None:
        chat = await chat_prompt(state, body, body.tools, begins_answer=False)
        return _PinTarget(chat.token_ids, None)
    assert body.prompt is not None
    if isinstance(body.prompt, str):
        encode = partial(
            state.tokenizer.encode, body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
        return _PinTarget(await tokenise(len(body.prompt), encode), None)
    vocab_size = state.engine.engine.vocab_size
    for token_id in body.prompt:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"prompt has {token_id}; token ids of this model are 0 to {vocab_size - 1}", param="prompt"
            )
    return _PinTarget(body.prompt, None)
