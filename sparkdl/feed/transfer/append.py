"""Where in its feed a batch belongs, and what becomes of it at a node.

Runs in: agent
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Span = tuple[int, int, int]
"""Rows of one partition: its number, and the half-open range of the rows."""


class Appended(Enum):
    """What became of a batch."""

    STORED = "stored"
    FULL = "full"
    """There was no room in time; it may be tried again, here or elsewhere."""
    CLOSED = "closed"
    """The node takes no more rows of this epoch."""


@dataclass(frozen=True)
class Attempt:
    """One of Spark's attempts at a partition of a feeding job. Later ones have higher numbers."""

    run: str
    partition: int
    number: int = 0


@dataclass(frozen=True)
class AppendRequest:
    """Where in its feed a batch belongs.

    Attributes:
        attempt: what brings the batch, whose rows are the partition's from `start_row` on; it has
            begun. A later attempt skips them.
        exchange: the inference partition that waits for results, or empty.
        keep: a later epoch is to read the rows again: rather go to disk than wait for memory.
        spans: which rows these are, in their order: partition and half-open range; by default
            those that the attempt brings.
    """

    epoch: int = 0
    attempt: Attempt | None = None
    start_row: int = 0
    exchange: str = ""
    is_last: bool = False
    keep: bool = False
    spans: tuple[Span, ...] = ()

    def spans_of(self, rows: int) -> tuple[Span, ...]:
        """Return which rows a batch of `rows` rows holds."""
        if self.spans or self.attempt is None or not rows:
            return self.spans
        return ((self.attempt.partition, self.start_row, self.start_row + rows),)


@dataclass(frozen=True)
class EpochCount:
    """What a node has of an epoch that takes no more rows."""

    epoch: int = -1
    rows: int = 0
    is_whole: bool = False
