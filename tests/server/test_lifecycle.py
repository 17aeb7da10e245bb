"""Clients that go, queues that are full, keys, loading, draining: nothing is lost, nothing stays behind."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pagoda.core.events import EventSink
from pagoda.engine.engine import Engine
from pagoda.errors import ModelNotFoundError
from pagoda.server.run import ListenConfig, Server
from pagoda.server.state import Phase, ServerConfig
from tests.server.servers import HELLO, RunningServer, parrot, running, scripted_loader, serving, user

ENDLESS = {"prompt": "y", "max_tokens": 120, "ignore_eos": True}


def slow_step(step: object) -> None:
    time.sleep(0.01)


def send(server: RunningServer, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A call whose answer nobody has read yet."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(content)}", "", ""]
    connection.sendall("\r\n".join(lines).encode() + content)
    return connection


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_is_noticed_within_steps(streams: bool, half: bool) -> None:
    """E08, F08: the request is aborted and its blocks are free; also after a half-close."""
    with serving(parrot, before_step=slow_step) as server:
        connection = send(server, {**ENDLESS, "stream": streams, "n": 2})
        server.wait_until(lambda: server.scheduler.num_running == 2)
        time.sleep(0.05)
        if half:
            connection.shutdown(socket.SHUT_WR)
        else:
            connection.close()
        num_steps = len(server.executor.steps)
        server.wait_until(server.is_idle)
        assert len(server.executor.steps) - num_steps < 20
        assert server.metric("pagoda_requests_finished_total", finish_reason="abort") == 1
        connection.close()


def test_clients_that_go_at_any_time_leave_nothing() -> None:
    """E08, E09, E12, F08: waiting, before the headers, in mid-prompt, in mid-stream."""
    with serving(parrot, max_num_seqs=2, before_step=lambda step: time.sleep(0.002)) as server:
        for number in range(40):
            connection = send(server, {**ENDLESS, "prompt": "y" * (1 + number), "stream": bool(number % 2)})
            time.sleep(0.001 * (number % 7))
            connection.close()
        server.wait_until(server.is_idle)
        engine = server.server.state.loaded_engine
        assert engine is not None and engine.num_unfinished == 0 and not engine._thread.live
        text = server.client.completions.create(model="test", prompt="still<a>").choices[0].text
        assert text == "still"
        finished = [
            server.metric("pagoda_requests_finished_total", finish_reason=r)
            for r in ("abort", "stop", "length", "error")
        ]
        assert finished[1:] == [1, 0, 0] and finished[0] <= 40
        for histogram in ("_e2e_request_latency_seconds", "_request_prompt_tokens"):
            assert server.metric(f"pagoda{histogram}_count") == sum(finished)


def test_abort_by_id_ends_the_answer() -> None:
    with serving(parrot, before_step=slow_step) as server, ThreadPoolExecutor() as pool:
        for verb, path in (("DELETE", "/requests/{}"), ("POST", "/requests/{}/abort")):
            call = pool.submit(server.http.post, "/v1/completions", json={**ENDLESS, "request_id": verb})
            server.wait_until(lambda: server.scheduler.num_running == 1)
            (listed,) = server.http.get("/requests").json()["requests"]
            assert listed["request_id"] == f"cmpl-{verb}" and listed["status"] == "running"
            in_use = server.http.post("/v1/completions", json={**ENDLESS, "request_id": verb})
            assert in_use.json()["error"]["param"] == "request_id"
            assert server.http.request(verb, path.format(verb)).json() == {"aborted": [f"cmpl-{verb}"]}
            answer = call.result().json()
            assert answer["choices"][0]["finish_reason"] == "abort"
            assert server.http.request(verb, path.format(verb)).status_code == 404


def test_a_full_queue_gets_429_and_says_when_to_come_back() -> None:
    config = {"max_num_queued_reqs": 2}
    with serving(parrot, config=config, max_num_seqs=1, before_step=slow_step) as server:
        connections = [send(server, ENDLESS) for _ in range(3)]
        server.wait_until(lambda: server.scheduler.num_waiting == 2)
        with pytest.raises(openai.RateLimitError) as refused:
            server.client.completions.create(model="test", prompt="a")
        assert 1 <= int(refused.value.response.headers["Retry-After"]) <= 60
        assert refused.value.code == "queue_full"
        assert server.metric("pagoda_requests_refused_total") == 1
        for connection in connections:
            connection.close()
        server.wait_until(server.is_idle)
        assert server.client.completions.create(model="test", prompt="a<a>").choices[0].text == "a"


def test_a_burst_never_queues_more_than_it_may() -> None:
    """Requests that arrive between two steps are counted before the engine has seen them."""
    config = {"max_num_queued_reqs": 3}
    with (
        serving(parrot, config=config, max_num_seqs=2, before_step=slow_step) as server,
        ThreadPoolExecutor(16) as pool,
    ):
        body = {"prompt": "word<a>"}
        calls = list(pool.map(lambda _: server.http.post("/v1/completions", json=body), range(16)))
        codes = [call.status_code for call in calls]
    assert set(codes) == {200, 429} and codes.count(200) >= 5


def test_queued_tokens_are_limited() -> None:
    config = {"max_num_queued_tokens": 50}
    with serving(parrot, config=config, max_num_seqs=1, before_step=slow_step) as server:
        connections = [send(server, {**ENDLESS, "prompt": "y" * 40, "max_tokens": 80}) for _ in range(2)]
        server.wait_until(lambda: server.scheduler.num_waiting == 1)
        small = server.http.post("/v1/completions", json={"prompt": "y" * 20})
        assert small.status_code == 429 and "tokens" in small.json()["error"]["message"]
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("admin", [(), ("root",)])
def test_keys_guard_everything_but_health(admin: tuple[str, ...]) -> None:
    config = {"api_keys": ("one", "two"), "admin_api_keys": admin}
    with serving(parrot, config=config) as server, httpx.Client(base_url=server.url, verify=False) as http:

        def status(path: str, key: str | None) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return http.get(path, headers=headers).status_code

        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/cache", "/requests"):
            assert [status(path, key) for key in (None, "wrong", "on", "onetwo", "ONE")] == [401] * 5
        assert [status("/v1/models", key) for key in ("one", "two")] == [200, 200]
        assert [status(path, None) for path in ("/health", "/ready")] == [200, 200]
        assert [status("/cache", key) for key in ("one", "root")] == ([401, 200] if admin else [200, 401])
        with pytest.raises(openai.AuthenticationError, match="API key"):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0).models.list()


def test_small_answers_are_not_held_back(server: RunningServer) -> None:
    """Nagle's algorithm and delayed acknowledgements together would cost 40 ms a call."""

    def call_s() -> float:
        start_s = time.monotonic()
        server.http.get("/version")
        return time.monotonic() - start_s

    assert min(call_s() for _ in range(10)) < 0.03


def test_a_bug_is_told_without_its_details(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(parrot) as server:
        monkeypatch.setattr("pagoda.server.admin._requests", lambda engine: 1 / 0)
        response = server.http.get("/requests")
        assert response.status_code == 500 and "division" not in response.text
        assert response.json()["error"]["type"] == "server_error"
        assert server.http.get("/health").status_code == 200


def test_https() -> None:
    certificate = str(Path(__file__).parent / "loopback.pem")  # of 127.0.0.1, with its key; for tests alone
    listen = ListenConfig(port=0, ssl_certfile=certificate, ssl_keyfile=certificate)
    with running(scripted_loader(parrot, []), listen=listen) as server:
        context = ssl.create_default_context(cafile=certificate)
        assert httpx.get(f"{server.url}/health", verify=context).status_code == 200


def test_request_ids_are_answered_with(server: RunningServer) -> None:
    assert server.http.get("/version", headers={"X-Request-Id": "abc-1"}).headers["X-Request-Id"] == "abc-1"
    made = {server.http.get("/nothing").headers["X-Request-Id"] for _ in range(2)}
    assert len(made) == 2


def test_browsers_of_allowed_origins_may_call() -> None:
    config = {"allowed_origins": ("https://a.example",), "api_keys": ("k",)}
    with serving(parrot, config=config) as server:
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        allowed = server.http.options("/v1/completions", headers={"Origin": "https://a.example", **ask})
        assert allowed.status_code == 200
        assert allowed.headers["Access-Control-Allow-Origin"] == "https://a.example"
        other = server.http.get("/version", headers={"Origin": "https://b.example"})
        assert "Access-Control-Allow-Origin" not in other.headers


def test_a_root_path_is_cut_off() -> None:
    with serving(parrot, config={"root_path": "/llm", "api_keys": ("k",)}) as server:
        assert [server.http.get(f"{root}/v1/models").status_code for root in ("", "/llm")] == [200, 200]
        server.http.headers.pop("Authorization")
        assert server.http.get("/llm/health").status_code == 200
        assert [server.http.get(f"{root}/v1/models").status_code for root in ("", "/llm")] == [401, 401]


def test_health_is_answered_while_the_model_loads() -> None:
    may_load = threading.Event()
    load = scripted_loader(parrot, [])

    def slow_load(on_event: EventSink) -> Engine:
        may_load.wait(20)
        return load(on_event)

    with running(slow_load, wait=False) as server:
        assert [server.http.get(path).status_code for path in ("/health", "/ready")] == [200, 503]
        with pytest.raises(openai.InternalServerError) as refused:
            server.client.completions.create(model="test", prompt="a")
        assert (refused.value.status_code, refused.value.code) == (503, "loading")
        assert refused.value.response.headers["Retry-After"]
        assert server.http.get("/metrics").status_code == 200
        may_load.set()
        server.wait_until(lambda: server.http.get("/ready").status_code == 200)
        assert server.client.completions.create(model="test", prompt="a<a>").choices[0].text == "a"


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load(on_event: EventSink) -> Engine:
        raise ModelNotFoundError("there is no such model")

    server = Server(ServerConfig(served_model_names=("m",)), load, ListenConfig(port=0))
    server.run()
    assert isinstance(server.error, ModelNotFoundError)


def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    with serving(parrot, before_step=slow_step) as server, ThreadPoolExecutor() as pool:
        whole = pool.submit(server.client.completions.create, model="test", prompt="y", max_tokens=60)
        stream = server.client.chat.completions.create(model="test", messages=user("y" * 40), stream=True)  # type: ignore[call-overload]
        next(stream)
        server.wait_until(lambda: server.scheduler.num_running == 2)
        server.server.stop()
        server.wait_until(lambda: server.http.get("/ready").status_code == 503)
        assert server.http.get("/health").status_code == 200
        refused = server.http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert whole.result().usage.completion_tokens == 60
        assert [c.choices[0].finish_reason for c in stream][-1] == "stop"
        assert server.server.state.phase is Phase.DRAINING


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_what_does_not_finish_in_time_is_aborted(how: str) -> None:
    config = {"shutdown_timeout_s": 0.1 if how == "timeout" else 60.0}
    with (
        serving(parrot, config=config, before_step=slow_step, max_model_len=4096, num_blocks=2048) as server,
        ThreadPoolExecutor() as pool,
    ):
        call = pool.submit(server.http.post, "/v1/completions", json={**ENDLESS, "max_tokens": 4000})
        server.wait_until(lambda: server.scheduler.num_running == 1)
        server.server.stop()
        if how == "second signal":
            server.server.stop()
        assert call.result(10).json()["choices"][0]["finish_reason"] == "abort"


def test_the_cache_can_be_looked_at_and_emptied() -> None:
    with serving(parrot) as server:
        client = server.client.chat.completions
        client.create(model="test", messages=HELLO)  # type: ignore[arg-type]
        listed = server.http.get("/cache", params={"preview": "true"}).json()
        (prefix,) = listed["prefixes"]
        assert prefix["preview"] == "<user>Hello<a>He" and prefix["num_tokens"] == 16  # whole blocks
        assert "preview" not in server.http.get("/cache").json()["prefixes"][0]
        assert server.http.post("/cache/reset").json() == {"num_forgotten_blocks": 5}
        assert server.http.get("/cache").json()["prefixes"] == []
        usage = client.create(model="test", messages=HELLO).usage  # type: ignore[arg-type]
        assert usage.prompt_tokens_details.cached_tokens == 0
        assert server.http.get("/cache", params={"limit": 0}).status_code == 400
