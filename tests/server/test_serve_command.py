"""`pagoda serve` as a process: flags, what it prints, signals."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pagoda.cli import main
from tests.cli.tiny_chat_model import write_tiny_chat_model


@contextmanager
def serve(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A process, its address once it is ready, and what it has printed."""
    command = [sys.executable, "-m", "pagoda", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    printed: list[str] = []
    try:
        for line in process.stderr:
            printed.append(line)
            if line.startswith("ready"):
                break
        url = re.search(r"https?://[\d.]+:\d+", printed[-1] if printed else "")
        assert url is not None, printed
        yield process, url[0], printed
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def test_it_serves_until_a_signal_and_finishes_what_runs(model: str, tmp_path: Path) -> None:
    """E19: all in one process, so that nothing is left of it when it is killed."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    arguments = (model, "--backend", "reference", "--served-model-name", "tiny", "--max-model-len", "1k")
    arguments += ("--chat-template", str(template))
    arguments += ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")  # as vLLM's quick start has it
    with serve(*arguments) as (process, url, printed), ThreadPoolExecutor() as pool:
        table = "".join(printed)
        for word in ("tiny.gguf, as tiny", "reference, 1 threads", "1000 tokens", "KV pool", "2.5 times"):
            assert word in table
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 150, "temperature": 0}
        assert (
            httpx.post(f"{url}/v1/chat/completions", json={**body, "max_tokens": 2}, timeout=30).status_code
            == 200
        )
        tokens = httpx.post(f"{url}/tokenize", json={"messages": body["messages"]}).json()["tokens"]
        assert bytes(tokens) == b"[Hi]"
        call = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=30)
        while not httpx.get(f"{url}/requests").json()["requests"]:
            time.sleep(0.005)
        for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
            assert not children.read_text()
        process.send_signal(signal.SIGTERM)
        assert call.result().json()["usage"]["completion_tokens"] == 150
        assert process.wait(20) == 0


def test_a_second_signal_aborts(model: str) -> None:
    with serve(model, "--backend", "reference") as (process, url, _), ThreadPoolExecutor() as pool:
        body = {"prompt": "y", "max_tokens": 3000}
        call = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=30)
        while not httpx.get(f"{url}/requests").json()["requests"]:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert call.result().json()["choices"][0]["finish_reason"] == "abort"
        assert process.wait(20) == 0


def test_a_port_in_use_is_an_error(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", model, "--port", str(taken.getsockname()[1])]) == 1
    error = capfd.readouterr().err
    assert re.match(r"pagoda: error: cannot listen on 127.0.0.1, port \d+: .*in use", error)
    assert "hint: choose another one with --port" in error


def test_a_bad_certificate_is_an_error(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for file in (bad, tmp_path / "none.pem"):
        assert (
            main(["serve", model, "--port", "0", "--ssl-certfile", str(file), "--ssl-keyfile", str(file)])
            == 1
        )
        assert "the certificate cannot be used" in capfd.readouterr().err


def test_a_model_that_is_not_there_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "./no-such.gguf", "--port", "0"]) == 1
    (error,) = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert error.startswith("pagoda: error: ") and "no-such.gguf" in error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--max-num-queued-reqs", "-1"], "--max-num-queued-reqs"),
        (["--max-output-tokens", "0"], "--max-output-tokens"),
        (["--ssl-certfile", "x"], "--ssl-keyfile"),
        (["--api-key", ""], "API key"),
        (["--allowed-origins", "*"], "--allowed-origins"),
        (["--max-model-len", "long"], "--max-model-len"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", *arguments]) == 2
    assert named in capsys.readouterr().err
