"""Many clients that abort, ask too much and send nonsense: every call is answered, nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.server.servers import parrot, serving

NONSENSE: list[Any] = [
    b"{",
    b"\xff",
    b"[1]",
    b'{"prompt": 5}',
    b'{"prompt": "a", "n": 0}',
    b'{"prompt": "a", "no_such": 1}',
    b'{"prompt": "a", "model": "gpt"}',
    b'{"prompt": "a", "echo": true, "logprobs": 99}',
    b'{"prompt": [], "stream": true}',
    b'{"messages": []}',
]


async def one_call(client: httpx.AsyncClient, rng: random.Random, seen: Counter[str]) -> None:
    kind = rng.choice(["whole", "stream", "gone", "too long", "nonsense", "chat"])
    text = "shared prefix " * rng.randint(0, 4) + "".join(rng.choices("abcdef", k=rng.randint(1, 20)))
    body: dict[str, Any] = {
        "prompt": f"{text}<a>",
        "max_tokens": rng.randint(1, 40),
        "n": rng.choice([1, 1, 2]),
    }
    path = "/v1/completions"
    if kind == "nonsense":
        response = await client.post(
            path, content=rng.choice(NONSENSE), headers={"Content-Type": "application/json"}
        )
        assert response.status_code in (400, 404), response.text
    elif kind == "too long":
        response = await client.post(path, json={**body, "prompt": "y" * rng.randint(129, 4000)})
        assert response.status_code == 400 and "128" in response.text, response.text
    elif kind == "gone":
        timeout = httpx.Timeout(5, read=rng.uniform(0.0005, 0.05))
        body |= {"prompt": "y" + text, "max_tokens": 50, "stream": rng.random() < 0.5}
        try:
            response = await client.post(path, json=body, timeout=timeout)
            assert response.status_code in (200, 429), response.text
        except httpx.ReadTimeout:
            pass
    elif kind == "stream":
        async with client.stream("POST", path, json={**body, "stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
            assert answer.status_code in (200, 429), lines
            assert answer.status_code == 429 or lines[-1] == "data: [DONE]"
    else:
        if kind == "chat":
            path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}
        response = await client.post(path, json=body)
        assert response.status_code in (200, 429), response.text
        if response.status_code == 200:
            num_tokens = response.json()["usage"]["completion_tokens"]
            room = 128 - len(f"<user>{text}<a>")
            assert kind == "whole" or num_tokens == min(len(text) + 1, room)
    seen[kind] += 1


async def load(url: str, num_clients: int, seconds: float) -> Counter[str]:
    seen: Counter[str] = Counter()
    end_s = time.monotonic() + seconds

    async def client_loop(number: int) -> None:
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=30, verify=False) as client:
            while time.monotonic() < end_s:
                await one_call(client, rng, seen)

    await asyncio.gather(*(client_loop(number) for number in range(num_clients)))
    return seen


@pytest.mark.parametrize(
    ("num_clients", "seconds"),
    [(16, 2.0), pytest.param(64, 240.0, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_a_mixed_load_leaves_nothing_behind(num_clients: int, seconds: float) -> None:
    """E08, E09, E12, F08; under a pool so small that requests are preempted."""
    config = {"max_num_queued_reqs": 40}
    engine: dict[str, Any] = {"num_blocks": 72, "max_num_seqs": 16, "max_decode_slowdown": 2.5}
    with serving(parrot, config=config, **engine) as server:
        seen = asyncio.run(load(server.url, num_clients, seconds))
        print(f"\n{sum(seen.values())} calls: {dict(seen)}")
        assert set(seen) == {"whole", "stream", "gone", "too long", "nonsense", "chat"}
        server.wait_until(server.is_idle)
        reasons = {
            reason: server.metric("pagoda_requests_finished_total", finish_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        assert reasons["error"] == 0 and reasons["abort"] > 0
        assert server.metric("pagoda_e2e_request_latency_seconds_count") == sum(reasons.values())
        metrics = server.server.state.metrics
        assert not metrics._last_token_s and not metrics._had_first_token and not metrics._reasons
        assert server.metric("pagoda_preemptions_total") > 0
