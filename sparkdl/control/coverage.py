"""Which rows of a feed a checkpoint covers.

Runs in: anywhere. Pure.

A row is known by its epoch, its partition and its number in the partition: of a DataFrame or RDD
the partitions are Spark's; of Parquet files there is one, number 0, in which the rows of all files
are numbered through in the order of their listing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from sparkdl.core.row_ranges import Range, merge_ranges

PartRows = dict[int, tuple[Range, ...]]
"""Rows by partition (or by segment, between child and agent), as half-open ranges."""
EpochRows = dict[int, PartRows]
"""Rows by epoch."""


class CallShape(msgspec.Struct, frozen=True):
    """What is known of the data of one `feed` call.

    Attributes:
        partitions: how many there are; 0 while that is not known.
        rows: by partition, of those of which it is known.
    """

    partitions: int = 0
    rows: dict[int, int] = {}


UNKNOWN = CallShape()


class FeedCoverage(msgspec.Struct, frozen=True):
    """The rows of one feed that a checkpoint covers.

    Attributes:
        calls: the `feed` calls of which all rows are covered: those before number `calls`.
        rows: of the calls from there on: by call, by epoch of the call, by partition. An epoch
            before the first that is named is covered as a whole. Micro-batches of streams have
            numbers below zero; a later run does not know them.
        shapes: what is known of the data of calls in `rows`.
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
    """Return how many rows the ranges name, which do not overlap."""
    return sum(stop - start for ranges in rows.values() for start, stop in ranges)
