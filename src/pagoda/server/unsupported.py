"""Fields that are known and cannot be honoured. The one place to take a line from when one becomes so.

A field that would change the answer and is not honoured is refused, by name. Fields that change nothing
(bookkeeping of the client's) are taken and ignored.
"""

from __future__ import annotations

from typing import Any

from pagoda.server.errors import APIError
from pagoda.server.protocol import Body

IGNORED = frozenset(
    {
        "metadata",
        "prediction",  # a hint about speed
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Name -> values that ask for nothing, besides null.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # Old names of tools and of structured output.
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    # Of OpenAI's.
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    # Of vLLM's.
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "chat_template": (),
    "documents": ([],),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": (),
}

NEWER_NAMES = {
    "functions": "tools",
    "function_call": "tool_choice",
    "guided_json": 'structured_outputs: {"json": ...}',
    "guided_regex": 'structured_outputs: {"regex": ...}',
    "guided_choice": 'structured_outputs: {"choice": ...}',
    "guided_grammar": 'structured_outputs: {"grammar": ...}',
}


def refuse_unsupported(body: Body) -> None:
    """
    Raises:
        APIError: 400 that names the first field that is unknown, or not supported.
    """
    for name, value in (body.model_extra or {}).items():
        if name in IGNORED or (name in UNSUPPORTED and (value is None or value in UNSUPPORTED[name])):
            continue
        if name in UNSUPPORTED:
            message = f"{name} is not supported by this server"
            if name in NEWER_NAMES:
                message += f"; use {NEWER_NAMES[name]}"
            raise APIError(400, message, param=name, code="unsupported")
        raise APIError(400, f"{name} is not a field of this endpoint", param=name, code="unknown_field")
