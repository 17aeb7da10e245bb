from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagoda.config import CacheConfig, SchedulerConfig
from pagoda.core.events import EventSink
from pagoda.engine.engine import Engine
from pagoda.engine.load import load_engine
from tests.real_models import SMOLLM2, real_model
from tests.server.servers import RunningServer, parrot, running, serving


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Repeats what the user said (`parrot`); room for 128 tokens a sequence. Idle again at its end."""
    with serving(parrot) as running:
        yield running


@pytest.fixture(scope="session")
def smol() -> Iterator[RunningServer]:
    """SmolLM2 on the native backend; room for 1024 tokens a sequence."""
    path = real_model(SMOLLM2)

    def load(on_event: EventSink) -> Engine:
        return load_engine(
            path,
            max_model_len=1024,
            scheduler=SchedulerConfig(max_num_seqs=8),
            cache=CacheConfig(kv_cache_memory_bytes=128 * 2**20),
            on_event=on_event,
        )

    with running(load, served_model_names=("smol",)) as server:
        yield server
        server.wait_until(server.is_idle)
