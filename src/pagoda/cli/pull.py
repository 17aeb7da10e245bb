"""`pagoda pull`: fetch a model before it is needed."""

from __future__ import annotations

import argparse

from pagoda.cli.arguments import MODEL_HELP, REVISION_HELP

NAME = "pull"
DESCRIPTION = """Fetch a model into the cache folder, verify it, and print its path.

An interrupted pull goes on where it stopped. Models are kept in $PAGODA_CACHE/models,
else $XDG_CACHE_HOME/pagoda/models, else ~/.cache/pagoda/models."""
EXAMPLES = """\
  pagoda pull smollm2-135m
  pagoda pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M
  pagoda pull Qwen/Qwen2.5-0.5B-Instruct --revision main
  PAGODA_CACHE=/data/pagoda pagoda pull smollm2-135m"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--revision", metavar="NAME", help=REVISION_HELP)


def execute(arguments: argparse.Namespace) -> int:
    from pagoda.weights.catalog import resolve_model

    print(resolve_model(arguments.model, progress=True, revision=arguments.revision))
    return 0
