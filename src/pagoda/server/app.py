"""The FastAPI application: OpenAI's endpoints, and what belongs to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request, Response
from starlette.middleware.cors import CORSMiddleware

from pagoda import __version__
from pagoda.engine.chat_messages import normalize_messages
from pagoda.errors import RequestError
from pagoda.server import admin, errors
from pagoda.server.answers import AnswerFormat, ChatFormat, CompletionFormat, answer_events, whole_answer
from pagoda.server.errors import JSONBody
from pagoda.server.generation import Generation, check_priority, start_generation, tokenise
from pagoda.server.metric_families import CONTENT_TYPE, metrics_text
from pagoda.server.middleware import (
    AuthMiddleware,
    BodyLimitMiddleware,
    LastResort,
    RequestIdMiddleware,
    RootPathMiddleware,
)
from pagoda.server.params import COMPLETION_MAX_TOKENS, chat_params, completion_params
from pagoda.server.prompts import chat_prompt, completion_prompts
from pagoda.server.protocol import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from pagoda.server.sse import EventStreamResponse, finish_unless_gone
from pagoda.server.state import Phase, ServerConfig, ServerState
from pagoda.server.tools import tool_use
from pagoda.server.unsupported import refuse_unsupported

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
CLIENT_CLOSED_REQUEST = 499  # nginx's: nobody reads the answer


def create_app(state: ServerState, lifespan: Lifespan | None = None) -> FastAPI:
    """All routes over one state. `lifespan` runs around the serving, to load and close the engine."""
    app = FastAPI(
        title="Pagoda",
        version=__version__,
        docs_url=None,  # the page would load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    _add_openai_routes(app, state)
    _add_token_routes(app, state)
    _add_status_routes(app, state)
    admin.add_routes(app, state)
    errors.add_handlers(app)
    _add_middleware(app, state.config)
    return app


def _add_middleware(app: FastAPI, config: ServerConfig) -> None:
    """The last one added is the outermost."""
    app.add_middleware(LastResort)
    app.add_middleware(BodyLimitMiddleware, max_bytes=config.max_body_bytes)
    if config.api_keys or config.admin_api_keys:
        app.add_middleware(AuthMiddleware, config=config)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestIdMiddleware)
    if config.root_path:
        app.add_middleware(RootPathMiddleware, root_path=config.root_path)


def _add_openai_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionBody, request: Request) -> Response:
        """OpenAI's chat completions: an assistant's next message."""
        arrival_s = time.monotonic()
        _check(state, body)
        params = chat_params(body)
        tools = tool_use(body, state.tokenizer, state.config.tool_call_parser)
        if tools is not None:
            params = tools.apply(params)
        prompt = await chat_prompt(state, body, body.tools if tools is not None else None)
        prefix = ""
        if body.echo and body.continue_final_message:
            prefix = normalize_messages(body.messages)[-1]["content"]
        made = ChatFormat(body, params, state.tokenizer, prefix, tools)
        generation = await start_generation(
            state, body, params, [prompt], kind="chatcmpl", arrival_s=arrival_s, default_max_tokens=None
        )
        return await _respond(generation, made, body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """OpenAI's completions: how prompts go on."""
        arrival_s = time.monotonic()
        _check(state, body)
        params = completion_params(body)
        prompts = await completion_prompts(state, body)
        made = CompletionFormat(body, params, state.tokenizer, prompts)
        generation = await start_generation(
            state,
            body,
            params,
            prompts,
            kind="cmpl",
            arrival_s=arrival_s,
            default_max_tokens=COMPLETION_MAX_TOKENS,
        )
        return await _respond(generation, made, body, request)

    @app.get("/v1/models")
    async def models() -> Response:
        """The names that the model is served under."""
        return JSONBody(
            {"object": "list", "data": [_model(state, n) for n in state.config.served_model_names]}
        )

    @app.get("/v1/models/{name:path}")
    async def model(name: Annotated[str, Path(description="A name.")]) -> Response:
        """One of those names; 404 if it is not served."""
        return JSONBody(_model(state, state.served_name(name)))


def _check(state: ServerState, body: GenerationBody) -> None:
    _ = state.engine  # 503 comes before 400
    state.served_name(body.model)
    refuse_unsupported(body)
    check_priority(state, body)


async def _respond(
    generation: Generation, made: AnswerFormat, body: GenerationBody, request: Request
) -> Response:
    if body.stream:
        return EventStreamResponse(answer_events(generation, made, body), generation.end)
    try:
        answer = await finish_unless_gone(
            whole_answer(generation, made, timings=bool(body.timings)), request.receive
        )
    finally:
        generation.end()
    return Response(status_code=CLIENT_CLOSED_REQUEST) if answer is None else JSONBody(answer)


def _model(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created_s,
        "owned_by": "pagoda",
        "root": state.model_name,
        "parent": None,
        "max_model_len": state.max_model_len,
    }


def _add_token_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of `prompt`, or of `messages` as in a chat."""
        tokenizer = state.tokenizer
        state.served_name(body.model)
        refuse_unsupported(body)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if body.prompt is None:
            token_ids = (await chat_prompt(state, body, body.tools)).token_ids
        else:
            encode = partial(
                tokenizer.encode, body.prompt, add_special_tokens=body.add_special_tokens is not False
            )
            token_ids = await tokenise(len(body.prompt), encode)
        texts = [tokenizer.decode([t], skip_special_tokens=False) for t in token_ids]
        return JSONBody(
            {
                "count": len(token_ids),
                "max_model_len": state.max_model_len,
                "tokens": list(token_ids),
                "token_strs": texts if body.return_token_strs else None,
            }
        )

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        """Text of token ids."""
        tokenizer = state.tokenizer
        state.served_name(body.model)
        refuse_unsupported(body)
        vocab_size = state.engine.engine.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"tokens has {token_id}; token ids of this model are 0 to {vocab_size - 1}",
                    param="tokens",
                )
        return JSONBody({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _add_status_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Whether the process lives and its engine works; 200 while it loads, too."""
        engine = state.loaded_engine
        failure = engine.failure if engine is not None else None
        if state.phase is Phase.FAILED or failure is not None:
            return JSONBody({"status": "failed", "error": failure}, 503)
        return JSONBody({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests are answered: 503 while loading or draining."""
        return JSONBody({"status": state.phase.value}, 200 if state.phase is Phase.READY else 503)

    @app.get("/version")
    async def version() -> Response:
        """Version of the server."""
        return JSONBody({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(metrics_text(state.metrics), media_type=CONTENT_TYPE)
