from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.servers import RunningServer, parrot, serving


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Repeats what the user said (`parrot`); room for 128 tokens a sequence. Idle again at its end."""
    with serving(parrot) as running:
        yield running
