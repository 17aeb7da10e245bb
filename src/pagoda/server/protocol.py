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

    include_usage: bool | None = Field(None, description="A last chunk without choices has the usage.")
    continuous_usage_stats: bool | None = Field(None, description="vLLM's: usage in every chunk.")


class JSONSchemaFormat(BaseModel):
    """`strict` makes no difference: a schema is always kept to, or refused."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str = Field(description="A name of the client's own; changes nothing.")
    description: str | None = Field(None, description="Changes nothing.")
    schema_: dict[str, Any] | bool = Field(alias="schema", description="JSON schema of the answer.")
    strict: bool | None = Field(None, description="Changes nothing.")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"] = Field(description="json_object is any JSON object.")
    json_schema: JSONSchemaFormat | None = Field(None, description="Needed by the type json_schema.")


class StructuredOutputs(BaseModel):
    """vLLM's; one of the first five."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    json_: dict[str, Any] | str | bool | None = Field(
        None, alias="json", description="JSON schema, as an object or its text."
    )
    regex: str | None = Field(None, description="Must match the whole answer.")
    choice: list[str] | None = Field(None, description="The answer is one of these texts.")
    grammar: str | None = Field(None, description="In Lark's notation or llama.cpp's GBNF.")
    json_object: bool | None = Field(None, description="true: any JSON object.")
    disable_any_whitespace: bool | None = Field(
        None, description="No space or line break between the tokens of JSON."
    )


class GenerationBody(Body):
    """What both endpoints have in common."""

    model: str | None = Field(None, description="One of the names of /v1/models; the served one if absent.")
    stream: bool | None = Field(None, description="Answer in server-sent events, token by token.")
    stream_options: StreamOptions | None = Field(None, description="Needs stream.")

    n: int | None = Field(None, description="Choices, each with its own seed.", examples=[1])
    temperature: float | None = Field(None, description="0 is greedy; at most 100.")
    top_p: float | None = Field(
        None,
        description="Keeps the likeliest tokens up to this probability together; above 0, at most 1.",
    )
    top_k: int | None = Field(None, description="Keeps so many of the likeliest tokens; 0 or -1 keeps all.")
    min_p: float | None = Field(
        None, description="Keeps tokens at least this likely, relative to the likeliest; 0 to 1."
    )
    repetition_penalty: float | None = Field(
        None, description="Above 1 makes tokens of prompt and answer less likely; above 0, at most 100."
    )
    presence_penalty: float | None = Field(
        None, description="Taken from the logits of tokens in the answer; -2 to 2."
    )
    frequency_penalty: float | None = Field(
        None, description="Taken from them once per time the token came; -2 to 2."
    )
    logit_bias: dict[str, float] | None = Field(
        None, description="Token ids, as JSON keys, to what is added to their logits.", examples=[{"1": -10}]
    )
    seed: int | None = Field(
        None, examples=[7], description="The same seed gives the same answer; a random one if absent."
    )
    max_tokens: int | None = Field(
        None,
        examples=[16],
        description="Tokens of a choice at most; 0 computes the prompt. Absent: 16, in chats all that fit.",
    )
    min_tokens: int | None = Field(None, description="No end token and no stop before so many tokens.")
    stop: str | list[str] | None = Field(None, description="Texts that end a choice, left out of it.")
    stop_token_ids: list[int] | None = Field(None, description="Tokens that end a choice.")
    ignore_eos: bool | None = Field(None, description="Go on past the model's end tokens.")
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the text or token that ended a choice."
    )
    skip_special_tokens: bool | None = Field(None, description="Leave control tokens out of the text.")
    prompt_logprobs: int | None = Field(
        None, description="Top log-probabilities of each prompt token; a stream has them at its start."
    )
    return_token_ids: bool | None = Field(None, description="Adds token ids of prompt and choices.")

    response_format: ResponseFormat | None = Field(
        None, examples=[{"type": "text"}], description="OpenAI's form of structured output."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, examples=[{"choice": ["yes", "no"]}], description="vLLM's form of structured output."
    )

    priority: int | None = Field(None, description="Lower is sooner, under --scheduling-policy priority.")
    cache_salt: str | None = Field(None, description="Shares cached prefixes with the same salt only.")
    cache: bool | None = Field(None, description="false: neither uses nor fills the prefix cache.")
    request_id: str | None = Field(
        None,
        max_length=MAX_REQUEST_ID_LENGTH,
        pattern=r"^[\x21-\x7e]+$",
        description="Becomes part of the answer's id; a new one if absent.",
    )
    timings: bool | None = Field(None, description="Adds times in seconds to the answer.")


class ChatCompletionBody(GenerationBody):
    messages: list[dict[str, Any]] = Field(
        examples=[[{"role": "user", "content": "Hello!"}]], description="The chat so far."
    )
    max_completion_tokens: int | None = Field(
        None, examples=[16], description="A newer name of max_tokens; comes before it."
    )
    logprobs: bool | None = Field(None, description="Adds the log-probability of each token.")
    top_logprobs: int | None = Field(
        None, description="How many of the likeliest tokens to list with it; needs logprobs."
    )
    echo: bool | None = Field(None, description="Prepends the final message, if it is continued.")
    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's message; true unless the final message is continued."
    )
    continue_final_message: bool | None = Field(None, description="The answer goes on from the last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the chat template."
    )
    tools: list[dict[str, Any]] | None = Field(
        None, examples=[[]], description="Functions that the model may call, as OpenAI describes them."
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None, examples=["auto"], description="auto, none, required, or the function to call."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one tool call at most.")


class CompletionBody(GenerationBody):
    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        examples=["Once upon a time"], description="Text or token ids, one or several; each has its choices."
    )
    echo: bool | None = Field(None, description="Prepends the prompt.")
    logprobs: int | None = Field(
        None, description="Top log-probabilities of each token; 0 gives those of the tokens themselves."
    )
    best_of: int | None = Field(None, description="Can only equal n.")
    add_special_tokens: bool | None = Field(None, description="Whether a text starts with BOS.")


class TokenizeBody(Body):
    """`prompt`, or `messages` as in a chat."""

    model: str | None = Field(None, description="One of the names of /v1/models; the served one if absent.")
    prompt: str | None = Field(None, examples=["Once upon a time"], description="A text.")
    messages: list[dict[str, Any]] | None = Field(None, description="A chat, put through the chat template.")
    add_special_tokens: bool | None = Field(None, description="Whether a text starts with BOS.")
    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's message; true unless the final message is continued."
    )
    continue_final_message: bool | None = Field(None, description="Leave the last message open.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the chat template."
    )
    tools: list[dict[str, Any]] | None = Field(
        None, examples=[[]], description="Functions that the template is told."
    )
    return_token_strs: bool | None = Field(None, description="Adds the text of each token.")


class DetokenizeBody(Body):
    model: str | None = Field(None, description="One of the names of /v1/models; the served one if absent.")
    tokens: list[int] = Field(examples=[[1, 2, 3]], description="Token ids.")


class UnpinBody(BaseModel):
    """`prompt`, `messages` or `hash`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | list[int] | None = Field(None, description="Text or token ids that the prefix begins.")
    messages: list[dict[str, Any]] | None = Field(
        None, description="A chat, or its beginning, put through the chat template."
    )
    tools: list[dict[str, Any]] | None = Field(
        None, examples=[[]], description="Functions that the template is told; goes with messages."
    )
    add_generation_prompt: bool | None = Field(None, description="Begin the assistant's message.")
    continue_final_message: bool | None = Field(None, description="Leave the last message open.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the chat template."
    )
    hash: str | None = Field(None, description="As `GET /cache` lists it.")
    cache_salt: str | None = Field(None, description="That of the requests; does not go with hash.")
    add_special_tokens: bool | None = Field(None, description="Whether a text starts with BOS.")


class PinBody(UnpinBody):
    ttl_s: float | None = Field(None, description="Seconds after which the pin ends; absent: for good.")
