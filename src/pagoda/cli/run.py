"""`pagoda run`: chat with a model in the terminal, or answer one prompt."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from pagoda.cli import terminal
from pagoda.cli.arguments import MODEL_HELP, QUANTIZATION_HELP, REVISION_HELP, length, size
from pagoda.errors import RequestError

if TYPE_CHECKING:
    from pagoda.sampling_params import SamplingParams

NAME = "run"
DESCRIPTION = """Chat with a model, or answer one prompt and exit.

In a terminal it is a chat: /help lists its commands, Ctrl-C stops an answer, Ctrl-D leaves.
With -p, or a prompt on standard input, the answer goes to standard output and everything
else to standard error."""
EXAMPLES = """\
  pagoda run smollm2-135m
  pagoda run smollm2-135m -p "What is the capital of France?" --temperature 0
  pagoda run ./model.gguf --system "Answer in one sentence." --max-tokens 100
  echo "Name three rivers." | pagoda run smollm2-135m > answer.txt
  pagoda run ./base-model.gguf --raw -p "Once upon a time\""""

DEFAULT_PROMPT = "What is the capital of France?"
RAW_MAX_TOKENS = 128  # a base model seldom comes to an end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add("-p", "--prompt", metavar="TEXT", help="answer this and exit")
    add("--system", metavar="TEXT", help="system prompt")
    add("--raw", action="store_true", help="continue the text as it is, without the chat template")
    sampling = parser.add_argument_group("sampling")
    add = sampling.add_argument
    add(
        "--temperature",
        metavar="T",
        type=float,
        default=0.7,
        help="0 takes the likeliest token (default: 0.7)",
    )
    add(
        "--top-k", metavar="K", type=int, default=0, help="choose among the K likeliest tokens (default: all)"
    )
    add(
        "--top-p",
        metavar="P",
        type=float,
        default=0.95,
        help="choose among the likeliest that add up to P (default: 0.95)",
    )
    add(
        "--min-p",
        metavar="P",
        type=float,
        default=0.0,
        help="leave out tokens below P times the likeliest (default: 0)",
    )
    add("--seed", metavar="N", type=int, help="makes sampling reproducible")
    add(
        "--max-tokens",
        metavar="N",
        type=length,
        help=f"longest answer (default: what fits; {RAW_MAX_TOKENS} where text is continued)",
    )
    add(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end the answer before TEXT; may be repeated",
    )
    resources = parser.add_argument_group("memory and speed")
    add = resources.add_argument
    add(
        "--max-model-len",
        metavar="N",
        type=length,
        help="tokens of a conversation at most: 4096, 32k (default: the model's own, or what memory holds)",
    )
    add(
        "--kv-cache-memory-bytes",
        metavar="SIZE",
        type=size,
        help="memory of the KV cache: 512MiB, 4GiB",
    )
    add("--quantization", metavar="TYPE", help=QUANTIZATION_HELP)
    add("--revision", metavar="NAME", help=REVISION_HELP)
    add("--threads", metavar="N", type=int, help="default: the cores that `pagoda info` shows")
    add(
        "--backend",
        choices=("cpu", "reference"),
        default="cpu",
        help="reference is slow and in numpy (default: cpu)",
    )


def execute(arguments: argparse.Namespace) -> int:
    terminal.accept_any_text()
    _keep_log_from_terminal()
    params = _sampling_params(arguments)
    prompt = _piped_prompt() if arguments.prompt is None else arguments.prompt

    from pagoda.cli.chat import Conversation, chat
    from pagoda.engine.llm import LLM

    with LLM(
        arguments.model,
        max_model_len=arguments.max_model_len,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        num_threads=arguments.threads,
        backend=arguments.backend,
        max_num_seqs=1,
        quantization=arguments.quantization,
        revision=arguments.revision,
        progress=True,
    ) as llm:
        conversation = Conversation.start(
            llm, params, raw=arguments.raw, system=arguments.system, raw_max_tokens=RAW_MAX_TOKENS
        )
        if prompt is None:
            chat(conversation)
            return 0
        stopped = conversation.ask(prompt)
        return 130 if stopped else 0  # as shells report a program that Ctrl-C ended


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    from pagoda.sampling_params import SamplingParams

    names = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop")
    try:
        return SamplingParams(**{name: getattr(arguments, name) for name in names})
    except RequestError as error:
        arguments.usage_error(error.message)
        raise


def _keep_log_from_terminal() -> None:
    """What fails is told in one line anyway; `PAGODA_DEBUG=1` leaves the tracebacks of the log in."""
    import logging

    if os.environ.get("PAGODA_DEBUG") != "1":
        logging.getLogger("pagoda").addHandler(logging.NullHandler())


def _piped_prompt() -> str | None:
    """The prompt on standard input; None in a terminal, where there is a chat."""
    if sys.stdin is not None and sys.stdin.isatty():
        return None
    text = "" if sys.stdin is None else sys.stdin.read()
    if not text.strip():
        terminal.tell(f"no terminal and no prompt, so this is asked: {DEFAULT_PROMPT}")
        return DEFAULT_PROMPT
    return text.removesuffix("\n")
