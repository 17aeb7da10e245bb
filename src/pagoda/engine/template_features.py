"""What a chat template can do, found out by rendering it, not by looking for words in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagoda.engine.chat_template import ChatTemplate
from pagoda.errors import RequestError

_PROBE = "Answer in rhyme."
_TOOL: dict[str, object] = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """`refused`: the template raises an error; `ignored`: it renders, and leaves the thing out."""

    system: Literal["shown", "ignored", "refused"]
    tools: Literal["shown", "ignored", "refused"]
    thinking: Literal["none", "always", "switchable"]  # switchable: by `enable_thinking`
    problem: str | None = None  # why a plain question cannot be rendered


def template_features(template: ChatTemplate) -> TemplateFeatures:
    """Render a few short chats and see what of them is in the text."""
    question = {"role": "user", "content": "Hello"}
    try:
        template.render([question], add_generation_prompt=True)
        problem = None
    except RequestError as error:
        problem = error.message
    return TemplateFeatures(
        system=_fate(template, _PROBE, [{"role": "system", "content": _PROBE}, question]),
        tools=_fate(template, "probe_tool", [question], tools=[_TOOL])
        if template.supports_tools
        else "ignored",
        thinking=_thinking(template),
        problem=problem,
    )


def _fate(
    template: ChatTemplate,
    probe: str,
    messages: list[dict[str, str]],
    tools: list[dict[str, object]] | None = None,
) -> Literal["shown", "ignored", "refused"]:
    try:
        text = template.render(messages, tools=tools, add_generation_prompt=True)
    except RequestError:
        return "refused"
    return "shown" if probe in text else "ignored"


def _thinking(template: ChatTemplate) -> Literal["none", "always", "switchable"]:
    if "enable_thinking" in template.variables:
        return "switchable"
    return "always" if "<think>" in template.source else "none"
