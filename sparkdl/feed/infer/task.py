"""The Spark tasks that infer: what `mapInArrow` and `mapPartitions` are given.

Runs in: feeder
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa

from sparkdl.feed.infer.client import exchange
from sparkdl.feed.infer.columns import result_columns
from sparkdl.feed.transfer.request import FeedSpec
from sparkdl.feed.values.row_codec import RowEncoder, rows

RESULT_SCHEMA = "ipc binary"
"""Spark schema of what `InferRows` returns: Arrow IPC streams of encoded result rows."""


@dataclass(frozen=True)
class InferRows:
    """For `DataFrame.mapInArrow`: the results alone, encoded, in order.

    `names` are what `map_fun` shall see the columns called.
    """

    order: FeedSpec
    names: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Answer one partition."""
        for data in _infer(self.order, (batch.rename_columns(self.names) for batch in batches)):
            yield pa.RecordBatch.from_pydict({"ipc": pa.array([data], pa.binary())})


@dataclass(frozen=True)
class InferColumns:
    """For `DataFrame.mapInArrow`: each batch with columns of results appended.

    Attributes:
        names: what `map_fun` shall see the columns called.
        kept: places of the columns that are returned, as they came.
        results: names and types of the columns that are appended.
    """

    order: FeedSpec
    names: tuple[str, ...]
    kept: tuple[int, ...]
    results: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Answer one partition."""
        sent: deque[pa.RecordBatch] = deque()
        ready = _Ready(self.results)
        for data in _infer(self.order, self._named(batches, sent)):
            for batch in _batches(data):
                ready.add(result_columns(batch, self.results), batch.num_rows)
            while sent and ready.rows >= sent[0].num_rows:
                yield self._joined(sent.popleft(), ready)

    def _named(
        self, batches: Iterator[pa.RecordBatch], sent: deque[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                sent.append(batch.select(list(self.kept)) if self.kept else batch)
                yield batch.rename_columns(self.names)

    def _joined(self, batch: pa.RecordBatch, ready: _Ready) -> pa.RecordBatch:
        kept = list(batch.columns) if self.kept else []
        fields = list(batch.schema) if self.kept else []
        columns = [*kept, *ready.take(batch.num_rows)]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*fields, *self.results]))


@dataclass(frozen=True)
class InferRdd:
    """For `RDD.mapPartitions`: one result per row, in order."""

    order: FeedSpec

    def __call__(self, values: Iterable[Any]) -> Iterator[Any]:
        """Answer one partition."""
        for data in _infer(self.order, RowEncoder().batches(values)):
            yield from decode_results(data)


def decode_results(data: bytes) -> list[Any]:
    """Return the result rows in an Arrow IPC stream."""
    return [row for batch in _batches(data) for row in rows(batch)]


class _Ready:
    """Columns of results whose rows have not been returned yet."""

    def __init__(self, schema: pa.Schema) -> None:
        self.rows = 0
        self._pieces: list[list[pa.Array]] = [[] for _ in schema]

    def add(self, columns: list[pa.Array], num_rows: int) -> None:
        for pieces, column in zip(self._pieces, columns, strict=True):
            pieces.append(column)
        self.rows += num_rows

    def take(self, num_rows: int) -> list[pa.Array]:
        taken = []
        for place, pieces in enumerate(self._pieces):
            whole = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
            taken.append(whole.slice(0, num_rows))
            self._pieces[place] = [whole.slice(num_rows)] if len(whole) > num_rows else []
        self.rows -= num_rows
        return taken


def _batches(data: bytes) -> list[pa.RecordBatch]:
    with pa.ipc.open_stream(data) as reader:
        return list(reader)


def _infer(order: FeedSpec, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    """Yield encoded results; a task that Spark repeats asks another node first."""
    partition, attempt = _partition_and_attempt()
    target = order.targets[(partition + attempt) % len(order.targets)]
    for _schema, group in groupby(batches, key=lambda batch: batch.schema):
        name = f"{partition}.{uuid.uuid4().hex[:12]}"
        yield from exchange(order, name, target, group)


def _partition_and_attempt() -> tuple[int, int]:
    from pyspark import TaskContext

    context = TaskContext.get()
    return (context.partitionId(), context.attemptNumber()) if context is not None else (0, 0)
