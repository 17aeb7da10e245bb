"""What a request must satisfy before it is accepted, so that nothing can go wrong with it in a step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pagoda.errors import RequestError
from pagoda.sampling_params import SamplingParams


def checked_prompt(
    token_ids: Sequence[int], params: SamplingParams, *, vocab_size: int, max_model_len: int
) -> array[int]:
    """The prompt as an array.

    Raises:
        RequestError: it is empty, has an id outside the vocabulary, or leaves no room for a token of
            output (which `max_tokens` 0 does not need).
    """
    if len(token_ids) == 0:
        raise RequestError("the prompt is empty; it must have at least one token", param="prompt")
    _check_token_ids(token_ids, "prompt", vocab_size)
    num_output_tokens = 0 if params.max_tokens == 0 else 1
    if len(token_ids) + num_output_tokens > max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens; with at least {num_output_tokens} of output that is "
            f"more than max_model_len, which is {max_model_len}",
            param="prompt",
            hint="shorten the prompt, or start with a larger --max-model-len",
        )
    return array("i", list(token_ids))  # a list, because bytes would be read as raw memory


def checked_params(
    params: SamplingParams, num_prompt_tokens: int, *, vocab_size: int, max_model_len: int
) -> SamplingParams:
    """The parameters with `max_tokens` resolved: None becomes what fits after the prompt.

    Raises:
        RequestError: prompt and `max_tokens` do not fit together, or an id is outside the vocabulary.
    """
    _check_token_ids(params.logit_bias, "logit_bias", vocab_size)
    _check_token_ids(params.stop_token_ids, "stop_token_ids", vocab_size)
    num_left = max_model_len - num_prompt_tokens
    if params.max_tokens is None:
        return replace(params, max_tokens=num_left)
    if params.max_tokens > num_left:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {params.max_tokens}, together "
            f"{num_prompt_tokens + params.max_tokens}; max_model_len is {max_model_len}",
            param="max_tokens",
            hint=f"ask for at most {num_left} tokens, or leave max_tokens unset to use what fits",
        )
    return params


def _check_token_ids(token_ids: Iterable[int], param: str, vocab_size: int) -> None:
    for token_id in token_ids:
        # True is an int to Python, and never a token that somebody means.
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__") or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} has {token_id!r}; token ids of this model are 0 to {vocab_size - 1}", param=param
            )
