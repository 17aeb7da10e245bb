"""A real server on a loopback port, in a thread, over an engine with a `ScriptedExecutor`.

with serving([ord("a"), EOS]) as server:
    server.client.chat.completions.create(model="test", messages=[...])
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import openai

from pagoda.config import CacheConfig, SchedulerConfig
from pagoda.core.cost import KVCacheSpec, LayerGroup
from pagoda.core.events import EventSink
from pagoda.core.invariants import check_state, check_step
from pagoda.core.scheduler import Scheduler
from pagoda.core.step import SchedulerOutput
from pagoda.engine.engine import Engine
from pagoda.engine.token_bytes import byte_alphabet
from pagoda.engine.tokenizer import Tokenizer
from pagoda.server.run import ListenConfig, Server
from pagoda.server.state import Phase, ServerConfig
from pagoda.sim.scripted_executor import Script, ScriptedExecutor

EOS = 256
START = 257
PIECES = ("DEF", "G", "HI", "J", "X", "?\n", "ple", "as", "stop me")
VOCAB_SIZE = 258 + len(PIECES)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
HELLO_TOKENS = len("<user>Hello<a>")


def piece(text: str) -> int:
    return 258 + PIECES.index(text)


def text_tokens(text: str) -> list[int]:
    return list(text.encode())


def byte_tokenizer() -> Tokenizer:
    alphabet = byte_alphabet()
    pieces = ["".join(alphabet[byte] for byte in p.encode()) for p in PIECES]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*alphabet, "<|eos|>", "<|start|>", *pieces],
            "tokenizer.ggml.token_type": np.array([1] * 256 + [3, 3] + [1] * len(pieces), np.int32),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": EOS,
            "tokenizer.chat_template": TEMPLATE,
        }
    )


def parrot(history: Sequence[int]) -> int:
    """Answers what stands between the last `>` and `<a>`, then EOS; without `<a>` it says x for ever."""
    text = bytes(token if token < 256 else 0 for token in history)
    end = text.find(b"<a>")
    if end < 0:
        return ord("x")
    start = text.rfind(b">", 0, end) + 1
    num_said = len(history) - end - len("<a>")
    return history[start + num_said] if start + num_said < end else EOS


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass
class RunningServer:
    server: Server
    url: str
    executor: ScriptedExecutor
    client: openai.OpenAI
    http: httpx.Client

    @property
    def scheduler(self) -> Scheduler:
        engine = self.server.state.loaded_engine
        assert engine is not None
        return engine.engine.scheduler

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, "it does not come about"
            time.sleep(0.002)

    def is_idle(self) -> bool:
        held = sum(u.num_held for u in self.scheduler.kv.usage())
        return not self.scheduler.requests and held == 0 and not self.server.state.active

    def metric(self, name: str, **labels: str) -> float:
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        raise AssertionError(f"no metric {name} {labels}")


def scripted_loader(
    script: Script,
    executors: list[ScriptedExecutor],
    *,
    num_blocks: int = 256,
    block_size: int = 4,
    max_model_len: int = 128,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    before_step: Callable[[SchedulerOutput], None] | None = None,
    scheduling_policy: str = "fcfs",
    max_decode_slowdown: float = 0.0,
    tokenizer: Tokenizer | None = None,
) -> Callable[[EventSink], Engine]:
    def load(on_event: EventSink) -> Engine:
        spec = KVCacheSpec((LayerGroup((0,), 1, 8, None),), block_size)

        def check(step: SchedulerOutput) -> None:
            check_step(scheduler, step)
            check_state(scheduler)
            if before_step is not None:
                before_step(step)

        executor = ScriptedExecutor(
            script, vocab_size=VOCAB_SIZE, num_blocks=(num_blocks,), block_size=block_size, before_step=check
        )
        executors.append(executor)
        scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                scheduling_policy=scheduling_policy,  # type: ignore[arg-type]
                max_decode_slowdown=max_decode_slowdown,
            ),
            spec,
            (num_blocks,),
            cache=CacheConfig(block_size=block_size),
            on_event=on_event,
        )
        return Engine(
            executor,
            scheduler,
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            tokenizer=tokenizer or byte_tokenizer(),
            eos_token_ids={EOS},
            seed=1,
        )

    return load


@contextmanager
def running(
    load: Callable[[EventSink], Engine],
    *,
    wait: bool = True,
    listen: ListenConfig | None = None,
    **config: Any,
) -> Iterator[RunningServer]:
    """A server over any engine; without `wait` it may still be loading."""
    config.setdefault("served_model_names", ("test",))
    config.setdefault("shutdown_timeout_s", 5.0)
    server = Server(ServerConfig(**config), load, listen or ListenConfig(port=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 20
    while not server.uvicorn.started or (wait and server.state.phase is Phase.LOADING):
        assert thread.is_alive() and time.monotonic() < deadline_s, (
            f"the server did not start: {server.error}"
        )
        time.sleep(0.002)
    port = server.uvicorn.servers[0].sockets[0].getsockname()[1]
    scheme = "http" if listen is None else "https"
    url = f"{scheme}://127.0.0.1:{port}"
    key = (config.get("api_keys") or ("none",))[0]
    headers = {"Authorization": f"Bearer {key}"}
    unverified = openai.DefaultHttpxClient(verify=False)  # reading the system's authorities takes long
    with (
        openai.OpenAI(
            base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20, http_client=unverified
        ) as client,
        httpx.Client(base_url=url, headers=headers, timeout=20, verify=False) as http,
    ):
        try:
            yield RunningServer(server, url, None, client, http)  # type: ignore[arg-type]
        finally:
            server.stop()
            thread.join(15)
            assert not thread.is_alive(), "the server does not end"


@contextmanager
def serving(
    script: Script, *, config: dict[str, Any] | None = None, **engine: Any
) -> Iterator[RunningServer]:
    executors: list[ScriptedExecutor] = []
    with running(scripted_loader(script, executors, **engine), **(config or {})) as server:
        server.executor = executors[0]
        yield server
        server.wait_until(server.is_idle)
