"""`Generation`: one call of a client while it is answered, over one request of the engine a prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from pagoda.core.request import FinishReason
from pagoda.engine.output import OutputKind, RequestOutput
from pagoda.engine.request_stream import EngineRequest, RequestStream
from pagoda.engine.validation import checked_params, checked_prompt
from pagoda.errors import PagodaError, RequestError
from pagoda.sampling_params import SamplingParams
from pagoda.server.errors import APIError, as_api_error
from pagoda.server.params import with_limit
from pagoda.server.protocol import GenerationBody
from pagoda.server.state import ServerState

T = TypeVar("T")
INLINE_CHARACTERS = 4096  # longer texts are tokenised in another thread, so that streams go on


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str | None  # as the client sent it; None for token ids
    token_ids: Sequence[int]


class Generation:
    """Holds what responses say about the whole call: id, usage, timings. `end` must be called."""

    def __init__(
        self, state: ServerState, public_id: str, model: str, requests: Sequence[EngineRequest],
        prompts: Sequence[Prompt], stream: RequestStream,
    ) -> None:  # fmt: skip
        self.public_id = public_id
        self.model = model
        self.created_s = int(time.time())
        self.requests = requests
        self.prompts = prompts
        self.request_ids = [request.request_id for request in requests]
        self._state = state
        self._stream = stream
        self._latest: dict[str, RequestOutput] = {}
        state.active[public_id] = self

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Outputs with the number of their prompt.

        Raises:
            APIError: 500, a choice could not be generated.
        """
        numbers = {request_id: number for number, request_id in enumerate(self.request_ids)}
        async for output in self._stream:
            self._latest[output.request_id] = output
            for choice in output.outputs:
                if choice.finish_reason == FinishReason.ERROR.value:
                    raise APIError(500, f"generation failed: {choice.error}", code="generation_failed")
            yield numbers[output.request_id], output

    async def collect(self) -> list[RequestOutput]:
        """The final outputs, in the order of the prompts."""
        final: dict[int, RequestOutput] = {}
        async for number, output in self.outputs():
            if output.finished:
                final[number] = output
        return [final[number] for number in range(len(self.requests))]

    def end(self) -> None:
        """Nobody waits any more: what is unfinished is aborted."""
        self._stream.cancel()
        if self._state.active.get(self.public_id) is self:
            del self._state.active[self.public_id]

    def usage(self) -> dict[str, Any]:
        """So far. A prompt counts once, however many choices it has."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_output = sum(output.metrics.num_output_tokens for output in self._latest.values())
        num_cached = sum(output.num_cached_tokens for output in self._latest.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def timings(self) -> dict[str, Any]:
        """Seconds, over all prompts of the call; null where it has not happened."""
        metrics = [output.metrics for output in self._latest.values()]
        queue_s = [m.queue_s for m in metrics if m.queue_s is not None]
        ttft_s = [m.ttft_s for m in metrics if m.ttft_s is not None]
        e2e_s = [m.e2e_s for m in metrics if m.e2e_s is not None]
        num_output = sum(m.num_output_tokens for m in metrics)
        decode_s = max(e2e_s) - min(ttft_s) if e2e_s and ttft_s else 0.0
        return {
            "queue_s": max(queue_s, default=None),
            "ttft_s": min(ttft_s, default=None),
            "e2e_s": max(e2e_s, default=None),
            "output_tokens_per_s": (num_output - 1) / decode_s if decode_s > 0 and num_output > 1 else None,
            "num_preemptions": sum(m.num_preemptions for m in metrics),
        }


async def start_generation(
    state: ServerState,
    body: GenerationBody,
    params: SamplingParams,
    prompts: Sequence[Prompt],
    *,
    kind: str,
    arrival_s: float,
    default_max_tokens: int | None,
) -> Generation:
    """Have the engine accept the call: all prompts, or none.

    Raises:
        APIError: 400, 429 or 503; nothing has been sent then.
    """
    request_id = body.request_id or uuid4().hex
    public_id = request_id if request_id.startswith(kind) else f"{kind}-{request_id}"
    if public_id in state.active:
        raise APIError(400, f"the request id {request_id!r} is in use", param="request_id")
    requests = [
        EngineRequest(
            request_id=public_id if len(prompts) == 1 else f"{public_id}-{number}",
            prompt=prompt.token_ids,
            params=with_limit(
                params,
                len(prompt.token_ids),
                state.max_model_len,
                state.config.max_output_tokens,
                default_max_tokens,
            ),
            output_kind=OutputKind.DELTA if body.stream else OutputKind.FINAL,
            arrival_s=arrival_s,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or None,
            use_cache=body.cache is not False,
        )
        for number, prompt in enumerate(prompts)
    ]
    try:
        _check_queue(state, requests)
        stream = await state.engine.submit(requests)
    except PagodaError as error:
        raise _told_in_fields_of(body, as_api_error(error)) from error
    return Generation(state, public_id, state.served_name(body.model), requests, prompts, stream)


def _check_queue(state: ServerState, requests: Sequence[EngineRequest]) -> None:
    """A request that is wrong is told so, rather than to come back when there is room."""
    try:
        state.check_queue(
            sum(r.params.n for r in requests), sum(len(r.prompt) * r.params.n for r in requests)
        )
    except APIError:
        engine = state.engine.engine
        limits = {"vocab_size": engine.vocab_size, "max_model_len": engine.max_model_len}
        for r in requests:
            assert not isinstance(r.prompt, str)
            checked_prompt(r.prompt, r.params, **limits)
            checked_params(r.params, len(r.prompt), **limits)
        raise


def _told_in_fields_of(body: GenerationBody, error: APIError) -> APIError:
    if (error.param or "").startswith("structured_outputs") and body.structured_outputs is None:
        error.param = "response_format" if body.response_format is not None else "tools"
    if error.param == "prompt" and not hasattr(body, "prompt"):
        error.param = "messages"
    if error.param in ("prompt", "messages", "max_tokens") and error.code is None:
        error.code = "context_length_exceeded" if "max_model_len" in error.message else None
    if error.param == "max_tokens" and getattr(body, "max_completion_tokens", None) is not None:
        error.param = "max_completion_tokens"
    return error


async def tokenise(num_characters: int, encode: Callable[[], T]) -> T:
    """`encode()`, away from the event loop when the text is long."""
    if num_characters <= INLINE_CHARACTERS:
        return encode()
    return await asyncio.to_thread(encode)


def check_priority(state: ServerState, body: GenerationBody) -> None:
    """
    Raises:
        RequestError: a priority was given, and the scheduler would not look at it.
    """
    policy = state.engine.engine.scheduler.config.scheduling_policy
    if body.priority and policy != "priority":
        raise RequestError(
            f"priority is {body.priority}, and requests are served in order of arrival here",
            param="priority",
            hint="start the server with --scheduling-policy priority",
        )
