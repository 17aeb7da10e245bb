"""Bodies of requests: OpenAI's fields, vLLM's, and a few of our own.

Types are checked here; ranges where they mean something (`SamplingParams`); what is known and cannot be
honoured is refused in `unsupported.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_REQUEST_ID_LENGTH = 128


class Body(BaseModel):
    """Values keep their JSON type: "5" is no number. Further fields are looked at in `unsupported.py`."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="vLLM's: usage in every chunk.")


class JSONSchemaFormat(BaseModel):
    """`strict` makes no difference: a schema is always kept to, or refused."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's; one of the first five."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class GenerationBody(Body):
    """What both endpoints have in common."""

    model: str | None = Field(None, description="One of the names of /v1/models; the served one if absent.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: int | None = Field(None, description="Choices, each with its own seed.", examples=[1])
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(
        None, description="Token ids, as JSON keys, to what is added to their logits.", examples=[{"1": -10}]
    )
    seed: int | None = Field(None, examples=[7])
    max_tokens: int | None = Field(None, examples=[16])
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = Field(None, description="Adds token ids of prompt and choices.")

    response_format: ResponseFormat | None = Field(None, examples=[{"type": "text"}])
    structured_outputs: StructuredOutputs | None = Field(None, examples=[{"choice": ["yes", "no"]}])

    priority: int | None = Field(None, description="Lower is sooner, under --scheduling-policy priority.")
    cache_salt: str | None = Field(None, description="Shares cached prefixes with the same salt only.")
    cache: bool | None = Field(None, description="false: neither uses nor fills the prefix cache.")
    request_id: str | None = Field(None, max_length=MAX_REQUEST_ID_LENGTH, pattern=r"^[\x21-\x7e]+$")
    timings: bool | None = Field(None, description="Adds times in seconds to the answer.")


class ChatCompletionBody(GenerationBody):
    messages: list[dict[str, Any]] = Field(examples=[[{"role": "user", "content": "Hello!"}]])
    max_completion_tokens: int | None = Field(None, examples=[16])
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = Field(None, description="Prepends the final message, if it is continued.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = Field(None, examples=[[]])
    tool_choice: str | dict[str, Any] | None = Field(None, examples=["auto"])
    parallel_tool_calls: bool | None = Field(None, description="false: one tool call at most.")


class CompletionBody(GenerationBody):
    prompt: str | list[str] | list[int] | list[list[int]] = Field(examples=["Once upon a time"])
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = Field(None, description="Whether a text starts with BOS.")


class TokenizeBody(Body):
    """`prompt`, or `messages` as in a chat."""

    model: str | None = None
    prompt: str | None = Field(None, examples=["Once upon a time"])
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = Field(None, examples=[[]])
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int] = Field(examples=[[1, 2, 3]])
