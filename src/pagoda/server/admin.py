"""Routes for whoever runs the server: what the cache holds, which requests run, and ending one."""

from __future__ import annotations

import time
from array import array
from typing import Any

from fastapi import FastAPI, Response

from pagoda.core.prefix_cache import NO_BLOCK, PrefixNode
from pagoda.core.request import Request
from pagoda.engine.engine import Engine
from pagoda.server.errors import APIError, JSONBody
from pagoda.server.state import ServerState

MAX_LISTED = 1000
PREVIEW_TOKENS = 64


def add_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/cache")
    async def cache(limit: int = 100, preview: bool = False) -> Response:
        """Cached prefixes, each as long as it goes, longest first."""
        if not 1 <= limit <= MAX_LISTED:
            raise APIError(400, f"limit is {limit}; it must be 1 to {MAX_LISTED}", param="limit")
        return JSONBody(await state.engine.call(lambda engine: _cache(engine, limit, preview)))

    @app.post("/cache/reset")
    async def reset_cache() -> Response:
        """Forget every cached block that no request holds."""
        num_blocks = await state.engine.call(lambda e: e.scheduler.kv.reset_prefix_cache())
        return JSONBody({"num_forgotten_blocks": num_blocks})

    @app.get("/requests")
    async def requests() -> Response:
        """Unfinished sequences; a call with several prompts or choices has several."""
        return JSONBody(await state.engine.call(_requests))

    @app.delete("/requests/{request_id}")
    async def delete_request(request_id: str) -> Response:
        return await _abort(state, request_id)

    @app.post("/requests/{request_id}/abort")
    async def abort_request(request_id: str) -> Response:
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
    kv = engine.scheduler.kv
    leaves = [n for n in kv.prefix_cache.nodes() if n.parent is not None and not n.children]
    paths = sorted((_path(leaf) for leaf in leaves), key=lambda path: -sum(n.num_tokens for n in path))
    usage = kv.usage()
    return {
        "block_size": kv.block_size,
        "num_blocks": {
            "free": sum(u.num_free for u in usage),
            "reusable": sum(u.num_reusable for u in usage),
            "used": sum(u.num_held for u in usage),
        },
        "num_prefixes": len(paths),
        "prefixes": [_prefix(engine, path, preview) for path in paths[:limit]],
    }


def _path(node: PrefixNode | None) -> list[PrefixNode]:
    """From the first block to the node."""
    path = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _prefix(engine: Engine, path: list[PrefixNode], preview: bool) -> dict[str, Any]:
    pools = engine.scheduler.kv.pools
    num_references = max(
        (
            pool.blocks[block_id].ref_count
            for node in path
            for pool, block_id in zip(pools, node.block_ids, strict=True)
            if block_id != NO_BLOCK
        ),
        default=0,
    )
    listed: dict[str, Any] = {
        "hash": next((node.block_hash.hex() for node in reversed(path) if node.block_hash), None),
        "num_tokens": sum(node.num_tokens for node in path),
        "num_references": num_references,
    }
    if preview and engine.tokenizer is not None:
        token_ids = array("i", b"".join(node.token_bytes for node in path))[:PREVIEW_TOKENS]
        listed["preview"] = engine.tokenizer.decode(token_ids, skip_special_tokens=False)
    return listed
