"""Arguments of all commands, in one style: no abbreviations, examples under every help, one-line errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, Protocol

from pagoda import __version__
from pagoda.errors import PagodaError

MODEL_HELP = (
    "path of a GGUF file or Hugging Face folder, name in the catalogue, or Hugging Face id (org/name)"
)
REVISION_HELP = "branch, tag or commit of a Hugging Face repository (default: main)"
QUANTIZATION_HELP = "pack weights of floats in 8 or 4 bits: q8, q4 (default: as the model has them)"


class Command(Protocol):
    """A module that holds one command. The first line of `DESCRIPTION` stands in the list of commands."""

    NAME: str
    DESCRIPTION: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def execute(self, arguments: argparse.Namespace) -> int:
        """Returns the exit code."""


class Parser(argparse.ArgumentParser):
    """Reports wrong usage as every other error is reported, with exit code 2."""

    def __init__(self, *, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        print(f"pagoda: error: {message}\nhint: see `{self.prog} --help`", file=sys.stderr)
        sys.exit(2)


def parse(commands: Iterable[Command], argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of one command; `execute` of the result runs it, `usage_error` refuses them.

    Raises:
        SystemExit: help or version has been printed, or the usage is wrong; holds the exit code.
    """
    parser = Parser(prog="pagoda", description="Run language models with a KV cache you can see.")
    parser.add_argument("--version", action="version", version=f"pagoda {__version__}")
    choices = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for command in commands:
        own = choices.add_parser(
            command.NAME,
            prog=f"pagoda {command.NAME}",
            help=command.DESCRIPTION.partition("\n")[0],
            description=command.DESCRIPTION,
            epilog=f"examples:\n{command.EXAMPLES}",
        )
        command.add_arguments(own)
        own.set_defaults(execute=command.execute, usage_error=own.error)
    if not argv:
        parser.print_help(sys.stderr)
        sys.exit(2)
    return parser.parse_args(argv)


def length(text: str) -> int:
    """The type of arguments that count tokens: 4096, 32k."""
    from pagoda.config import parse_length

    return _checked(parse_length, text)


def size(text: str) -> int:
    """The type of arguments that are bytes: 512MiB, 4GiB."""
    from pagoda.config import parse_size

    return _checked(parse_size, text)


def _checked(parse_text: Callable[[str], int], text: str) -> int:
    try:
        return parse_text(text)
    except PagodaError as error:
        hint = f"; {error.hint}" if error.hint else ""
        raise argparse.ArgumentTypeError(f"{error.message}{hint}") from error
