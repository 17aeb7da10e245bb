"""`pagoda serve`: a model over HTTP, with OpenAI's API."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.cli import terminal
from pagoda.cli.arguments import MODEL_HELP, QUANTIZATION_HELP, REVISION_HELP, length, size
from pagoda.errors import ConfigError

if TYPE_CHECKING:
    from pagoda.core.events import EventSink
    from pagoda.engine.engine import Engine
    from pagoda.engine.tokenizer import Tokenizer
    from pagoda.server.state import ServerConfig

MAX_DECODE_SLOWDOWN = 2.5  # docs/decisions/prefill-pace.md
NAME = "serve"
DESCRIPTION = """Serve a model to many clients at a time, with OpenAI's HTTP API.

The port opens at once: /health answers while the model loads, /ready when requests are
answered. Ctrl-C or SIGTERM finishes the requests there are; a second one aborts them."""
EXAMPLES = """\
  pagoda serve smollm2-135m
  pagoda serve ./model.gguf --max-model-len 8k --kv-cache-memory-bytes 4GiB
  pagoda serve smollm2-135m --host 0.0.0.0 --api-key SECRET --served-model-name chat
  curl http://localhost:8000/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello!"}]}'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    _add_engine_arguments(parser.add_argument_group("model and memory"))
    _add_scheduler_arguments(parser.add_argument_group("scheduling"))
    _add_http_arguments(parser.add_argument_group("HTTP"))
    _add_access_arguments(parser.add_argument_group("access"))


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--revision", metavar="NAME", help=REVISION_HELP)
    add("--quantization", metavar="TYPE", help=QUANTIZATION_HELP)
    add("--served-model-name", metavar="NAME", nargs="+", help="names in the API (default: MODEL as given)")
    add("--max-model-len", metavar="N", type=length, help="tokens of a prompt and its answer: 4096, 32k")
    add("--kv-cache-memory-bytes", metavar="SIZE", type=size, help="memory of the KV cache: 512MiB, 4GiB")
    add(
        "--kv-cache-dtype",
        default="auto",
        metavar="TYPE",
        help="auto, i16, f16, bf16, f32; cpu: i16 (default: auto)",
    )
    add("--block-size", metavar="N", type=int, default=16, help="tokens of a KV block (default: 16)")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV blocks of equal beginnings (default: on)",
    )
    add("--chat-template", metavar="FILE", help="Jinja template to use instead of the model's own")
    add("--tool-call-parser", metavar="NAME", choices=("hermes", "llama3_json"),
        help="how tool calls are written: hermes, llama3_json (default: as the template says)")  # fmt: skip
    add("--enable-auto-tool-choice", action="store_true",
        help="as vLLM has it; auto always works here, where the chat template knows tools")  # fmt: skip
    add("--threads", metavar="N", type=int, help="default: the cores that `pagoda info` shows")
    add("--backend", choices=("cpu", "reference"), default="cpu", help="reference is slow (default: cpu)")
    add("--seed", metavar="N", type=int, help="makes requests without a seed reproducible")


def _add_scheduler_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-num-seqs", metavar="N", type=int, default=64, help="sequences at a time (default: 64)")
    add("--max-num-batched-tokens", metavar="N", type=length, default=512, help="tokens of a step at most")
    add("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs", help="default: fcfs")
    add("--long-prefill-token-threshold", metavar="N", type=length, default=0,
        help="most tokens a step gives to one prefill (default: all)")  # fmt: skip
    add("--max-num-partial-prefills", metavar="N", type=int, default=1,
        help="prompts that may be computed in part at a time (default: 1)")  # fmt: skip
    add("--max-long-partial-prefills", metavar="N", type=int, default=1,
        help="of those, prompts above that threshold (default: 1)")  # fmt: skip
    add("--max-prefill-tokens-while-decoding", metavar="N", type=length, default=0,
        help="prompt tokens of a step that also decodes, so that streams keep pace (0: all)")  # fmt: skip
    add("--max-decode-slowdown", metavar="X", type=float, default=MAX_DECODE_SLOWDOWN,
        help="how many times longer prompts of others may make a step that decodes, as measured "
        f"(0: no limit; default: {MAX_DECODE_SLOWDOWN:g})")  # fmt: skip
    add("--max-num-queued-reqs", metavar="N", type=int, default=1024,
        help="sequences that may wait before more get 429; 0: no limit (default: 1024)")  # fmt: skip
    add("--max-num-queued-tokens", metavar="N", type=length, default=0,
        help="prompt tokens that may wait; 0: no limit (default: 0)")  # fmt: skip
    add("--max-output-tokens", metavar="N", type=length,
        help="tokens of one answer, whatever a client asks for (default: no limit)")  # fmt: skip


def _add_http_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in (default: 127.0.0.1)")
    add("--port", metavar="N", type=int, default=8000, help="0 takes a free one (default: 8000)")
    add("--root-path", metavar="PATH", default="", help="path that a proxy in front puts before the routes")
    add("--shutdown-timeout", metavar="S", type=float, default=30.0,
        help="seconds that running requests get to finish (default: 30)")  # fmt: skip
    add("--max-body-bytes", metavar="SIZE", type=size, default=16 * 2**20,
        help="of one request (default: 16MiB)")  # fmt: skip
    add("--ssl-certfile", metavar="FILE", help="certificate for https")
    add("--ssl-keyfile", metavar="FILE", help="its private key")
    add("--enable-log-requests", action=argparse.BooleanOptionalAction, default=False,
        help="one line a call in the log (default: off)")  # fmt: skip


def _add_access_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--api-key", metavar="KEY", nargs="+", action="extend", default=[],
        help="clients need one of these; also from PAGODA_API_KEY")  # fmt: skip
    add("--admin-api-key", metavar="KEY", nargs="+", action="extend", default=[],
        help="/cache and /requests need one of these")  # fmt: skip
    add("--allowed-origins", metavar="JSON", type=_json_list, default=(),
        help='origins of browsers that may call: ["*"] (default: none)')  # fmt: skip
    add("--allowed-methods", metavar="JSON", type=_json_list, default=("*",), help='default: ["*"]')
    add("--allowed-headers", metavar="JSON", type=_json_list, default=("*",), help='default: ["*"]')
    add("--allow-credentials", action="store_true", help="let browsers send cookies")


def execute(arguments: argparse.Namespace) -> int:
    template = _read_template(arguments.chat_template)
    config = _server_config(arguments)

    from pagoda.server.run import ListenConfig, Server

    def load(on_event: EventSink) -> Engine:
        engine = _load(arguments, on_event)
        if template is not None and engine.tokenizer is not None:
            engine.tokenizer = engine.tokenizer.with_chat_template(template)
            _ = engine.tokenizer.chat_template  # compiles it, so that a bad one is told now
        return engine

    listen = ListenConfig(
        host=arguments.host,
        port=arguments.port,
        ssl_certfile=arguments.ssl_certfile,
        ssl_keyfile=arguments.ssl_keyfile,
        access_log=arguments.enable_log_requests,
    )
    server = Server(
        config, load, listen, on_ready=lambda engine: _tell_choices(arguments, config, engine, server)
    )
    with _log_on_terminal():
        server.run()
    if server.error is not None:
        raise server.error
    if server.state.loaded_engine is None:
        # A signal came while the model was loading. The thread that loads cannot be interrupted, and native
        # code must not run while the process takes itself apart.
        os._exit(0)
    return 0 if server.uvicorn.started else 1


def _load(arguments: argparse.Namespace, on_event: EventSink) -> Engine:
    from pagoda.config import CacheConfig, SchedulerConfig
    from pagoda.engine.load import load_engine

    return load_engine(
        arguments.model,
        max_model_len=arguments.max_model_len,
        scheduler=SchedulerConfig(
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            scheduling_policy=arguments.scheduling_policy,
            long_prefill_token_threshold=arguments.long_prefill_token_threshold,
            max_num_partial_prefills=arguments.max_num_partial_prefills,
            max_long_partial_prefills=arguments.max_long_partial_prefills,
            max_prefill_tokens_while_decoding=arguments.max_prefill_tokens_while_decoding,
            max_decode_slowdown=arguments.max_decode_slowdown,
        ),
        cache=CacheConfig(
            block_size=arguments.block_size,
            kv_cache_dtype=arguments.kv_cache_dtype,
            kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
            enable_prefix_caching=arguments.enable_prefix_caching,
        ),
        backend=arguments.backend,
        num_threads=arguments.threads,
        seed=arguments.seed,
        quantization=arguments.quantization,
        revision=arguments.revision,
        on_event=on_event,
        progress=True,
    )


def _server_config(arguments: argparse.Namespace) -> ServerConfig:
    from pagoda.server.state import ServerConfig

    if (arguments.ssl_certfile is None) != (arguments.ssl_keyfile is None):
        arguments.usage_error("--ssl-certfile and --ssl-keyfile need each other")
    if arguments.shutdown_timeout < 0:
        arguments.usage_error(f"--shutdown-timeout is {arguments.shutdown_timeout:g}; it must be 0 or more")
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        if getattr(arguments, name) < 0:
            arguments.usage_error(f"--{name.replace('_', '-')} must be 0 or more")
    if arguments.max_output_tokens is not None and arguments.max_output_tokens < 1:
        arguments.usage_error("--max-output-tokens must be 1 or more")
    key = os.environ.get("PAGODA_API_KEY")
    api_keys = (*arguments.api_key, *([key] if key else []))
    if not all((*api_keys, *arguments.admin_api_key)):
        arguments.usage_error("an API key is empty")
    return ServerConfig(
        served_model_names=tuple(arguments.served_model_name or [arguments.model]),
        api_keys=api_keys,
        admin_api_keys=tuple(arguments.admin_api_key),
        max_num_queued_reqs=arguments.max_num_queued_reqs or None,
        max_num_queued_tokens=arguments.max_num_queued_tokens or None,
        max_output_tokens=arguments.max_output_tokens,
        max_body_bytes=arguments.max_body_bytes,
        shutdown_timeout_s=arguments.shutdown_timeout,
        allowed_origins=tuple(arguments.allowed_origins),
        allowed_methods=tuple(arguments.allowed_methods),
        allowed_headers=tuple(arguments.allowed_headers),
        allow_credentials=arguments.allow_credentials,
        root_path=arguments.root_path.rstrip("/"),
        tool_call_parser=arguments.tool_call_parser,
    )


def _tell_choices(
    arguments: argparse.Namespace, config: ServerConfig, engine: Engine, server: object
) -> None:
    """What was chosen, as a table on stderr."""
    from pagoda import machine
    from pagoda.cli.info import format_memory, instruction_set

    scheduler, tokenizer = engine.scheduler, engine.tokenizer
    spec = scheduler.kv.spec
    num_blocks = [pool.num_blocks for pool in scheduler.kv.pools]
    kv_bytes = sum(n * spec.block_bytes(group) for group, n in enumerate(num_blocks))
    threads = arguments.threads or (machine.num_usable_cores() if arguments.backend == "cpu" else 1)
    template = tokenizer.chat_template if tokenizer is not None else None
    limits = scheduler.config
    pool = f"{format_memory(kv_bytes)} of {spec.dtype}: {' + '.join(map(str, num_blocks))} blocks"
    step = f"up to {limits.max_num_batched_tokens} tokens of {limits.max_num_seqs} sequences"
    pace = f"{limits.max_decode_slowdown:g} times" if limits.max_decode_slowdown else "without limit"
    rows = [
        ("model", f"{arguments.model}, as {', '.join(config.served_model_names)}"),
        ("backend", f"{arguments.backend}, {threads} threads, {instruction_set()}"),
        ("max_model_len", f"{engine.max_model_len} tokens"),
        ("KV pool", f"{pool} of {spec.block_size} tokens"),
        ("step", f"{step}, {limits.scheduling_policy}"),
        ("decode slowdown", f"{pace}, by prompts of others"),
        ("prefix caching", "on" if scheduler.kv.config.enable_prefix_caching else "off"),
        ("chat template", "none: /v1/completions only" if template is None else "yes"),
        ("tool calls", _told_tool_format(arguments, tokenizer)),
        ("API keys", f"{len(config.api_keys)}, admin {len(config.admin_api_keys)}"),
    ]
    for label, value in rows:
        print(f"{label:<26}{terminal.printable(value)}", file=sys.stderr)
    scheme = "https" if arguments.ssl_certfile else "http"
    port = _port(server) or arguments.port
    note = " (this machine only; --host 0.0.0.0 lets others in)" if arguments.host == "127.0.0.1" else ""
    print(
        f"{'ready':<26}{scheme}://{arguments.host}:{port}{config.root_path}{note}",
        file=sys.stderr,
        flush=True,
    )


def _told_tool_format(arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> str:
    from pagoda.engine.tool_format import detect_tool_format

    template = tokenizer.tool_template if tokenizer is not None else None
    if template is None or not template.supports_tools:
        return "the chat template knows none: refused with 400"
    if arguments.tool_call_parser is not None:
        return str(arguments.tool_call_parser)
    form = detect_tool_format(template.source)
    return form.name if form is not None else "unknown form; --tool-call-parser names it"


def _port(server: object) -> int | None:
    """The one that the system chose for port 0."""
    from pagoda.server.run import Server

    assert isinstance(server, Server)
    return next((s.getsockname()[1] for bound in server.uvicorn.servers for s in bound.sockets), None)


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template {path} cannot be read: {error}", param="chat_template"
        ) from None


def _json_list(text: str) -> tuple[str, ...]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON list of strings, such as ["*"]')
    return tuple(values)


@contextmanager
def _log_on_terminal() -> Iterator[None]:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("pagoda")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # It warns of every write to a client who has just gone, which is no news.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
