"""The control plane needs the standard library and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pagoda

SOURCE = Path(pagoda.__file__).parent
ALLOWED = ("pagoda.core", "pagoda.errors", "pagoda.sampling_params", "pagoda.config")


def imports_of(path: Path) -> set[str]:
    """Modules that a file names in its imports, at any depth of the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize(
    "path",
    [
        *sorted((SOURCE / "core").glob("**/*.py")),
        *(SOURCE / f"{m}.py" for m in ("errors", "sampling_params", "config")),
    ],
    ids=lambda path: path.stem,
)
def test_core_names_only_itself_and_the_standard_library(path: Path) -> None:
    for name in imports_of(path):
        is_own = any(name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED)
        assert is_own or name.split(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_core_loads_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import pagoda.core.scheduler, pagoda.core.invariants\n"
        "print(*(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    tops = {name.split(".")[0] for name in loaded}
    assert tops - set(sys.stdlib_module_names) == {"pagoda"}
