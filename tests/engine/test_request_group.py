"""What a client gets of a request with several choices, and when."""

from __future__ import annotations

from pagoda.core.request import FinishReason, Request, RequestOutputDelta
from pagoda.core.step import PromptLogprob, SampledToken, TokenLogprob
from pagoda.engine.choice import Choice
from pagoda.engine.output import OutputKind
from pagoda.engine.request_group import RequestGroup
from pagoda.sampling_params import SamplingParams


def make_group() -> RequestGroup:
    params = SamplingParams(prompt_logprobs=0, max_tokens=4)
    requests = [Request(str(i), [1, 2, 3], params, seed=i) for i in range(2)]
    choices = [Choice(i, params, None) for i in range(2)]
    kind = OutputKind.DELTA
    return RequestGroup("r", requests, choices, prompt=None, output_kind=kind, tokenizer=None)


def say(choice: Choice, token_id: int) -> None:
    choice.take(RequestOutputDelta(str(choice.index), (SampledToken(token_id),)))


def prompt_logprobs(*positions: int) -> list[PromptLogprob]:
    return [PromptLogprob(position, TokenLogprob(position + 1, -1.0)) for position in positions]


def test_no_output_comes_before_the_log_probabilities_of_the_prompt() -> None:
    """The second choice may start before the first, if that was preempted in its prompt."""
    group = make_group()
    first, second = group.choices
    group.add_prompt_logprobs(prompt_logprobs(1))
    for token_id in (7, 8):
        say(second, token_id)
        assert group.take_output(0.0, [second]) is None
    group.add_prompt_logprobs(prompt_logprobs(2))
    say(first, 9)
    output = group.take_output(0.0, [first])
    assert output is not None and output.prompt_logprobs is not None and len(output.prompt_logprobs) == 3
    assert {c.index: list(c.token_ids) for c in output.outputs} == {0: [9], 1: [7, 8]}
    say(second, 10)
    later = group.take_output(0.0, [second])
    assert later is not None and later.prompt_logprobs is None
    assert [list(c.token_ids) for c in later.outputs] == [[10]]


def test_nobody_waits_for_log_probabilities_that_cannot_come() -> None:
    group = make_group()
    first, second = group.choices
    first.finish(FinishReason.ERROR.value, error="broken")
    group.note_finished()
    output = group.take_output(0.0, [first])
    assert output is not None and output.prompt_logprobs is None
    say(second, 7)
    assert group.take_output(0.0, [second]) is not None
