"""`pagoda run` with a real model, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.weights.catalog import CATALOG
from tests.cli.conftest import files_under
from tests.cli.pseudo_terminal import pseudo_terminal
from tests.cli.test_chat import CLOSING, PROMPT
from tests.cli.test_run import closing_of
from tests.real_models import SMOLLM2, real_models_folder

pytestmark = pytest.mark.real_model
# Found before the fixtures below move the home folder.
MODEL = real_models_folder() / f"{SMOLLM2}.gguf"


@pytest.fixture
def fetched(surroundings: Path) -> Path:
    """The cache folder, as `pagoda pull smollm2-135m` leaves it."""
    if not MODEL.exists():
        pytest.skip(f"{MODEL.name} is not on this machine")
    target = surroundings / "cache" / "models" / CATALOG["smollm2-135m"].file_name
    target.parent.mkdir(parents=True)
    target.symlink_to(MODEL)
    return target


def test_the_capital_of_france_is_paris_and_nothing_is_written(fetched: Path, surroundings: Path) -> None:
    question = ["-p", "What is the capital of France?", "--temperature", "0", "--max-tokens", "40"]
    process = subprocess.run(
        [sys.executable, "-m", "pagoda", "run", "smollm2-135m", *question], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert "Paris" in process.stdout
    closing = closing_of(process.stderr)
    assert closing["end"] == ""
    # 30 layers x 2 x 3 heads x 64 x 2 bytes a token, in blocks of 16
    num_blocks = -(-(int(closing["prompt"]) + int(closing["output"])) // 16)
    assert closing["kv"] == f"{num_blocks * 16 * 30 * 2 * 3 * 64 * 2 / 2**20:.1f}"
    assert files_under(surroundings) == [fetched]


def test_without_a_terminal_or_a_prompt_it_answers_and_exits(fetched: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pagoda", "run", "smollm2-135m", "--temperature", "0", "--max-tokens", "40"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert "Paris" in process.stdout


def test_a_chat_does_not_compute_again_what_was_said(fetched: Path) -> None:
    arguments = ("-m", "pagoda", "run", "smollm2-135m", "--temperature", "0", "--max-tokens", "30")
    with pseudo_terminal(*arguments) as person:
        person.expect(PROMPT)
        person.type("My favourite colour is green.\n")
        first = person.expect(CLOSING)
        person.expect(PROMPT)
        person.type("Which colour did I name?\n")
        second = person.expect(CLOSING)
        said = int(first[1]) + int(first[3])
        # The answer's text, encoded again, may begin with other tokens than the model chose.
        assert int(first[1]) - 1 <= int(second[2]) <= said + 1
        assert int(second[1]) > said
        person.expect(PROMPT)
        person.type("/exit\n")
        assert person.wait() == 0
