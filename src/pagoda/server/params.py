"""From the body of a request to `SamplingParams`."""

from __future__ import annotations

import re
from dataclasses import replace

from pagoda.errors import RequestError
from pagoda.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredOutputsParams
from pagoda.server.protocol import ChatCompletionBody, CompletionBody, GenerationBody

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions

SAME_NAME = (  # fields that are those of `SamplingParams`
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)
_INTEGER = re.compile(r"\d{1,18}")


def chat_params(body: ChatCompletionBody) -> SamplingParams:
    """
    Raises:
        RequestError: a value is out of range, or two fields contradict each other.
    """
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs is {body.top_logprobs}; it must be between 0 and {MAX_LOGPROBS}",
            param="top_logprobs",
        )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _common(body, max_tokens, logprobs)
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        raise RequestError(
            f"max_completion_tokens is {body.max_completion_tokens}; it must be 1 or more",
            param="max_completion_tokens",
        )
    return params


def completion_params(body: CompletionBody) -> SamplingParams:
    """`max_tokens` is None where the body has none: the default depends on the room there is.

    Raises:
        RequestError: a value is out of range, or two fields contradict each other.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(
            f"best_of is {body.best_of}; choices are not ranked, so it can only equal n", param="best_of"
        )
    params = _common(body, body.max_tokens, body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        return replace(params, prompt_logprobs=body.logprobs)
    return params


def with_limit(
    params: SamplingParams, num_prompt_tokens: int, max_model_len: int, cap: int | None, default: int | None
) -> SamplingParams:
    """The parameters with `max_tokens` as the operator's `cap` and the default leave it.

    What the client asks for itself is never lowered to what fits: that is refused later, with the numbers.
    """
    max_tokens = params.max_tokens
    room = max(1, max_model_len - num_prompt_tokens)
    if max_tokens is None and default is not None:
        max_tokens = min(default, room)
    if cap is not None:
        max_tokens = min(cap, room) if max_tokens is None else min(max_tokens, cap)
    if max_tokens == params.max_tokens:
        return params
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}; at most {max_tokens} tokens may be generated here",
            param="min_tokens",
        )
    return replace(params, max_tokens=max_tokens)


def _common(body: GenerationBody, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    stop = () if body.stop is None else body.stop
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias),
        structured_outputs=structured_outputs(body),
    )


def structured_outputs(body: GenerationBody) -> StructuredOutputsParams | None:
    """What `response_format` or `structured_outputs` asks for.

    Raises:
        RequestError: they contradict themselves or each other.
    """
    wanted, given = body.response_format, body.structured_outputs
    if given is not None:
        if wanted is not None and wanted.type != "text":
            raise RequestError("structured_outputs and response_format exclude each other",
                param="structured_outputs")  # fmt: skip
        return StructuredOutputsParams(
            json=given.json_,
            regex=given.regex,
            choice=given.choice,
            grammar=given.grammar,
            json_object=given.json_object,
            disable_any_whitespace=bool(given.disable_any_whitespace),
        )
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.json_schema is None:
        raise RequestError("response_format.json_schema is missing", param="response_format.json_schema")
    return StructuredOutputsParams(json=wanted.json_schema.schema_)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    if not bias:
        return {}
    for key in bias:
        if not _INTEGER.fullmatch(key):
            raise RequestError(
                f'logit_bias has the key {key!r}; keys are token ids, such as "50256"', param="logit_bias"
            )
    return {int(key): value for key, value in bias.items()}
