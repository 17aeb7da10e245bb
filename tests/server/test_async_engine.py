"""`AsyncEngine` without HTTP: streams, aborts, failures, idling, draining."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pagoda import AsyncLLM, SamplingParams
from pagoda.engine.async_engine import AsyncEngine, EngineStoppedError
from pagoda.engine.output import OutputKind, RequestOutput
from pagoda.engine.request_stream import EngineRequest
from pagoda.errors import RequestError
from tests.server.servers import EOS, parrot, scripted_loader

ENDLESS = SamplingParams(max_tokens=100, ignore_eos=True)


def with_engine(test: Callable[[AsyncEngine], Awaitable[None]], script: Any = parrot, **options: Any) -> None:
    async def run() -> None:
        engine = AsyncEngine(scripted_loader(script, [], **options)(lambda event: None))
        async with engine:
            await asyncio.wait_for(test(engine), 20)
            await asyncio.sleep(0)
            scheduler = engine.engine.scheduler
            while scheduler.requests or engine.num_unfinished:  # aborts that nobody waited for
                await asyncio.sleep(0.001)
            assert not engine._thread.live and all(u.num_held == 0 for u in scheduler.kv.usage())

    asyncio.run(run())


async def text_of(engine: AsyncEngine, prompt: str, **options: Any) -> str:
    params = SamplingParams(max_tokens=50)
    return "".join([o.outputs[0].text async for o in engine.generate(prompt, params, **options)])


def test_many_streams_at_a_time() -> None:
    async def test(engine: AsyncEngine) -> None:
        words = [f"word {number}" for number in range(30)]
        assert await asyncio.gather(*(text_of(engine, f"{word}<a>") for word in words)) == words

    with_engine(test)
    assert AsyncLLM is AsyncEngine


def test_a_refused_request_leaves_nothing() -> None:
    async def test(engine: AsyncEngine) -> None:
        good = EngineRequest(request_id="a", prompt="good<a>", params=SamplingParams())
        bad = EngineRequest(request_id="b", prompt="y" * 500, params=SamplingParams())
        with pytest.raises(RequestError, match="500 tokens"):
            await engine.submit([good, bad])
        assert engine.num_unfinished == 0
        endless = EngineRequest(request_id="a", prompt="x", params=ENDLESS)
        stream = await engine.submit([endless])
        with pytest.raises(RequestError, match="in use"):
            await engine.submit([good])
        engine.abort_soon(["a"])
        async for _ in stream:
            pass
        assert await text_of(engine, "good<a>") == "good"

    with_engine(test, before_step=lambda step: time.sleep(0.005))


def test_leaving_an_iterator_aborts() -> None:
    async def test(engine: AsyncEngine) -> None:
        outputs = engine.generate("y", ENDLESS)
        async for _ in outputs:
            break
        await outputs.aclose()  # type: ignore[attr-defined]
        num_steps = engine.engine.scheduler.num_steps
        await asyncio.sleep(0.05)
        assert engine.engine.scheduler.num_steps <= num_steps + 1

    with_engine(test)


def test_a_cancelled_submit_aborts() -> None:
    """E08: the caller has gone before the engine has answered."""

    async def test(engine: AsyncEngine) -> None:
        for delay_s in (0, 0, 0.001, 0.005):
            request = EngineRequest(request_id=f"r{time.monotonic()}", prompt="y", params=ENDLESS)
            task = asyncio.create_task(engine.submit([request]))
            await asyncio.sleep(delay_s)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await task).cancel()

    with_engine(test, before_step=lambda step: time.sleep(0.005))


def test_an_aborted_stream_gets_its_last_output() -> None:
    async def test(engine: AsyncEngine) -> None:
        request = EngineRequest(request_id="a", prompt="y", params=ENDLESS, output_kind=OutputKind.FINAL)
        stream = await engine.submit([request])
        assert await engine.abort(["a", "unknown"]) == ["a"]
        (output,) = [output async for output in stream]
        assert output.finished and output.outputs[0].finish_reason == "abort"
        assert await engine.abort(["a"]) == []

    with_engine(test, before_step=lambda step: time.sleep(0.002))


def test_a_failing_executor_ends_requests_and_not_the_engine() -> None:
    """B56"""
    broken = True

    def fail(step: object) -> None:
        if broken:
            raise OSError("no device")

    async def test(engine: AsyncEngine) -> None:
        nonlocal broken
        for _ in range(2):
            (output,) = [output async for output in engine.generate("a<a>", ENDLESS)]
            assert (output.outputs[0].finish_reason, output.outputs[0].error) == (
                "error",
                "OSError: no device",
            )
        broken = False
        assert await text_of(engine, "fine<a>") == "fine"

    with_engine(test, before_step=fail)


def test_a_bug_in_the_engine_leaves_nobody_waiting() -> None:
    async def test(engine: AsyncEngine) -> None:
        step = engine.engine.step

        def broken_step() -> list[RequestOutput]:
            raise ZeroDivisionError("a bug")

        engine.engine.step = broken_step  # type: ignore[method-assign]
        outputs = await asyncio.gather(*(_last(engine, f"word {n}") for n in range(3)))
        assert [o.outputs[0].finish_reason for o in outputs] == ["error"] * 3
        assert engine.failure == "ZeroDivisionError: a bug"
        engine.engine.step = step  # type: ignore[method-assign]
        assert await text_of(engine, "again<a>") == "again"
        assert engine.failure is None

    with_engine(test)


async def _last(engine: AsyncEngine, prompt: str) -> RequestOutput:
    return [output async for output in engine.generate(prompt)][-1]


def test_an_idle_engine_does_not_spin() -> None:
    async def test(engine: AsyncEngine) -> None:
        await text_of(engine, "warm<a>")
        start_s = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - start_s < 0.1

    with_engine(test)


def test_draining_waits_and_then_aborts() -> None:
    async def test(engine: AsyncEngine) -> None:
        assert await engine.drain(0.01)
        stream = await engine.submit(
            [EngineRequest(request_id="a", prompt="y", params=SamplingParams(max_tokens=5))]
        )
        assert await engine.drain(10) and not stream.unfinished
        endless = await engine.submit([EngineRequest(request_id="b", prompt="y", params=ENDLESS)])
        assert not await engine.drain(0.01)
        assert [o.outputs[0].finish_reason async for o in endless][-1] == "abort"

    with_engine(test, before_step=lambda step: time.sleep(0.005))


def test_closing_ends_what_runs_and_refuses_the_rest() -> None:
    async def run() -> None:
        engine = AsyncEngine(
            scripted_loader([ord("a"), EOS], [], before_step=lambda step: time.sleep(0.005))(
                lambda event: None
            )
        )
        with pytest.raises(EngineStoppedError, match="start"):
            await engine.call(lambda e: None)
        engine.start()
        streams = [
            await engine.submit([EngineRequest(request_id=str(n), prompt="y", params=ENDLESS)])
            for n in range(3)
        ]
        late = asyncio.create_task(engine.submit([EngineRequest(request_id="x", prompt="y", params=ENDLESS)]))
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        for stream in (*streams, await late):
            assert [o.outputs[0].finish_reason async for o in stream][-1] == "abort"
        with pytest.raises(EngineStoppedError):
            await engine.submit([EngineRequest(request_id="z", prompt="y", params=ENDLESS)])

    asyncio.run(asyncio.wait_for(run(), 20))
