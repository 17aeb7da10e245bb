"""Answers in the two endpoints' formats: whole, or as chunks of a stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from pagoda.engine.output import CompletionOutput, RequestOutput, TokenLogprobs
from pagoda.engine.tokenizer import Tokenizer
from pagoda.engine.tool_parser import ReplyDelta
from pagoda.sampling_params import SamplingParams
from pagoda.server.errors import as_api_error
from pagoda.server.generation import Generation, Prompt
from pagoda.server.logprobs import LogprobsFormat, prompt_logprobs_json
from pagoda.server.protocol import ChatCompletionBody, CompletionBody, GenerationBody
from pagoda.server.sse import DONE, error_event, event
from pagoda.server.tools import ToolReplies, ToolUse, chunk_fields, message_fields

log = logging.getLogger(__name__)


class AnswerFormat(Protocol):
    """Makes the entries of `choices` of one call; knows which of them have started."""

    object_name: str
    chunk_object_name: str

    def choice(self, number: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """A whole choice of prompt `number`."""

    def chunk(self, number: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any] | None:
        """What a step added to a choice; None when there is nothing to tell yet."""

    def extra(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Further fields of a whole answer."""

    def chunk_extra(self, output: RequestOutput) -> dict[str, Any]:
        """Further fields of the next chunk."""


class _ChoiceFormats:
    """One `LogprobsFormat` a choice, made when the choice starts."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._started: dict[int, LogprobsFormat] = {}
        self._make: Callable[[], LogprobsFormat] = lambda: LogprobsFormat(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            keeps_stop_token=params.include_stop_str_in_output,
        )

    def get(self, index: int) -> tuple[LogprobsFormat, bool]:
        """The format, and whether this is the choice's start."""
        is_start = index not in self._started
        if is_start:
            self._started[index] = self._make()
        return self._started[index], is_start


class ChatFormat:
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self,
        body: ChatCompletionBody,
        params: SamplingParams,
        tokenizer: Tokenizer,
        prefix: str,
        tools: ToolUse | None = None,
    ) -> None:
        self._replies = None if tools is None else ToolReplies(tools)
        self._body = body
        self._num_top = params.logprobs
        self._formats = _ChoiceFormats(tokenizer, params)
        self._prefix = prefix  # echo of the message that is continued
        self._told_prompt_logprobs = False

    def choice(self, number: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        reply = self._reply(choice)
        message = {"role": "assistant", **message_fields(reply, self._prefix), "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
            **({"token_ids": list(choice.token_ids)} if self._body.return_token_ids else {}),
        }

    def chunk(self, number: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any] | None:
        _, is_start = self._formats.get(choice.index)
        delta = chunk_fields(self._reply(choice))
        if is_start:
            delta = {"role": "assistant", **delta, "content": self._prefix + delta.get("content", "")}
        if not (delta or choice.finished or _tells_tokens(self._body, choice)):
            return None
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(choice),
            "finish_reason": self._finish_reason(choice),
            **({"stop_reason": choice.stop_reason} if choice.finished else {}),
            **_chunk_token_ids(self._body, is_start, output, choice),
        }

    def _reply(self, choice: CompletionOutput) -> ReplyDelta:
        if self._replies is None:
            return ReplyDelta(choice.text)
        return self._replies.read(choice.index, choice.text, choice.finished)

    def _finish_reason(self, choice: CompletionOutput) -> str | None:
        if self._replies is None:
            return choice.finish_reason
        return self._replies.finish_reason(choice.index, choice.finish_reason)

    def extra(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        extra: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs or [])
        if self._body.return_token_ids:
            extra["prompt_token_ids"] = list(output.prompt_token_ids)
        return extra

    def chunk_extra(self, output: RequestOutput) -> dict[str, Any]:
        """The prompt's log-probabilities come with the first output, and are told once."""
        if self._told_prompt_logprobs or self._body.prompt_logprobs is None:
            return {}
        self._told_prompt_logprobs = True
        return {"prompt_logprobs": prompt_logprobs_json(output.prompt_logprobs or [])}

    def _logprobs(self, choice: CompletionOutput) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        return self._formats.get(choice.index)[0].chat(choice, self._num_top)


class CompletionFormat:
    object_name = chunk_object_name = "text_completion"

    def __init__(
        self, body: CompletionBody, params: SamplingParams, tokenizer: Tokenizer, prompts: Sequence[Prompt]
    ) -> None:
        self._body = body
        self._num_choices = params.n
        self._has_logprobs = params.logprobs is not None
        self._formats = _ChoiceFormats(tokenizer, params)
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs | None]] = {}  # by number of the prompt

    def choice(self, number: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        made = self._text(number, output, choice)
        if self._body.return_token_ids:
            made["token_ids"] = list(choice.token_ids)
            made["prompt_token_ids"] = list(output.prompt_token_ids)
        return {**made, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def chunk(self, number: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any] | None:
        _, is_start = self._formats.get(self._index(number, choice))
        if is_start:
            made = self._text(number, output, choice, is_start=True)
        elif choice.text or choice.finished or _tells_tokens(self._body, choice):
            made = self._text(number, output, choice, is_start=False)
        else:
            return None
        return {
            **made,
            "finish_reason": choice.finish_reason,
            **({"stop_reason": choice.stop_reason} if choice.finished else {}),
            **_chunk_token_ids(self._body, is_start, output, choice),
        }

    def extra(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {}

    def chunk_extra(self, output: RequestOutput) -> dict[str, Any]:
        return {}

    def _index(self, number: int, choice: CompletionOutput) -> int:
        return number * self._num_choices + choice.index

    def _text(
        self, number: int, output: RequestOutput, choice: CompletionOutput, is_start: bool = True
    ) -> dict[str, Any]:
        """Text and log-probabilities; those of the prompt come first when it is echoed."""
        index = self._index(number, choice)
        logprobs_format, _ = self._formats.get(index)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[number] = output.prompt_logprobs
        text, logprobs = choice.text, None
        echoes = bool(self._body.echo) and is_start
        if echoes:
            prompt = self._prompts[number]
            text = (self._tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text) + text
        if self._has_logprobs:
            parts = []
            if echoes:
                # There are none if the choice was aborted before its prompt was computed.
                known = self._prompt_logprobs.get(number, [None] * len(output.prompt_token_ids))
                parts.append(logprobs_format.echo(output.prompt_token_ids, known))
            parts.append(logprobs_format.completion(choice))
            logprobs = {key: [entry for part in parts for entry in part[key]] for key in parts[0]}
        made = {"index": index, "text": text, "logprobs": logprobs}
        if self._body.prompt_logprobs is not None and is_start:
            made["prompt_logprobs"] = prompt_logprobs_json(self._prompt_logprobs.get(number, []))
        return made


def _tells_tokens(body: GenerationBody, choice: CompletionOutput) -> bool:
    """Whether a chunk without text is worth sending: it has log-probabilities, ids or a count."""
    counts = body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)
    return bool(choice.token_ids) and bool(choice.logprobs or body.return_token_ids or counts)


def _chunk_token_ids(
    body: GenerationBody, is_start: bool, output: RequestOutput, choice: CompletionOutput
) -> dict[str, Any]:
    if not body.return_token_ids:
        return {}
    prompt = {"prompt_token_ids": list(output.prompt_token_ids)} if is_start else {}
    return {"token_ids": list(choice.token_ids), **prompt}


async def whole_answer(generation: Generation, made: AnswerFormat, *, timings: bool) -> dict[str, Any]:
    outputs = await generation.collect()
    choices = [
        made.choice(number, output, choice)
        for number, output in enumerate(outputs)
        for choice in output.outputs
    ]
    return {
        **_head(generation, made.object_name),
        "choices": choices,
        "usage": generation.usage(),
        **made.extra(outputs),
        **({"timings": generation.timings()} if timings else {}),
    }


async def answer_events(
    generation: Generation, made: AnswerFormat, body: GenerationBody
) -> AsyncIterator[bytes]:
    """Chunks, then the usage if it was asked for, then [DONE]. After a failure: its error, and no [DONE]."""
    head = _head(generation, made.chunk_object_name)
    options = body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    continuous = options is not None and bool(options.continuous_usage_stats)
    num_open = sum(request.params.n for request in generation.requests)
    try:
        async for number, output in generation.outputs():
            for choice in output.outputs:
                entry = made.chunk(number, output, choice)
                if entry is None:
                    continue
                chunk: dict[str, Any] = {**head, "choices": [entry], **made.chunk_extra(output)}
                if continuous:
                    chunk["usage"] = generation.usage()
                elif include_usage:
                    chunk["usage"] = None
                num_open -= choice.finished
                if body.timings and num_open == 0:
                    chunk["timings"] = generation.timings()
                yield event(chunk)
        if include_usage:
            yield event({**head, "choices": [], "usage": generation.usage()})
        yield DONE
    except Exception as error:
        api_error = as_api_error(error)
        if api_error is not error:
            log.exception("the stream %s failed", generation.public_id)
        yield error_event(api_error)


def _head(generation: Generation, object_name: str) -> dict[str, Any]:
    return {
        "id": generation.public_id,
        "object": object_name,
        "created": generation.created_s,
        "model": generation.model,
    }
