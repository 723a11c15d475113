"""One `feed` call: what was asked, and which of its rows no checkpoint covers. Pure.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkdl.control.rows import (
    UNKNOWN,
    CallShape,
    EpochRows,
    PartRows,
    num_rows,
)
from sparkdl.core.errors import ConfigError
from sparkdl.feed.transfer.messages import WHAT_TO_DO, other_data


@dataclass(frozen=True)
class FeedRequest:
    """What the user has asked to feed.

    Attributes:
        to: the role whose nodes are fed, `None` for those that train.
        is_micro_batch: of a stream, which brings it once.
        shape: what is known of the data before they have been read.
    """

    data: Any
    epochs: int = 1
    timeout_s: float | None = None
    to: str | None = None
    is_micro_batch: bool = False
    shape: CallShape = UNKNOWN


@dataclass(frozen=True)
class EpochLeft:
    """An epoch of a call of which there are rows to feed: all but those `done`."""

    epoch: int
    done: PartRows = field(default_factory=dict)


@dataclass
class Call:
    """One `feed` call.

    Attributes:
        number: in the order of the calls; below zero for micro-batches.
        run: names its Spark jobs, together with generation and epoch.
        whole: epochs before this one are covered as a whole.
        covered: rows of others that are covered.
        fed_in: the generation that has had all rows that are to be fed.
        has_ended_early: the nodes wanted no more.
        has_begun: some generation has been fed rows of it.
        jobs: what brought the rows of each epoch last.
        is_broken: feeding it failed; it is not tried again.
    """

    number: int
    asked: FeedRequest
    run: str
    shape: CallShape = UNKNOWN
    whole: int = 0
    covered: EpochRows = field(default_factory=dict)
    fed_in: int = -1
    has_ended_early: bool = False
    has_begun: bool = False
    jobs: dict[int, str] = field(default_factory=dict)
    is_broken: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether the data are known to have no rows."""
        return 0 < self.shape.partitions == len(self.covered_partitions({}))

    @property
    def rows_covered(self) -> int:
        """How many rows a checkpoint covers, of epochs whose number of rows is known."""
        partial = sum(num_rows(rows) for epoch, rows in self.covered.items() if epoch >= self.whole)
        return self.whole * sum(self.shape.rows.values()) + partial

    def left(self) -> list[EpochLeft]:
        """Return the epochs of which there are rows to feed."""
        return [
            EpochLeft(epoch, self.covered.get(epoch, {}))
            for epoch in range(self.whole, self.asked.epochs)
            if not self._is_whole(self.covered.get(epoch, {}))
        ]

    def rows_of(self, left: Sequence[EpochLeft]) -> int:
        """Return how many rows of these epochs there are to feed; 0 if that is not known yet."""
        if not 0 < self.shape.partitions == len(self.shape.rows):
            return 0
        rows = sum(self.shape.rows.values())
        return sum(rows - num_rows(each.done) for each in left)

    def covered_partitions(self, done: PartRows) -> frozenset[int]:
        """Return the partitions of which all rows are `done`."""
        return frozenset(
            partition
            for partition, rows in self.shape.rows.items()
            if done.get(partition, ()) == ((0, rows),) or not rows
        )

    def part_of_each(self, done: PartRows, nodes: int) -> int:
        """Return how many of the rows that are not `done` each node gets, or 0 if that is unknown.

        A part is rounded down; a node that has so many can be brought one more.
        """
        if not 0 < self.shape.partitions == len(self.shape.rows):
            return 0
        return (sum(self.shape.rows.values()) - num_rows(done)) // nodes

    def _is_whole(self, done: PartRows) -> bool:
        partitions = self.shape.partitions
        return bool(done) and 0 < partitions == len(self.covered_partitions(done))

    def take(self, rows: EpochRows) -> None:
        """Take what a checkpoint covers: all that it does."""
        if not rows:
            return
        self.whole = max(self.whole, min(rows))
        self.covered = {epoch: part for epoch, part in rows.items() if part}


def agreed(feed: str, before: CallShape, now: CallShape) -> CallShape:
    """Return what an earlier run and this one know of the data of a call.

    Raises:
        ConfigError: if they cannot be the same data.
    """
    if 0 < before.partitions != now.partitions > 0:
        raise other_data(feed, before.partitions, now.partitions)
    if any(before.rows.get(part, rows) != rows for part, rows in now.rows.items()):
        raise ConfigError(
            f"feed {feed!r}: the checkpoint was made with {sum(before.rows.values())} rows of "
            f"files, and there are {sum(now.rows.values())} now. {WHAT_TO_DO}"
        )
    return CallShape(now.partitions or before.partitions, {**before.rows, **now.rows})
