"""`pagoda info`: what this machine offers, or what a model file holds."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator
from typing import Any

from pagoda.cli import terminal
from pagoda.cli.arguments import MODEL_HELP, REVISION_HELP

NAME = "info"
DESCRIPTION = """Print what pagoda sees of this machine, or of a model from its metadata alone."""
EXAMPLES = """\
  pagoda info
  pagoda info smollm2-135m
  pagoda info ./model.gguf
  pagoda info Qwen/Qwen2.5-0.5B-Instruct --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    parser.add_argument("--revision", metavar="NAME", help=REVISION_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")


def execute(arguments: argparse.Namespace) -> int:
    if arguments.model is None:
        if arguments.revision is not None:
            arguments.usage_error("--revision needs a MODEL")
        rows = list(_machine_rows())
        described: dict[str, Any] = dict(rows)
    else:
        from pagoda.cli.model_info import describe_model, model_rows
        from pagoda.weights.catalog import resolve_model

        path = resolve_model(arguments.model, progress=True, revision=arguments.revision)
        described = describe_model(path)
        rows = list(model_rows(described))
    if arguments.json:
        import json

        print(json.dumps(described, indent=2))
        return 0
    for label, value in rows:
        print(f"{label:<18}{terminal.printable(value)}")
    return 0


def _machine_rows() -> Iterator[tuple[str, str]]:
    import platform

    from pagoda import __version__, machine
    from pagoda.weights.cache import cache_folder

    quota = machine.cpu_quota()
    seen = f"{len(machine.affinity())} by affinity, {machine.num_physical_cores()} physical"
    yield "pagoda", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "instruction set", instruction_set()
    yield (
        "cores",
        f"{machine.num_usable_cores()} used: {seen}, quota {'none' if quota is None else f'{quota:g}'}",
    )
    yield "memory limit", format_memory(machine.memory_limit_bytes())
    yield "memory available", format_memory(machine.memory_available_bytes())
    yield "cache folder", str(cache_folder())


def instruction_set() -> str:
    try:
        native = importlib.import_module("pagoda._native")
    except ImportError as error:
        return f"none, the native module is not built: {error}"
    usable = list(native.isas())
    forced = os.environ.get("PAGODA_ISA")
    if forced and forced not in usable:
        return f"PAGODA_ISA={forced} is not usable here; usable: {', '.join(usable)}"
    return f"{forced or usable[0]} (usable: {', '.join(usable)})"


def format_memory(num_bytes: float) -> str:
    """In binary units, as memory limits are given: 1.5 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
