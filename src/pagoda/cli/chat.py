"""A conversation with a loaded model: streaming one answer, and the loop around many."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from pagoda.cli import terminal
from pagoda.errors import PagodaError, UnsupportedError

if TYPE_CHECKING:
    from pagoda.core.cost import KVCacheSpec
    from pagoda.engine.llm import LLM
    from pagoda.engine.output import RequestOutput
    from pagoda.sampling_params import SamplingParams

Message: TypeAlias = dict[str, str]

HELP = '''\
/help           this list
/reset          forget the conversation; the system prompt stays
/system TEXT    set the system prompt and start over; without TEXT, show it
/exit           leave, as Ctrl-D does
Ctrl-C stops an answer, or clears what is typed. A line that ends with \\ goes on in the next one;
""" begins and ends a message of several lines. A space before / sends the line as text.'''


@dataclass
class Conversation:
    """What has been said, as chat templates take it. With `is_raw` each text is continued as it is."""

    llm: LLM
    params: SamplingParams
    is_raw: bool = False
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @classmethod
    def start(
        cls, llm: LLM, params: SamplingParams, *, raw: bool, system: str | None, raw_max_tokens: int
    ) -> Conversation:
        """Raw when asked, or when the model has no chat template; then answers have a limit by default.

        Raises:
            UnsupportedError: a system prompt has no place in text that is continued as it is.
        """
        tokenizer = llm.engine.tokenizer
        if not raw and (tokenizer is None or tokenizer.chat_template is None):
            terminal.tell("this model has no chat template: it continues text instead of answering")
            raw = True
        if raw and system is not None:
            raise UnsupportedError(
                "a system prompt needs a chat template, and text is continued as it is",
                hint="leave out --system and put it into the text",
            )
        if raw and params.max_tokens is None:
            params = replace(params, max_tokens=raw_max_tokens)
        return cls(llm, params, is_raw=raw, system=system)

    def ask(self, text: str) -> bool:
        """Stream the answer to stdout and a closing line to stderr. Returns whether Ctrl-C stopped it.

        Raises:
            PagodaError: the engine refuses the question, or fails; it is not part of the conversation then.
        """
        question = {"role": "user", "content": text}
        parts: list[str] = []
        last: RequestOutput | None = None
        with terminal.interrupts() as interrupted:
            with closing(self._stream(text, question)) as stream:
                for last in stream:
                    for piece in last.outputs:
                        if piece.error is not None:
                            raise PagodaError(f"the answer failed: {piece.error}")
                        terminal.write_answer(piece.text)
                        parts.append(piece.text)
                    if interrupted():
                        break
            stopped = interrupted()
            answer = "".join(parts)
            if not answer.endswith("\n"):
                terminal.write_answer("\n")
            if not self.is_raw:
                self.turns += [question, {"role": "assistant", "content": answer}]
            if last is not None:
                terminal.tell(closing_line(last, self.llm.engine.scheduler.kv.spec, stopped=stopped))
        return stopped

    def _stream(self, text: str, question: Message) -> Generator[RequestOutput, None, None]:
        if self.is_raw:
            yield from self.llm.stream(text, self.params)
            return
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        yield from self.llm.stream_chat([*system, *self.turns, question], self.params)


def closing_line(output: RequestOutput, spec: KVCacheSpec, *, stopped: bool = False) -> str:
    """`36 prompt tokens (0 cached), 12 tokens at 210.3 tok/s, TTFT 31 ms, KV 1.1 MiB`.

    `output` is the last one of the answer; the rate counts tokens after the first.
    """
    metrics = output.metrics
    num_tokens = metrics.num_output_tokens
    decode_s = (metrics.last_token_s or 0.0) - (metrics.first_token_s or 0.0)
    rate = f" at {(num_tokens - 1) / decode_s:.1f} tok/s" if num_tokens > 1 and decode_s > 0 else ""
    parts = [
        f"{metrics.num_prompt_tokens} prompt tokens ({output.num_cached_tokens} cached)",
        f"{num_tokens} tokens{rate}",
    ]
    if metrics.ttft_s is not None:
        parts.append(f"TTFT {1000 * metrics.ttft_s:.0f} ms")
    kv_bytes = spec.sequence_bytes(metrics.num_prompt_tokens + num_tokens)
    parts.append(f"KV {kv_bytes / 2**20:.1f} MiB")
    if stopped:
        parts.append("stopped")
    elif any(piece.finish_reason == "length" for piece in output.outputs):
        parts.append("cut at the token limit")
    return ", ".join(parts)


def chat(conversation: Conversation) -> None:
    """Read messages and answer them until the person leaves."""
    terminal.enable_line_editing()
    terminal.tell("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            text = terminal.read_message()
            if text.startswith("/"):
                if _obey(conversation, text) == "exit":
                    return
            elif text.strip():
                conversation.ask(text)
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:  # not during an answer, see `terminal.interrupts`
            print(file=sys.stderr)
            terminal.tell("Ctrl-D or /exit leaves")
        except PagodaError as error:
            terminal.print_error(error)


def _obey(conversation: Conversation, line: str) -> str | None:
    """Carry out a line that begins with a slash; returns "exit" when it says so."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if word in ("/exit", "/quit", "/bye"):
        return "exit"
    if word == "/help":
        for text in HELP.splitlines():
            terminal.tell(text)
    elif word == "/reset":
        conversation.turns.clear()
        terminal.tell("the conversation starts over")
    elif word == "/system" and conversation.is_raw:
        terminal.tell("there is no system prompt where text is continued as it is")
    elif word == "/system" and not rest:
        terminal.tell(f"system prompt: {conversation.system}" if conversation.system else "no system prompt")
    elif word == "/system":
        conversation.system = rest
        conversation.turns.clear()
        terminal.tell("the conversation starts over with this system prompt")
    else:
        terminal.tell(f"there is no command {word}; /help lists them, and a space before / sends text")
    return None
