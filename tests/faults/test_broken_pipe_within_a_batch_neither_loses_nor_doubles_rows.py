"""The connection between feeders and a node breaks in the middle of a batch; the node lives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

import sparkdl
from sparkdl.core.world import Member
from sparkdl.driver.feeds.transitions import feed_targets
from sparkdl.feed.transfer.messages import FeederError, Target
from tests.doubles.ledger import Plan, lost_and_doubled, table, train
from tests.doubles.nodes import SOON_S, launch
from tests.doubles.proxy import Proxy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS, WORDS = 400, 2000
ROWS_NBYTES = ROWS * WORDS * 8 // 4
"""Half of what the node gets through Flight; one batch has been stored by then."""
KEYS_NBYTES = 1200
"""Of streams that carry keys of what goes to a node on the same machine, where Spark feeds."""


class Way:
    """Where feeders of node 1 are sent: through a proxy, which breaks."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.break_at = 0
        self.proxy: Proxy | None = None

    def targets(self, members: Iterable[Member]) -> tuple[Target, ...]:
        first, second = feed_targets(members)
        if self.proxy is None:
            proxy = Proxy(second.uri, break_at=self.break_at)
            self.proxy = self._stack.enter_context(proxy)
        return first, replace(second, uri=self.proxy.uri)

    @property
    def has_broken(self) -> bool:
        return self.proxy is not None and self.proxy.has_broken


@pytest.fixture
def way_to_node_1(monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    with ExitStack() as stack:
        way = Way(stack)
        monkeypatch.setattr("sparkdl.driver.feeds.transitions.feed_targets", way.targets)
        yield way


def test_spark_repeats_the_tasks_and_each_row_is_there_once(
    spark_standalone: SparkSession, way_to_node_1: Way
) -> None:
    way_to_node_1.break_at = KEYS_NBYTES
    rows = spark_standalone.range(ROWS, numPartitions=4).withColumnRenamed("id", "row")
    options: dict[str, Any] = {"framework": "plain"}
    with sparkdl.launch(spark_standalone, train, Plan(every=999), 2, **options) as cluster:
        assert cluster.feed(rows).rows_fed == ROWS
        results = cluster.results(3 * SOON_S)
        assert cluster.world.generation == 0
    assert way_to_node_1.has_broken
    assert lost_and_doubled(results, ROWS) == (0, 0)


def test_without_spark_the_feed_says_which_node_it_was(
    way_to_node_1: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("runner", "transitions"):  # how long it waits for the end of a node
        monkeypatch.setattr(f"sparkdl.driver.feeds.{module}.REASON_S", 0.5)
    monkeypatch.setattr("sparkdl.feed.transfer.feeder.FdSender.connect", lambda name, token: None)
    way_to_node_1.break_at = ROWS_NBYTES
    (rows,) = table(ROWS)
    payload = pa.FixedSizeListArray.from_arrays(np.zeros(ROWS * WORDS), WORDS)
    with launch(train, Plan(every=999)) as cluster:
        with pytest.raises(FeederError, match="worker:1: "):
            whole = rows.append_column("payload", payload)
            cluster.feed([whole.slice(0, 1), whole.slice(1)])  # the second one to worker:1
        cluster.shutdown(SOON_S)
    assert way_to_node_1.has_broken
