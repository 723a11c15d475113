"""The connection between feeders and a node breaks in the middle of a batch; the node lives."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.core.world import Member
from sparkdl.driver.feeds.transitions import feed_targets
from sparkdl.feed.transfer.messages import Target
from tests.doubles.ledger import Plan, lost_and_doubled, train
from tests.doubles.nodes import SOON_S
from tests.doubles.proxy import Proxy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 400
KEYS_NBYTES = 1200
"""Of streams that carry keys of what goes to a node on the same machine, where Spark feeds."""


def test_spark_repeats_the_tasks_and_each_row_is_there_once(
    spark_standalone: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies: list[Proxy] = []

    def targets(members: Iterable[Member]) -> tuple[Target, ...]:
        first, second = feed_targets(members)
        if not proxies:
            proxies.append(stack.enter_context(Proxy(second.uri, break_at=KEYS_NBYTES)))
        return first, replace(second, uri=proxies[0].uri)

    monkeypatch.setattr("sparkdl.driver.feeds.transitions.feed_targets", targets)
    rows = spark_standalone.range(ROWS, numPartitions=4).withColumnRenamed("id", "row")
    options: dict[str, Any] = {"framework": "plain"}
    with (
        ExitStack() as stack,
        sparkdl.launch(spark_standalone, train, Plan(every=999), 2, **options) as cluster,
    ):
        assert cluster.feed(rows).rows_fed == ROWS
        results = cluster.results(3 * SOON_S)
        assert cluster.world.generation == 0
    assert proxies[0].has_broken
    assert lost_and_doubled(results, ROWS) == (0, 0)
