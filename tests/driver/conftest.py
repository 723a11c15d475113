"""Nodes on Spark that stay up for this folder, and names of feeds.

A body that `Lab.begin` runs reads the feed that the fixture `feed` names, so that each test has a
feed of its own.
"""

from __future__ import annotations

import pytest

from sparkdl.core.options import Feeding, Startup
from tests.doubles.labs import Lab, lab
from tests.doubles.sessions import CLUSTER, SparkSessions


@pytest.fixture
def feed(request: pytest.FixtureRequest) -> str:
    name: str = request.node.name
    return name


@pytest.fixture(scope="package")
def on_spark(spark_sessions: SparkSessions, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Two nodes on `spark_cluster`, of which each holds 64 KiB of a feed; the rest has to wait."""
    spark_sessions.get(CLUSTER)
    feeding = Feeding(timeout_s=60.0, memory_nbytes=1 << 16, disk_nbytes=0)
    folder, startup = tmp_path_factory.mktemp("lab"), Startup(placement="detached")
    made = lab(folder, "plain", 2, executor="spark", feeding=feeding, startup=startup)
    return spark_sessions.nodes.enter_context(made)
