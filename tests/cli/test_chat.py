"""`pagoda run` in a terminal: the chat, its commands, Ctrl-C."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pagoda.cli import terminal
from tests.cli.pseudo_terminal import PseudoTerminal, pseudo_terminal

PROMPT = r">>> "
CLOSING = r"(\d+) prompt tokens \((\d+) cached\), (\d+) tokens.*MiB([^\r\n\x1b]*)"
ESCAPE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


@contextmanager
def chat(model: Path, *options: str, **environment: str) -> Iterator[PseudoTerminal]:
    arguments = ("-m", "pagoda", "run", str(model), "--backend", "reference", *options)
    with pseudo_terminal(*arguments, **environment) as shown:
        shown.expect(PROMPT)
        yield shown


def press_until(person: PseudoTerminal, key: str, pattern: str) -> None:
    """Press as often as it takes: Python's line editor misses a Ctrl-C just before it begins to wait."""
    for _ in range(5):
        person.type(key)
        with suppress(AssertionError):
            person.expect(pattern, timeout_s=2.0)
            return
    raise AssertionError(f"{pattern!r} did not appear")


def test_a_conversation_grows_and_its_prefix_is_not_computed_again(tiny_model: Path) -> None:
    with chat(tiny_model, "--max-tokens", "6") as person:
        person.type("Hello\n")
        first = person.expect(CLOSING)
        person.expect(PROMPT)
        person.type("Again\n")
        second = person.expect(CLOSING)
        person.expect(PROMPT)
        assert int(first[2]) == 0
        assert int(second[1]) > int(first[1])
        assert int(second[2]) >= int(first[1]) - 1  # all of the first prompt, at least
        person.type("/reset\n")
        person.expect("starts over")
        person.type("Hello\n")
        assert person.expect(CLOSING)[1] == first[1]
        person.type("/exit\n")
        assert person.wait() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(tiny_model: Path) -> None:
    with chat(tiny_model) as person:
        person.type("Hello\n")
        person.expect(r"(?s)Hello\r\n.{10}")
        person.type("\x03")
        stopped = person.expect(CLOSING)
        assert stopped[4] == ", stopped"
        assert int(stopped[3]) < 3000
        person.expect(PROMPT)
        person.type("half a line")
        person.expect("half a line")
        press_until(person, "\x03", "Ctrl-D or /exit leaves")
        person.expect(PROMPT)
        person.type("/help\n")
        person.expect("/system TEXT")
        person.expect(PROMPT)
        person.type("\x04")
        assert person.wait() == 0
        assert "Traceback" not in person.shown


def test_commands(tiny_model: Path) -> None:
    with chat(tiny_model, "--max-tokens", "2", "--system", "Be kind.") as person:
        person.type("/system\n")
        person.expect("system prompt: Be kind")
        person.type("Hello\n")
        kind = int(person.expect(CLOSING)[1])
        person.type("/system Be very kind.\n")
        person.expect("starts over with this system prompt")
        person.type("Hello\n")
        assert int(person.expect(CLOSING)[1]) == kind + len("very ")
        person.type("/frobnicate\n")
        person.expect("no command /frobnicate")
        person.type("\n   \n")  # nothing to answer
        person.type("/bye\n")
        assert person.wait() == 0
        assert len(re.findall(CLOSING, person.shown)) == 2


def test_a_question_that_does_not_fit_is_an_error_and_the_chat_goes_on(tiny_model: Path) -> None:
    with chat(tiny_model, "--max-tokens", "4", "--max-model-len", "64") as person:
        person.type("Hello\n")
        first = person.expect(CLOSING)
        person.expect(PROMPT)
        person.type("x" * 100 + "\n")
        person.expect("pagoda: error: the prompt has")
        person.expect("hint: ")
        person.expect(PROMPT)
        person.type("/reset\nHello\n")
        assert person.expect(CLOSING)[1] == first[1]
        person.type("/exit\n")
        assert person.wait() == 0


def test_a_message_of_several_lines_is_one_message(tiny_model: Path) -> None:
    def num_prompt_tokens(typed: str) -> int:
        person.type(typed)
        count = int(person.expect(CLOSING)[1])
        person.expect(PROMPT)
        person.type("/reset\n")
        person.expect(PROMPT)
        return count

    with chat(tiny_model, "--max-tokens", "1") as person:
        one_line = num_prompt_tokens("ab\n")
        assert num_prompt_tokens("a\\\nb\n") == one_line + 1
        assert num_prompt_tokens('"""\na\nb\n"""\n') == one_line + 1
        assert num_prompt_tokens('"""a\nb"""\n') == one_line + 1
        assert num_prompt_tokens(" /reset\n") == one_line + len(" /reset") - 2


@pytest.mark.parametrize(
    ("environment", "styled"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_is_for_terminals_that_want_it(
    tiny_model: Path, environment: dict[str, str], styled: bool
) -> None:
    arguments = (
        "-m",
        "pagoda",
        "run",
        str(tiny_model),
        "--backend",
        "reference",
        "--max-tokens",
        "2",
        "-p",
        "x",
    )
    with pseudo_terminal(*arguments, **environment) as shown:
        assert shown.wait() == 0
        assert re.search(CLOSING, shown.shown)
        assert bool(ESCAPE.search(shown.shown)) == styled


def test_model_text_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b]0;owned\x07b\r\x9bc\td\ne\u200d🏔"
    terminal.write_answer(text)
    assert capsys.readouterr().out == text  # a file gets what the model said
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    terminal.write_answer(text)
    assert capsys.readouterr().out == "a]0;ownedbc\td\ne\u200d🏔"
