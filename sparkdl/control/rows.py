"""Rows in messages: those that a checkpoint covers or a node reads from files, and counts of rows.

A row is identified by its epoch, its partition and its number in the partition. The partitions of a
DataFrame or RDD are Spark's. Parquet files have one partition, number 0: the rows of all files are
numbered consecutively in the order of their listing. The same holds for a DataFrame whose files the
nodes read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import sub
from typing import Any

import msgspec

from sparkdl.core.row_ranges import Range, count_rows, merge_ranges

PartRows = dict[int, tuple[Range, ...]]
"""Rows by partition (or by segment, between child and agent), as half-open ranges."""
EpochRows = dict[int, PartRows]
"""Rows by epoch."""


Digest = tuple[int, int]
"""How many rows a partition has had so far, and their digest, see values/digest.py."""


class CallShape(msgspec.Struct, frozen=True):
    """The known partitions and rows of one `feed` call.

    Attributes:
        partitions: how many there are; 0 while that is not known.
        rows: by partition, for those with a known number of rows.
        numbering: of the rows of a DataFrame that nodes read from its files: differs where other
            rows have the same numbers. Empty for any other data.
        digests: of the furthest rows that feeders have sent, by partition.
    """

    partitions: int = 0
    rows: dict[int, int] = {}
    numbering: str = ""
    digests: dict[int, Digest] = {}


UNKNOWN = CallShape()


class FeedCoverage(msgspec.Struct, frozen=True):
    """The rows of one feed that a checkpoint covers.

    Attributes:
        calls: all rows of the `feed` calls before this number are covered.
        rows: of the later calls: by call, by epoch of the call, by partition. Epochs before the
            first one listed are covered as a whole. Micro-batches of streams have numbers below
            zero; a later run does not know them.
        shapes: the known partitions and rows of the calls in `rows`.
    """

    calls: int = 0
    rows: dict[int, EpochRows] = {}
    shapes: dict[int, CallShape] = {}


def merge_rows(parts: Iterable[Mapping[int, Iterable[Range]]]) -> PartRows:
    """Return all rows that any of `parts` names, sorted, each once."""
    ranges: dict[int, list[Range]] = {}
    for part in parts:
        for partition, rows in part.items():
            ranges.setdefault(partition, []).extend(rows)
    return {
        partition: tuple(merged)
        for partition, rows in sorted(ranges.items())
        if (merged := merge_ranges(rows))
    }


def merge_epochs(parts: Iterable[Mapping[int, PartRows]]) -> EpochRows:
    """Return all rows of all epochs that any of `parts` names; an epoch without rows stays."""
    epochs: dict[int, list[PartRows]] = {}
    for part in parts:
        for epoch, rows in part.items():
            epochs.setdefault(epoch, []).append(rows)
    return {epoch: merge_rows(rows) for epoch, rows in sorted(epochs.items())}


def num_rows(rows: Mapping[int, Iterable[Range]]) -> int:
    return sum(map(count_rows, rows.values()))


class Storage(msgspec.Struct, frozen=True):
    """A file system: scheme and authority as in `s3://bucket`, and how to open it.

    `options` may hold credentials, so that they are not shown.
    """

    uri: str
    options: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Storage({self.uri!r}, options of {sorted(self.options)})"


class DataFile(msgspec.Struct, frozen=True, array_like=True):
    """A Parquet file.

    Attributes:
        path: within the storage.
        row_nbytes: about how many bytes a row of the wanted columns has in memory.
        nbytes: how long it was when it was listed; below zero if that does not matter. When it was
            modified does not count: hosts may have copies.
    """

    path: str
    row_nbytes: int
    nbytes: int = -1


class FileRange(msgspec.Struct, frozen=True, array_like=True):
    """Rows [`start`, `stop`) of row group `row_group` of file number `file` of a `Share`.

    Attributes:
        first: the number of row `start` among the rows of all files of the data set.
    """

    file: int
    row_group: int
    start: int
    stop: int
    first: int = 0

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def numbers(self) -> Range:
        """The numbers of these rows among those of all files."""
        return self.first, self.first + self.num_rows


class Share(msgspec.Struct, frozen=True):
    """The files and rows that one node reads, in order.

    Attributes:
        schema: of every batch, as `pyarrow.Schema.serialize` writes it.
        ranges: `file` is an index into `files`.
        stored_as: for each column of the schema its name in the files; empty if all are the same.
        refuses_nulls: the columns in which a null is an error.
    """

    storage: Storage
    schema: bytes
    files: tuple[DataFile, ...]
    ranges: tuple[FileRange, ...]
    stored_as: tuple[str, ...] = ()
    refuses_nulls: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.ranges)


class ReadCounts(msgspec.Struct, frozen=True):
    """What user code of one node has been given of a feed, in all epochs of one child.

    Attributes:
        rows: rows that several epochs read count for each.
        epochs: every epoch with a smaller number is over.
        steps: batches.
        padded: rows given beyond these, to fill a step.
        dropped: rows not given because they filled no step.
        extra_epochs: iterations that found the feed's end in place of an epoch.
        again: rows given in iterations that were left early, which `rows` does not count.
    """

    rows: int = 0
    epochs: int = 0
    steps: int = 0
    padded: int = 0
    dropped: int = 0
    extra_epochs: int = 0
    again: int = 0

    @property
    def used(self) -> int:
        """Rows that user code waits for no longer."""
        return self.rows + self.dropped

    def __sub__(self, before: ReadCounts) -> ReadCounts:
        return ReadCounts(*map(sub, msgspec.structs.astuple(self), msgspec.structs.astuple(before)))


class EpochCount(msgspec.Struct, frozen=True):
    """A node's answer to `FeedCut` and `EpochEnd`: its rows of an epoch that takes no more.

    Attributes:
        epoch: the last such one, or -1.
        is_whole: all its rows are still here, and stay, so that they can be read again.
    """

    epoch: int = -1
    rows: int = 0
    is_whole: bool = False


class FeedCount(msgspec.Struct, frozen=True):
    """Rows of one feed at one node. Epochs are numbered over the whole life of the feed.

    Attributes:
        rows_received: since the node came up.
        given: what its user code has been given.
        is_waiting: user code waits for a row, and has been given all rows that were received.
        began: the epoch of the last `FeedBegin`.
        epoch_rows: rows that are here of `epoch`.
        cut: its last answer.
        closed: the node takes no more rows, ever: its child has ended.
        closed_to: nor those of epochs up to this one: user code called `terminate`.
        problem: why the node's rows cannot come: a file cannot be read, or another agent's rows
            cannot be fetched.
    """

    feed: str
    rows_received: int = 0
    given: ReadCounts = ReadCounts()
    is_waiting: bool = False
    began: int = -1
    epoch_rows: int = 0
    cut: EpochCount = EpochCount()
    closed: bool = False
    closed_to: int = -1
    problem: str = ""

    @property
    def epoch(self) -> int:
        """The epoch that is received: the one after the last cut, unless some were skipped."""
        return max(self.cut.epoch + 1, self.began, 0)
