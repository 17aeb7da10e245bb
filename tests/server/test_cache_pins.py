"""Pins over HTTP: what they keep, how long, for whom, and what is told of them."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.server.servers import HELLO, VOCAB_SIZE, RunningServer, parrot, serving, user

PROMPT = "system prompt"  # 13 tokens, 3 whole blocks of 4
NUM_PINNED = 12


def compute(server: RunningServer, prompt: str, **fields: Any) -> int:
    """Have a prompt cached; how many of its tokens were so before."""
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, **fields}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    server.wait_until(server.is_idle)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def post(server: RunningServer, action: str, **body: Any) -> tuple[int, Any]:
    answer = server.http.post(f"/cache/{action}", json=body)
    return answer.status_code, answer.json()


def listed(server: RunningServer, **query: Any) -> list[dict[str, Any]]:
    return list(server.http.get("/cache", params=query).json()["prefixes"])


def fill_the_pool(server: RunningServer) -> None:
    for number in range(12):
        compute(server, f"{number:02} fills the pool with something else")


def test_a_pinned_prefix_outlives_others_and_an_unpinned_one_does_not() -> None:
    with serving(parrot, num_blocks=64) as server:
        compute(server, PROMPT)
        status, pinned = post(server, "pin", prompt=PROMPT)
        assert status == 200
        assert (pinned["num_tokens"], pinned["pinned"], pinned["ttl_s"]) == (NUM_PINNED, True, None)
        fill_the_pool(server)
        assert compute(server, PROMPT) >= NUM_PINNED
        assert post(server, "unpin", prompt=PROMPT) == (200, {"unpinned": True})
        fill_the_pool(server)
        assert compute(server, PROMPT) == 0


def test_the_listing_tells_what_is_pinned_and_used() -> None:
    with serving(parrot) as server:
        compute(server, PROMPT)
        compute(server, "another prompt")
        other, first = listed(server, preview=True)  # latest use first
        assert (first["preview"], other["preview"]) == (PROMPT[:12], "another prom")
        assert 0 <= other["idle_s"] <= first["idle_s"] < 20
        assert set(first) == {
            "hash", "num_tokens", "num_references", "idle_s", "pinned", "ttl_s", "preview",
        }  # fmt: skip
        assert post(server, "pin", hash=first["hash"], ttl_s=100)[0] == 200
        by_hash = {prefix["hash"]: prefix for prefix in listed(server)}
        assert by_hash[first["hash"]]["pinned"] and 80 < by_hash[first["hash"]]["ttl_s"] <= 100
        assert not by_hash[other["hash"]]["pinned"] and by_hash[other["hash"]]["ttl_s"] is None
        assert {prefix["num_references"] for prefix in by_hash.values()} == {0}


def test_references_are_those_of_running_requests() -> None:
    with serving(parrot, before_step=lambda step: time.sleep(0.02)) as server:
        body = {"prompt": "y" * 20, "max_tokens": 80, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # kept: an iterator that goes away hangs up
            next(lines)
            (prefix,) = listed(server)
            assert prefix["num_references"] == 1


def test_a_pin_ends_when_its_time_is_up() -> None:
    with serving(parrot) as server:
        compute(server, PROMPT)
        assert post(server, "pin", prompt=PROMPT, ttl_s=0.05)[1]["ttl_s"] <= 0.05
        server.wait_until(lambda: not listed(server)[0]["pinned"])
        status, answer = post(server, "unpin", prompt=PROMPT)
        assert status == 404 and answer["error"]["param"] == "prompt"


def test_the_beginning_of_chats_is_pinned_by_its_messages() -> None:
    system = [{"role": "system", "content": "Be brief, be kind."}]
    with serving(parrot, num_blocks=64) as server:
        server.client.chat.completions.create(model="test", messages=[*system, *HELLO])  # type: ignore[list-item]
        server.wait_until(server.is_idle)
        status, pinned = post(server, "pin", messages=system)
        assert (status, pinned["num_tokens"]) == (200, len("<system>Be brief, be kind.") // 4 * 4)
        fill_the_pool(server)
        answer = server.client.chat.completions.create(model="test", messages=[*system, *user("Bye")])  # type: ignore[list-item]
        assert answer.usage.prompt_tokens_details.cached_tokens >= pinned["num_tokens"]
        assert post(server, "unpin", messages=system) == (200, {"unpinned": True})
        status, answer = post(server, "unpin", messages=system)
        assert status == 404 and answer["error"]["param"] == "messages"


def test_pins_are_of_one_salt() -> None:
    with serving(parrot) as server:
        compute(server, PROMPT, cache_salt="mine")
        assert post(server, "pin", prompt=PROMPT)[0] == 400
        assert post(server, "pin", prompt=PROMPT, cache_salt="mine")[0] == 200
        assert post(server, "unpin", prompt=PROMPT)[0] == 404
        assert post(server, "unpin", prompt=PROMPT, cache_salt="mine")[0] == 200


def test_metrics_count_blocks_that_only_a_pin_keeps() -> None:
    with serving(parrot) as server:
        compute(server, PROMPT)
        post(server, "pin", prompt=[ord(c) for c in PROMPT])
        states = {
            s: server.metric("pagoda_kv_blocks", state=s) for s in ("free", "reusable", "used", "pinned")
        }
        assert states["pinned"] == NUM_PINNED // 4 and sum(states.values()) == 256
        assert server.http.get("/cache").json()["num_blocks"] == states
        assert server.metric("pagoda_kv_cache_usage_ratio") == 0  # no request holds them
        server.http.post("/cache/reset")
        assert server.metric("pagoda_kv_blocks", state="pinned") == 0 and listed(server) == []


def test_a_pool_is_pinned_in_part_only() -> None:
    with serving(parrot, num_blocks=36) as server:  # a sequence of 128 tokens needs 32
        compute(server, "y" * 40)
        status, answer = post(server, "pin", prompt="y" * 40)
        assert (status, answer["error"]["code"]) == (400, "pin_limit")
        assert "10 more pinned blocks" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "hash": "00"}, "prompt"),
        ({"prompt": "a", "messages": HELLO}, "prompt"),
        ({"messages": user("never seen before")}, "messages"),
        ({"messages": []}, "messages"),
        ({"prompt": PROMPT, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"hash": "00", "tools": []}, "tools"),
        ({"hash": "no hash"}, "hash"),
        ({"hash": ""}, "hash"),
        ({"hash": "00" * 16}, "hash"),
        ({"hash": "00", "cache_salt": "a"}, "cache_salt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "never seen before"}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": PROMPT, "ttl_s": 0}, "ttl_s"),
        ({"prompt": PROMPT, "ttl_s": "5"}, "ttl_s"),
        ({"prompt": PROMPT, "ttl": 5}, "ttl"),
    ],
)
def test_what_cannot_be_pinned_is_refused_by_name(
    server: RunningServer, body: dict[str, Any], param: str
) -> None:
    compute(server, PROMPT)
    status, answer = post(server, "pin", **body)
    assert status == 400 and answer["error"]["param"] == param, answer
    assert not any(prefix["pinned"] for prefix in listed(server, limit=1000))


def test_pins_need_the_administrators_key() -> None:
    config = {"api_keys": ("user",), "admin_api_keys": ("root",)}
    with serving(parrot, config=config) as server, httpx.Client(base_url=server.url) as http:
        compute(server, PROMPT)
        for action in ("pin", "unpin"):
            for key, status in ((None, 401), ("user", 401), ("root", 200)):
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                body = {"prompt": PROMPT}
                assert http.post(f"/cache/{action}", json=body, headers=headers).status_code == status
