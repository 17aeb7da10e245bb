"""`pagoda run` without a terminal: what goes where, which prompt is asked, how it ends."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagoda.cli import main
from pagoda.cli.run import DEFAULT_PROMPT, RAW_MAX_TOKENS
from tests.cli.conftest import files_under

CLOSING = re.compile(
    r"^(?P<prompt>\d+) prompt tokens \((?P<cached>\d+) cached\), (?P<output>\d+) tokens( at [\d.]+ tok/s)?, "
    r"TTFT \d+ ms, KV (?P<kv>[\d.]+) MiB(?P<end>.*)$"
)
OPTIONS = ("--backend", "reference", "--max-model-len", "512", "--kv-cache-memory-bytes", "8MiB")
Capture = pytest.CaptureFixture[str]


def run(model: Path, *arguments: str) -> int:
    return main(["run", str(model), *OPTIONS, "--max-tokens", "8", *arguments])


def give_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def closing_of(stderr: str) -> re.Match[str]:
    found = CLOSING.match(stderr.splitlines()[-1])
    assert found, stderr
    return found


def test_stdout_has_the_answer_and_stderr_the_closing_line(tiny_model: Path, capsys: Capture) -> None:
    assert run(tiny_model, "-p", "Hello") == 0
    captured = capsys.readouterr()
    closing = closing_of(captured.err)
    assert len(captured.err.splitlines()) == 1
    assert captured.out.endswith("\n")
    assert len(captured.out) > 1
    # <|im_start|> user LF Hello <|im_end|> LF <|im_start|> assistant LF, one token a byte
    assert int(closing["prompt"]) == 1 + 5 + 5 + 1 + 1 + 1 + 10
    assert int(closing["cached"]) == 0
    assert int(closing["output"]) == 8
    assert closing["end"] == ", cut at the token limit"


def test_a_seed_repeats_the_answer_and_temperature_0_needs_none(tiny_model: Path, capsys: Capture) -> None:
    def answer(*arguments: str) -> str:
        assert run(tiny_model, "-p", "Hello", *arguments) == 0
        return capsys.readouterr().out

    assert answer("--seed", "1") == answer("--seed", "1")
    assert len({answer("--seed", str(seed)) for seed in range(4)}) > 1
    assert answer("--temperature", "0", "--seed", "1") == answer("--temperature", "0", "--seed", "2")


def test_a_piped_prompt_is_answered_like_one_given(
    tiny_model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tiny_model, "-p", "Zürich 🏔", "--temperature", "0") == 0
    expected = capsys.readouterr().out
    give_stdin(monkeypatch, "Zürich 🏔\n".encode())
    assert run(tiny_model, "--temperature", "0") == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("content", [b"", b" \n\n", None])
def test_without_any_prompt_one_question_is_answered(
    tiny_model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    if content is None:
        monkeypatch.setattr(sys, "stdin", None)
    else:
        give_stdin(monkeypatch, content)
    assert run(tiny_model, "--temperature", "0") == 0
    captured = capsys.readouterr()
    assert DEFAULT_PROMPT in captured.err.splitlines()[0]
    assert run(tiny_model, "--temperature", "0", "-p", DEFAULT_PROMPT) == 0
    assert capsys.readouterr().out == captured.out


def test_an_empty_prompt_given_is_not_replaced(tiny_model: Path, capsys: Capture) -> None:
    assert run(tiny_model, "-p", "") == 0
    assert DEFAULT_PROMPT not in capsys.readouterr().err


def test_bytes_that_are_not_text_are_no_crash(
    tiny_model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_stdin(monkeypatch, b"caf\xe9 \xff\xfe")
    assert run(tiny_model) == 0
    assert run(tiny_model, "-p", os.fsdecode(b"caf\xe9")) == 0


def test_a_system_prompt_is_part_of_the_prompt(tiny_model: Path, capsys: Capture) -> None:
    assert run(tiny_model, "-p", "Hello") == 0
    without = int(closing_of(capsys.readouterr().err)["prompt"])
    assert run(tiny_model, "-p", "Hello", "--system", "Be kind.") == 0
    assert int(closing_of(capsys.readouterr().err)["prompt"]) == without + 1 + 7 + 8 + 1 + 1


def test_special_tokens_in_a_message_stay_text(tiny_model: Path, capsys: Capture) -> None:
    assert run(tiny_model, "-p", "") == 0
    empty = int(closing_of(capsys.readouterr().err)["prompt"])
    assert run(tiny_model, "-p", "<|im_end|>") == 0
    assert int(closing_of(capsys.readouterr().err)["prompt"]) == empty + len("<|im_end|>")


def test_a_base_model_continues_text_and_says_so(tiny_base_model: Path, capsys: Capture) -> None:
    assert main(["run", str(tiny_base_model), *OPTIONS, "-p", "Once"]) == 0
    captured = capsys.readouterr()
    assert "no chat template" in captured.err.splitlines()[0]
    closing = closing_of(captured.err)
    assert (int(closing["prompt"]), int(closing["output"])) == (4, RAW_MAX_TOKENS)


def test_raw_leaves_the_template_out(tiny_model: Path, capsys: Capture) -> None:
    assert run(tiny_model, "--raw", "-p", "Once") == 0
    captured = capsys.readouterr()
    assert int(closing_of(captured.err)["prompt"]) == 4
    assert len(captured.err.splitlines()) == 1


def test_a_system_prompt_without_a_template_is_refused(tiny_base_model: Path, capsys: Capture) -> None:
    assert run(tiny_base_model, "-p", "x", "--system", "Be kind.") == 1
    assert "a system prompt needs a chat template" in capsys.readouterr().err


def test_stop_texts_end_the_answer(tiny_model: Path, capsys: Capture) -> None:
    options = ("-p", "Hello", "--temperature", "0")
    assert run(tiny_model, *options) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    assert run(tiny_model, *options, "--stop", "never there", "--stop", text[2]) == 0
    assert capsys.readouterr().out.removesuffix("\n") == text[: text.index(text[2])]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("-p", "x" * 600), "the prompt has"),
        (("-p", "x", "--max-tokens", "1000"), "max_tokens is 1000"),
        (("-p", "x", "--max-model-len", "1M"), "max_model_len is"),
        (("-p", "x", "--kv-cache-memory-bytes", "100"), "KV"),
        (("-p", "x", "--threads", "0"), "threads"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(
    tiny_model: Path, capsys: Capture, arguments: tuple[str, ...], complaint: str
) -> None:
    assert run(tiny_model, *arguments) in (1, 2)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines[0].startswith("pagoda: error: ")
    assert complaint in lines[0]
    assert len(lines) <= 2
    assert captured.out == ""


def test_a_step_that_fails_is_one_line(
    tiny_model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ArithmeticError("kernel trouble")

    monkeypatch.setattr("pagoda.runtime.model_runner.ModelRunner.execute", fail)
    assert run(tiny_model, "-p", "Hello") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pagoda: error: ")
    assert "kernel trouble" in line


def test_nothing_is_written_to_disk(tiny_model: Path, surroundings: Path) -> None:
    assert run(tiny_model, "-p", "Hello") == 0
    assert files_under(surroundings) == []


def test_an_encoding_without_the_characters_is_no_crash(tiny_model: Path) -> None:
    arguments = ("-p", "Hello", "--max-tokens", "64", "--temperature", "50", "--seed", "1")
    process = start(tiny_model, *arguments, PYTHONIOENCODING="ascii")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"?" in out
    assert b"Traceback" not in err


def test_ctrl_c_stops_the_answer_and_what_came_so_far_stays(tiny_model: Path) -> None:
    process = start(tiny_model, "-p", "Hello", "--max-model-len", "4000")
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    closing = closing_of(err.decode())
    assert closing["end"] == ", stopped"
    assert 0 < int(closing["output"]) < 3000
    assert first + out != b""


def test_a_reader_who_leaves_ends_the_answer_quietly(tiny_model: Path) -> None:
    process = start(tiny_model, "-p", "Hello", "--max-model-len", "4000")
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    started_s = time.monotonic()
    assert process.wait(timeout=60) == 1
    assert time.monotonic() - started_s < 10
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def start(model: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "pagoda", "run", str(model), "--backend", "reference", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )
