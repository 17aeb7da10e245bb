"""What a body says, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from pagoda.errors import RequestError
from pagoda.server.generation import Prompt, tokenise
from pagoda.server.protocol import CompletionBody
from pagoda.server.state import ServerState


class ChatBody(Protocol):
    """The fields that make a chat's prompt."""

    messages: Any
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


async def chat_prompt(
    state: ServerState, body: ChatBody, tools: Sequence[Any] | None = None, *, begins_answer: bool = True
) -> Prompt:
    """`messages` through the chat template. `begins_answer` is whether that is open for the assistant's
    message where the body does not say it.

    Raises:
        RequestError: the template refuses them.
    """
    tokenizer = state.tokenizer
    messages = body.messages or []
    add_generation_prompt = body.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = begins_answer and not body.continue_final_message

    def encode() -> list[int]:
        return tokenizer.encode_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs,
        )

    return Prompt(None, await tokenise(sum(len(str(m.get("content"))) for m in messages), encode))


async def completion_prompts(state: ServerState, body: CompletionBody) -> list[Prompt]:
    """One or several, as text or token ids."""
    tokenizer = state.tokenizer
    add_special_tokens = body.add_special_tokens is not False
    given: Sequence[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not given:
        raise RequestError("prompt is empty; it must have at least one token", param="prompt")
    if isinstance(given[0], int):
        given = [given]
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            encode = partial(tokenizer.encode, prompt, add_special_tokens=add_special_tokens)
            prompts.append(Prompt(prompt, await tokenise(len(prompt), encode)))
        else:
            prompts.append(Prompt(None, prompt))
    return prompts
