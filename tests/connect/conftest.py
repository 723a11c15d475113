"""A Spark Connect server on a standalone cluster of two workers, and a client without a JVM."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import _watch
from tests.doubles.leaks import Police
from tests.doubles.programs import output_of
from tests.doubles.sessions import SparkSessions

_ROOT = Path(__file__).parents[2]
CLIENT = _ROOT / "build" / "connect-client" / "bin" / "python"
"""Of an environment with `pyspark-client` in place of pyspark: `make test-connect` builds it."""


@pytest.fixture(scope="session")
def connect_url(_nothing_outlives_the_run: None) -> Iterator[str]:
    """Give the URL of a server that belongs to all tests here; its two executors have 3 slots."""
    # It stops before the run's police looks. Made first, its JVMs would count as there before, and
    # the Python daemons that they started since as left behind.
    if not CLIENT.exists():
        pytest.skip("no environment of a client: make test-connect builds it")
    with SparkSessions(Path(tempfile.mkdtemp(prefix="connect-"))).connect_server() as url:
        yield url


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test(run_name: str, connect_url: str) -> Iterator[None]:
    yield from _watch(Police(run_name, has_spark=True))


@pytest.fixture
def client(connect_url: str, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Give a function that runs a topic of `client.py`, and returns what it said of each thing."""

    def run(topic: str) -> dict[str, Any]:
        command = (CLIENT, "-m", "tests.connect.client", connect_url, topic, tmp_path / topic)
        said = output_of(*command, timeout_s=240, cwd=_ROOT)
        found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        return {each["what"]: each["found"] for each in found}

    return run
