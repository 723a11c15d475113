"""What the tests of the dashboard share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparkdl.driver import dashboard


@pytest.fixture
def no_dashboard_stays() -> Iterator[None]:
    """End the program's dashboard afterwards; the next launch starts another."""
    yield
    with dashboard._lock:
        while dashboard._running:
            dashboard._running.pop().close()
