"""What the documents say about files, commands, formats and sizes is so."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

import pagoda
from pagoda.cli import COMMANDS, arguments
from pagoda.core.cost import CPU_KV_DTYPE, KVCacheSpec, LayerGroup
from pagoda.models import ARCHITECTURES
from pagoda.weights.checkpoint import load_checkpoint
from pagoda.weights.tensor import TensorType
from tests.real_models import QWEN2_5_CODER, SMOLLM2, real_model

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(chain(ROOT.glob("*.md"), *(ROOT.glob(f"{f}/**/*.md") for f in ("docs", "src", "tests"))))
README = ROOT / "README.md"
# A path in backticks begins in one of these.
PATH_ROOTS = (ROOT, ROOT / "src/pagoda")
KV_MODELS = {"SmolLM2-135M": SMOLLM2, "Qwen2.5-0.5B": QWEN2_5_CODER}

_CODE_BLOCK = re.compile(r"^```.*?^```$|(?:^ {4}[^\n]*\n)+", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"`([\w./-]+/[\w-]+\.(?:py|h|cpp|md|txt|toml))`")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(document: Path) -> str:
    return _CODE_BLOCK.sub("", document.read_text("utf-8"))


def code_lines(document: Path) -> list[str]:
    blocks = _CODE_BLOCK.findall(document.read_text("utf-8"))
    return [line.strip() for block in blocks for line in block.splitlines()]


def anchors(document: Path) -> set[str]:
    """Fragments that headings can be linked by."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(document: Path) -> Iterator[list[str]]:
    """Arguments of each `pagoda` in the document's code; comments, pipes and redirections end them."""
    for line in code_lines(document):
        if not re.search(r"(^|\| *)pagoda ", line):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>;&")
        lexer.whitespace_split = True
        current: list[str] | None = None
        for word in chain(lexer, ["|"]):
            if set(word) <= set("|<>;&"):
                if current is not None:
                    yield current
                current = None
            elif current is not None:
                current.append(word)
            elif word == "pagoda":
                current = []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for link in _LINK.findall(prose(document)):
        if re.match(r"\w+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{name(document)} links to {link}"
        assert not fragment or fragment in anchors(target), f"{name(document)} links to {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_files_that_are_named_exist(document: Path) -> None:
    for path in _PATH.findall(prose(document)):
        assert any((root / path).exists() for root in PATH_ROOTS), f"{name(document)} names {path}"


def test_the_diagram_names_files_that_exist() -> None:
    paths = re.findall(r"[\w/]+/[\w]+\.(?:py|h|cpp)", "\n".join(code_lines(ROOT / "ARCHITECTURE.md")))
    assert len(paths) >= 10
    for path in paths:
        assert any((root / path).exists() for root in PATH_ROOTS), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_quoted_commands_parse(document: Path) -> None:
    for argv in commands(document):
        assert callable(arguments.parse(COMMANDS, argv).execute)


def test_the_readme_shows_every_command() -> None:
    assert {argv[0] for argv in commands(README)} == {command.NAME for command in COMMANDS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    quoted = re.findall(r"`make (\w+)`", prose(document))
    quoted += [line.split()[1] for line in code_lines(document) if line.startswith("make ")]
    assert set(quoted) <= targets


def test_the_readme_names_what_can_be_read() -> None:
    text = " ".join(README.read_text("utf-8").split())
    types = re.search(r"Tensor types: ([^.]+)\.", text)
    assert types is not None
    assert set(types[1].split(", ")) == {t.name for t in TensorType}
    architectures = re.search(r"Architectures: (.+?)\. ", re.sub(r" \([^)]*\)", "", text))
    assert architectures is not None
    assert set(re.split(r", | and ", architectures[1])) == set(ARCHITECTURES)


def kv_rows() -> dict[str, list[str]]:
    """Rows of the cost table by model: layers, KV heads, head dim, then sizes."""
    text = prose(ROOT / "docs/concepts/kv-cache.md")
    rows = re.findall(r"^\| ([\w.-]+) \| (\d[\w. |]*?) \|$", text, re.MULTILINE)
    return {model: cells.split(" | ") for model, cells in rows}


def test_kv_sizes_are_those_of_the_cost_model() -> None:
    assert set(kv_rows()) == set(KV_MODELS)
    for layers, kv_heads, head_dim, token, block, thousand, context in kv_rows().values():
        group = LayerGroup(tuple(range(int(layers))), int(kv_heads), int(head_dim))
        spec = KVCacheSpec((group,), dtype=CPU_KV_DTYPE)
        length = int(context.split()[-1])
        sizes = [f"{spec.sequence_bytes(n) / 2**20:.1f} MiB" for n in (1000, length)]
        assert [int(token), int(block)] == [spec.bytes_per_token(0), spec.block_bytes(0)]
        assert [thousand, context] == [sizes[0], f"{sizes[1]} at {length}"]


@pytest.mark.real_model
@pytest.mark.parametrize("model", KV_MODELS)
def test_kv_shapes_are_those_of_the_model_files(model: str) -> None:
    with load_checkpoint(real_model(KV_MODELS[model])) as checkpoint:
        c = checkpoint.config
    row = kv_rows()[model]
    assert row[:3] == [str(n) for n in (c.num_layers, c.num_kv_heads, c.head_dim)]
    assert int(row[-1].split()[-1]) == c.max_position


def test_the_changelog_has_this_version_first() -> None:
    versions = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert versions[0] == pagoda.__version__
