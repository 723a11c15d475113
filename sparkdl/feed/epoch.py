"""One epoch of a feed as batches of columns.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sparkdl.control.channel import EpochMark
from sparkdl.core.errors import ConfigError
from sparkdl.feed.columns import concat, slice_columns, to_columns
from sparkdl.feed.plan import epoch_steps
from sparkdl.feed.reader import FeedReader, Item

Columns = dict[str, np.ndarray]
"""Arrays by column name, all with the same first dimension: `[rows, …]`."""


@dataclass(frozen=True)
class EpochBatches:
    """Each `iter` is one epoch: the next of the feed, or the same again if it was abandoned.

    Attributes:
        batch_size: rows of one batch; the last may have fewer.
        columns: which columns, `None` for all.
        is_even: take as many steps as the node with the most rows. A node that has no rows left
            then gets one of its last rows again, so that a synchronous step finds everybody.
    """

    reader: FeedReader
    batch_size: int
    columns: tuple[str, ...] | None = None
    is_even: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size} must be at least 1")

    def __iter__(self) -> Iterator[Columns]:
        owner = self.reader.claim()
        gathered = _Gathered()
        mark: EpochMark | None = None
        steps, last = 0, None
        while True:
            is_over = False
            while gathered.rows < self.batch_size and not is_over:
                item = self.reader.take(owner)
                if item is None:
                    return
                if isinstance(item, Item):
                    gathered.add(to_columns(item.batch(), self.columns), item.segment.rows)
                else:
                    is_over = True
                    mark = item if isinstance(item, EpochMark) else None
            if not gathered.rows:
                break
            rows = min(self.batch_size, gathered.rows)
            last = gathered.cut(rows)
            if not self.reader.give(owner, rows):
                return
            steps += 1
            yield last
        if mark is not None:
            yield from self._padding(mark, steps, last)
            self.reader.finish_epoch(owner)

    def _padding(self, mark: EpochMark, steps: int, last: Columns | None) -> Iterator[Columns]:
        wanted = epoch_steps(list(mark.rows.values()), self.batch_size) if self.is_even else steps
        if wanted > steps and last is None:
            raise ConfigError(
                f"epoch {mark.epoch} of feed {mark.feed!r} has {sum(mark.rows.values())} rows for "
                f"{len(mark.rows)} nodes; a synchronous step needs a row on each. Feed more rows "
                "or use fewer nodes"
            )
        for _ in range(wanted - steps):
            assert last is not None
            yield slice_columns(last, 0, 1)


class _Gathered:
    """Columns of segments that were taken and not yet handed out."""

    def __init__(self) -> None:
        self.rows = 0
        self._parts: list[tuple[Columns, int]] = []

    def add(self, columns: Columns, rows: int) -> None:
        self._parts.append((columns, rows))
        self.rows += rows

    def cut(self, rows: int) -> Columns:
        """Remove and return the first `rows` rows; views where they lie in one segment."""
        wanted, pieces = rows, []
        while wanted:
            columns, there = self._parts.pop(0)
            if there > wanted:
                self._parts.insert(0, (slice_columns(columns, wanted, there), there - wanted))
                columns, there = slice_columns(columns, 0, wanted), wanted
            pieces.append(columns)
            wanted -= there
        self.rows -= rows
        return pieces[0] if len(pieces) == 1 else concat(pieces)


def select(columns: Columns, names: str | Sequence[str]) -> np.ndarray | Columns:
    """Return one column's array for a name, or a dict of columns for several names."""
    return columns[names] if isinstance(names, str) else {name: columns[name] for name in names}
