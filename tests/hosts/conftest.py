"""What tests on several hosts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.bed import Bed, hosts, why_not


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    """Three hosts: h0 for the driver and Spark's master, h1 and h2 for workers."""
    if reason := why_not():
        pytest.skip(reason)
    with hosts(tmp_path, "h0", "h1", "h2") as made:
        yield made
