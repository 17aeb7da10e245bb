"""What holds for every command: help, exit codes, one-line errors; and `pull` and `info`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pagoda
from pagoda import cli, machine
from pagoda.cli import main
from pagoda.core.cost import CPU_KV_DTYPE
from pagoda.errors import PagodaError
from pagoda.weights.cache import models_folder
from pagoda.weights.catalog import CATALOG
from pagoda.weights.checkpoint import load_checkpoint

COMMANDS = ("serve", "run", "pull", "bench", "info")
TAKE_A_MODEL = (["serve"], ["run"], ["pull"], ["bench", "step"], ["info"])


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pagoda {pagoda.__version__}\n"


def test_help_lists_every_command_and_each_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^    {command} +\w", overview, re.MULTILINE)
        assert main([command, "--help"]) == 0
        assert f"examples:\n  pagoda {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["['--version']", "['--help']", "['run', '--help']"])
def test_what_needs_no_model_imports_nothing_heavy(arguments: str) -> None:
    heavy = ("numpy", "rich", "tokenizers", "jinja2", "pagoda.engine", "pagoda._native", "urllib.request")
    code = f"import sys; from pagoda.cli import main; main({arguments})"
    code += f"; print([name for name in {heavy} if name in sys.modules])"
    assert run_python("-c", code).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["runn"], "runn"),
        (["run"], "MODEL"),
        (["run", "m", "--no-such-flag"], "--no-such-flag"),
        (["run", "m", "--temp", "0"], "--temp"),  # abbreviations would break when flags are added
        (["run", "m", "--temperature", "warm"], "--temperature"),
        (["run", "m", "--temperature", "-1"], "temperature is -1.0"),
        (["run", "m", "--top-p", "0"], "top_p is 0.0"),
        (["run", "m", "--min-p", "2"], "min_p is 2.0"),
        (["run", "m", "--top-k", "-7"], "top_k is -7"),
        (["run", "m", "--stop", ""], "stop"),
        (["run", "m", "--max-model-len", "4kk"], "--max-model-len"),
        (["run", "m", "--kv-cache-memory-bytes", "4 gigs"], "--kv-cache-memory-bytes"),
        (["run", "m", "--backend", "gpu"], "--backend"),
        (["pull"], "MODEL"),
        (["bench", "memory"], "memory"),
        (["bench", "step"], "MODEL"),
        (["bench", "step", "m", "--threads", "1", "0"], "--threads is 1 0"),
        (["bench", "kernels", "--runs", "0"], "--runs is 0"),
        (["bench", "kernels", "--kernel", "gemm"], "--kernel is 'gemm'"),
        (["bench", "kernels", "--isa", "avx1024"], "--isa is 'avx1024'"),
        (["info", "a", "b"], "b"),
    ],
)
def test_wrong_usage_is_one_line_and_a_hint_with_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    error, hint = captured.err.splitlines()
    assert error.startswith("pagoda: error: ")
    assert named in error
    assert hint.startswith("hint: see `pagoda")
    assert captured.out == ""


def test_no_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_bench_alone_shows_what_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    told = capsys.readouterr().err
    assert "examples:\n  pagoda bench kernels" in told and "pagoda bench step" in told


@pytest.mark.parametrize("command", TAKE_A_MODEL, ids=" ".join)
def test_an_unknown_model_is_one_line_and_a_hint_with_exit_code_1(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main([*command, "no-such-model"]) == 1
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error == "pagoda: error: no model is called 'no-such-model'"
    assert "smollm2-135m" in hint


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 16, os.urandom(4096)])
@pytest.mark.parametrize("command", ["run", "info"])
def test_a_bad_file_is_one_line_and_a_hint(
    command: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert (
        main([command, str(path), *(["-p", "hi", "--backend", "reference"] if command == "run" else [])]) == 1
    )
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["pagoda", "hint"]
    assert str(path) in lines[0]


def test_an_error_cannot_write_to_the_terminal_what_it_likes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> int:
        raise PagodaError("name \x1b]0;owned\x07\nsecond line", hint="a\rb")

    monkeypatch.setattr(cli.info, "execute", fail)
    assert main(["info"]) == 1
    assert capsys.readouterr().err == ("pagoda: error: name \\x1b]0;owned\\x07\\nsecond line\nhint: a\\rb\n")


def test_a_bug_is_one_line_unless_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> int:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(cli.info, "execute", fail)
    assert main(["info"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "pagoda: error: ZeroDivisionError: by zero"
    assert "PAGODA_DEBUG=1" in hint
    monkeypatch.setenv("PAGODA_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["info"])


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.info, "execute", interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_who_has_gone_is_no_noise() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run([sys.executable, "-m", "pagoda", "info"], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert process.returncode == 1
    assert process.stderr == b""


def test_info_says_what_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], surroundings: Path
) -> None:
    """E15: the cores that are used, and why, are printed."""
    monkeypatch.setattr(machine, "num_usable_cores", lambda: 1)
    monkeypatch.setattr(machine, "affinity", lambda: frozenset(range(8)))
    monkeypatch.setattr(machine, "num_physical_cores", lambda: 4)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 3 << 30)
    assert main(["info"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["pagoda"] == pagoda.__version__
    assert rows["cores"] == "1 used: 8 by affinity, 4 physical, quota 1.5"
    assert rows["memory limit"] == "3.0 GiB"
    assert rows["memory available"].endswith("iB")
    assert rows["cache folder"] == str(surroundings / "cache")


def test_info_without_the_native_module_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pagoda._native", None)
    assert main(["info"]) == 0
    assert "not built" in rows_of(capsys.readouterr().out)["instruction set"]


def test_info_of_a_model_agrees_with_what_will_be_allocated(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(tiny_model)]) == 0
    rows = rows_of(capsys.readouterr().out)
    with load_checkpoint(tiny_model) as checkpoint:
        spec = checkpoint.config.kv_cache_spec(dtype=CPU_KV_DTYPE)
        num_tensors = len(checkpoint.outlines)
    assert rows["model"] == "Tiny"
    assert rows["architecture"] == "llama"
    assert rows["heads"] == "4 query, 2 key-value (GQA), head dim 16"
    assert (
        rows["KV group 0"] == f"2 layers attend to all tokens: {int(spec.bytes_per_token(0))} bytes a token"
    )
    assert rows["KV of a sequence"].startswith(f"{spec.sequence_bytes(4096) / 2**20:.1f} MiB at 4096 tokens")
    assert rows["tensors F32"].startswith(f"{num_tensors}, ")
    assert rows["tokenizer"] == "gpt2 gpt-2"


def test_info_of_a_base_model_says_that_it_cannot_chat(
    tiny_base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(tiny_base_model)]) == 0
    assert rows_of(capsys.readouterr().out)["chat template"].startswith("none")


def test_pull_prints_the_path_and_nothing_else_to_stdout(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", str(tiny_model)]) == 0
    assert capsys.readouterr().out == f"{tiny_model}\n"


def test_pull_of_a_fetched_model_needs_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    entry = CATALOG["smollm2-135m"]
    target = models_folder() / entry.file_name
    target.parent.mkdir(parents=True)
    with target.open("wb") as file:
        file.truncate(entry.size_bytes)
    assert main(["pull", "smollm2-135m"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (f"{target}\n", "")


def rows_of(text: str) -> dict[str, str]:
    return {line[:18].strip(): line[18:] for line in text.splitlines()}
