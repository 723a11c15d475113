"""The Spark tasks that feed: what `mapInArrow` and `mapPartitions` are given.

Runs in: feeder
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sparkdl.feed.transfer.feeder import Feeder
from sparkdl.feed.transfer.request import FedPartition, FeedSpec
from sparkdl.feed.values.row_codec import RowEncoder

FED_SCHEMA = "partition long, rows string, refused long, num_rows long"
"""Spark schema of what `FeedDataFrame` returns: one row a partition, `rows` as JSON."""


@dataclass(frozen=True)
class FeedDataFrame:
    """For `DataFrame.mapInArrow`: feeds each partition and returns one row on it."""

    order: FeedSpec

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Feed one partition."""
        fed = _feed(self.order, batches)
        yield pa.RecordBatch.from_pydict(
            {
                "partition": [fed.partition],
                "rows": [json.dumps(fed.rows)],
                "refused": [fed.rows_refused],
                "num_rows": [fed.num_rows],
            }
        )


@dataclass(frozen=True)
class FeedRdd:
    """For `RDD.mapPartitions`: feeds each partition and returns one `FedPartition`."""

    order: FeedSpec

    def __call__(self, values: Iterable[Any]) -> Iterator[FedPartition]:
        """Feed one partition."""
        yield _feed(self.order, RowEncoder().batches(values))


def fed_partition(partition: int, rows_json: str, refused: int, num_rows: int) -> FedPartition:
    """Return the `FedPartition` that a row of `FeedDataFrame` stands for."""
    rows = {int(node_id): count for node_id, count in json.loads(rows_json).items()}
    return FedPartition(partition, rows, refused, num_rows)


def _feed(order: FeedSpec, batches: Iterator[pa.RecordBatch]) -> FedPartition:
    return Feeder(order, _partition(), _attempt()).feed(batches)


def _partition() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def _attempt() -> int:
    """Return a number that grows with every task that Spark starts."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.taskAttemptId() if context is not None else 0
