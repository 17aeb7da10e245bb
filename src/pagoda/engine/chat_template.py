"""`ChatTemplate`: a model's Jinja template, from messages to the text of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from pagoda.engine.chat_messages import normalize_messages, plain_data
from pagoda.errors import ModelFileError, RequestError

# Ends the message to continue while it is rendered; the text is cut there. A noncharacter: no text holds it.
_CONTINUE_HERE = "\ufdef"


class ChatTemplate:
    """A compiled chat template. Rendering is safe from several threads.

    Args:
        source: Jinja source, as in `tokenizer.chat_template`.
        bos_token: Text of the beginning-of-sequence token, "" for none.
        eos_token: Text of the end-of-sequence token, "" for none.
        now: Clock of the template's `strftime_now`.

    Raises:
        ModelFileError: the source is not valid Jinja; the message names the line.
    """

    def __init__(
        self, source: str, *, bos_token: str, eos_token: str, now: Callable[[], datetime] = datetime.now
    ) -> None:
        import jinja2
        import jinja2.meta

        from pagoda.engine import template_sandbox

        self.source = source
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = template_sandbox.TemplateEnvironment(now)
        try:
            self._template = environment.compile_source(source)
            parsed = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(
                f"the chat template is not valid, line {error.lineno}: {error.message}",
                hint="pass another one with --chat-template",
            ) from None
        except (RecursionError, MemoryError):
            raise ModelFileError("the chat template is nested too deeply") from None
        except Exception as error:  # Jinja evaluates constant parts, which may raise anything
            raise ModelFileError(f"the chat template cannot be compiled: {error}") from None
        self.variables: frozenset[str] = frozenset(jinja2.meta.find_undeclared_variables(parsed))

    @property
    def supports_tools(self) -> bool:
        """Whether the template reads the list of tools."""
        return "tools" in self.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of a chat, as transformers' `apply_chat_template(tokenize=False)` gives it.

        Args:
            messages: Objects with `role`, `content` (text, or a list of text parts), and what else the
                template reads: `tool_calls`, `name`, `reasoning_content`.
            tools: JSON schemas of functions; None or empty for none.
            add_generation_prompt: Whether the text ends with the header of the assistant's turn.
            continue_final_message: Whether the text ends inside the last message, for the model to go on.
            template_kwargs: Further variables, such as `enable_thinking`.

        Raises:
            RequestError: the messages are malformed, or the template refuses them in its own words.
        """
        chat = normalize_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                    hint="set add_generation_prompt to false",
                )
            # The space tells whether the template strips contents.
            chat[-1]["content"] += _CONTINUE_HERE + " "
        if tools and not self.supports_tools:
            raise RequestError("the model's chat template does not support tools", param="tools")
        variables = {
            **self._special_tokens,
            **plain_data(template_kwargs),
            "messages": chat,
            "tools": plain_data(list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        variables.setdefault("documents", None)
        text = self._render(variables)
        return _cut_at_continuation(text) if continue_final_message else text

    def _render(self, variables: dict[str, Any]) -> str:
        import jinja2

        from pagoda.engine import template_sandbox, template_work

        max_work = template_work.MAX_WORK + len(variables["messages"]) * template_work.WORK_PER_MESSAGE
        try:
            return template_sandbox.render(self._template, variables, max_work)
        except template_sandbox.TemplateRaisedError as error:
            raise RequestError(str(error), param="messages", hint=self._hint(variables)) from None
        except RequestError:
            raise
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            message = f"the chat template cannot render these messages: {error}"
            raise RequestError(message, param="messages", hint=self._hint(variables)) from None
        except Exception as error:  # a template may call what raises anything
            message = f"the chat template failed: {type(error).__name__}"
            raise RequestError(message, param="messages", hint=self._hint(variables)) from None

    def _hint(self, variables: Mapping[str, Any]) -> str | None:
        uses_tools = any(entry["role"] == "tool" or "tool_calls" in entry for entry in variables["messages"])
        if uses_tools and not self.supports_tools:
            return "the model's chat template knows no tool calls or tool results"
        return None


def _cut_at_continuation(text: str) -> str:
    end = text.rfind(_CONTINUE_HERE)
    if end < 0:
        raise RequestError(
            "the model's chat template does not show the final message, so it cannot be continued",
            param="continue_final_message",
        )
    keeps_spaces = text.startswith(" ", end + 1)
    text = text[:end] if keeps_spaces else text[:end].rstrip()
    return text.replace(_CONTINUE_HERE + " " * keeps_spaces, "")  # templates may show a message twice
