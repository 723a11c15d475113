"""Which rows of a feed a checkpoint covers.

Runs in: anywhere. Pure.

A row is known by its epoch, its partition and its number in the partition: of a DataFrame or RDD
the partitions are Spark's; of Parquet files there is one, number 0, in which the rows of all files
are numbered through in the order of their listing.
"""

from __future__ import annotations

import msgspec

from sparkdl.feed.plan import Range

PartRows = dict[int, tuple[Range, ...]]
"""Rows by partition (or by segment, between child and agent), as half-open ranges."""
EpochRows = dict[int, PartRows]
"""Rows by epoch."""


class FeedCoverage(msgspec.Struct, frozen=True):
    """The rows of one feed that a checkpoint covers.

    Attributes:
        calls: the `feed` calls of which all rows are covered: those before number `calls`.
        rows: of the calls from there on: by call, by epoch of the call, by partition. An epoch
            before the first that is named is covered as a whole.
    """

    calls: int = 0
    rows: dict[int, EpochRows] = {}
