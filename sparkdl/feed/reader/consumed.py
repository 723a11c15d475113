"""The rows of each batch given to user code. No locks, no messages.

The rows of all segments that are taken are numbered through: each row has a position.

    │ epoch 0, segment 0 │ epoch 0, segment 1 │ epoch 1, segment 0 again │ …
    ├─ batch 0 ─┼─ batch 1 ─┼─ …

A batch is a few ranges of positions, or one position for each row where rows are shuffled. These
are numpy arrays, unlike the ranges in `core/row_ranges.py`: shuffled rows are millions of ranges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from sparkdl.control.rows import EpochRows
from sparkdl.core.errors import ConfigError

Array = np.ndarray[Any, Any]
Origin = int | Array | None
"""Positions of rows: of the first, or int64 `[rows]`; `None` where rows are not tracked."""
Part = tuple[int, int] | Array
"""Rows in one half-open range of positions, or int64 `[rows]`, the position of each."""

MAX_BATCHES = 1 << 16
MAX_POSITIONS = 1 << 22
"""The latest batches are known one by one: at most this many, or of so many shuffled rows (32 MB).
Code that reads ahead of the training must stay within them."""
_MIN_BATCHES = 64
_NO_RANGES = np.empty((0, 2), np.int64)


def part_of(origin: Origin, start: int, stop: int) -> list[Part]:
    if origin is None:
        return []
    if isinstance(origin, int):
        return [(origin + start, origin + stop)]
    return [origin[start:stop]]


def positions_of(origin: Origin, rows: int) -> Array:
    assert origin is not None
    return np.arange(origin, origin + rows) if isinstance(origin, int) else origin


def _num_positions(batch: list[Part]) -> int:
    return sum(len(part) for part in batch if not isinstance(part, tuple))


@dataclass
class ConsumedRows:
    """The batches of one feed, in order, since this process began.

    Batches after the committed ones are forgotten when an iteration is abandoned.

    Attributes:
        is_wanted: whether rows are tracked; otherwise nothing is noted.
        ended: how many batches are committed.
        ahead: how many of them the training has not been given yet; `None` if unknown, until the
            training has reached the end of a pass.
    """

    feed: str = ""
    is_wanted: bool = False
    count: int = 0
    ahead: int | None = 0
    ended: int = 0
    _latest: deque[list[Part]] = field(default_factory=deque)
    """The latest batches; those before them are folded into ranges of positions."""
    _held_positions: int = 0
    _committed_rows: Array = field(default_factory=lambda: _NO_RANGES)
    _rows_since: Array = field(default_factory=lambda: _NO_RANGES)
    _starts: list[int] = field(default_factory=list)
    _segments: list[tuple[int, int, int]] = field(default_factory=list)
    """The segment that begins at each of `_starts`: epoch, segment, rows."""

    def append_segment(self, epoch: int, segment: int, rows: int) -> int | None:
        if not self.is_wanted:
            return None
        start = self._starts[-1] + self._segments[-1][2] if self._starts else 0
        self._starts.append(start)
        self._segments.append((epoch, segment, rows))
        return start

    def add(self, parts: list[Part]) -> None:
        if not self.is_wanted:
            return
        self._latest.append(parts)
        self.count += 1
        self._held_positions += _num_positions(parts)
        # At twice the limits, so that a fold, which merges all ranges, is rare.
        if len(self._latest) > 2 * MAX_BATCHES or self._held_positions > 2 * MAX_POSITIONS:
            self._fold(MAX_BATCHES, MAX_POSITIONS)

    def drop(self, parts: list[Part]) -> None:
        """Count rows that are left out on purpose with the batch before them."""
        if self._latest:
            self._latest[-1] = [*self._latest[-1], *parts]
            self._held_positions += _num_positions(parts)
        else:
            self._committed_rows = _merged([self._committed_rows, _ranges(parts)])

    def commit(self) -> None:
        """Make the batches that are here final: `rewind` keeps them."""
        self.ended = self.count
        if len(self._rows_since):
            self._committed_rows = _merged([self._committed_rows, self._rows_since])
            self._rows_since = _NO_RANGES

    def rewind(self) -> None:
        if self.ahead is not None:
            self.ahead = 0
        while self.count > self.ended and self._latest:
            self._held_positions -= _num_positions(self._latest.pop())
            self.count -= 1
        self.count = self.ended
        self._rows_since = _NO_RANGES

    def reach_end(self) -> None:
        """Note that the training was given the last batch of an epoch: nothing is read ahead."""
        if self.count == self.ended:
            self.ahead = 0

    def used(self) -> int:
        if self.ahead is None and self.count:
            raise ConfigError(
                f"feed {self.feed!r} is read ahead of the training (by tf.data, or by workers of a "
                "DataLoader), so the used rows are unknown. Pass batches= to ctx.checkpoint: the "
                "number of batches that the model has used since map_fun began"
            )
        return self.count - (self.ahead or 0)

    def position(self, batches: int | None) -> EpochRows:
        """Return the rows of the first `batches` batches, by epoch and segment."""
        if not self.is_wanted:
            raise ConfigError(
                f"the used rows of feed {self.feed!r} are not tracked; launch with checkpoint_dir"
            )
        if batches is None:
            batches = self.used()
        # Folded batches are one set of rows, in which no single batch can be told any more.
        folded = self.count - len(self._latest)
        if not folded <= batches <= self.count:
            why = (
                "reduce how far workers or tf.data read ahead of the training"
                if 0 <= batches < folded
                else "count the batches that the model has used since map_fun began"
            )
            raise ConfigError(
                f"batches={batches}: must be {folded} to {self.count}, the batches of feed "
                f"{self.feed!r} whose rows are known; {why}"
            )
        parts = [part for i in range(batches - folded) for part in self._latest[i]]
        found = _merged([self._committed_rows, self._rows_since, _ranges(parts)])
        return self._by_segment(found)

    def forget(self, epoch: int) -> None:
        gone = 0
        # The last segment stays, because the next one is numbered from its end.
        while gone < len(self._segments) - 1 and self._segments[gone][0] < epoch:
            gone += 1
        del self._starts[:gone], self._segments[:gone]
        if gone:
            self._committed_rows = _from(self._committed_rows, self._starts[0])
            self._rows_since = _from(self._rows_since, self._starts[0])

    def _fold(self, batches: int, positions: int) -> None:
        """Keep at most so many batches, of so many positions, one by one."""
        number = self.count - len(self._latest)
        below: list[Part] = []
        since: list[Part] = []
        while len(self._latest) > batches or (
            self._held_positions > positions and len(self._latest) > _MIN_BATCHES
        ):
            batch = self._latest.popleft()
            self._held_positions -= _num_positions(batch)
            # Batches that are not committed may be given back, so they are folded apart.
            (below if number < self.ended else since).extend(batch)
            number += 1
        self._committed_rows = _merged([self._committed_rows, _ranges(below)])
        self._rows_since = _merged([self._rows_since, _ranges(since)])

    def _by_segment(self, ranges: Array) -> EpochRows:
        # Arrays throughout: the ranges of shuffled rows are too many for a loop in Python.
        starts = np.array(self._starts, np.int64)
        ranges = _from(ranges, self._starts[0] if self._starts else 0)
        ranges = ranges[ranges[:, 0] < ranges[:, 1]]
        # A range that crosses the borders of segments is cut there.
        first = np.searchsorted(starts, ranges[:, 0], "right") - 1
        pieces = np.searchsorted(starts, ranges[:, 1], "left") - first
        whole = np.repeat(np.arange(len(ranges)), pieces)
        before = np.repeat(np.cumsum(pieces) - pieces, pieces)
        at = first[whole] + np.arange(len(whole)) - before
        stops = np.append(starts[1:], np.iinfo(np.int64).max)
        low = np.maximum(ranges[whole, 0], starts[at]) - starts[at]
        high = np.minimum(ranges[whole, 1], stops[at]) - starts[at]
        found: EpochRows = {}
        borders = np.flatnonzero(np.diff(at, prepend=-1)).tolist()
        for start, stop in pairwise([*borders, len(at)]):
            epoch, segment, _ = self._segments[at[start]]
            here = zip(low[start:stop].tolist(), high[start:stop].tolist(), strict=True)
            found.setdefault(epoch, {})[segment] = tuple(here)
        return found


def _ranges(parts: Iterable[Part]) -> Array:
    """Return the ranges that hold the positions, merged, int64 `[ranges, 2]`."""
    pairs: list[tuple[int, int]] = []
    positions: list[Array] = []
    for part in parts:
        if not isinstance(part, tuple):
            positions.append(part)
        elif pairs and pairs[-1][1] == part[0]:
            pairs[-1] = pairs[-1][0], part[1]
        else:
            pairs.append(part)
    found = np.array(pairs, np.int64).reshape(-1, 2)
    if positions:
        each = np.sort(np.concatenate(positions))
        breaks = np.flatnonzero(np.diff(each) > 1)
        starts = each[np.concatenate([[0], breaks + 1])] if len(each) else each
        stops = each[np.concatenate([breaks, [-1]])] + 1 if len(each) else each
        found = _merged([found, np.stack([starts, stops], axis=1)])
    return found


def _merged(arrays: Sequence[Array]) -> Array:
    ranges = np.concatenate(arrays)
    if len(ranges) < 2:
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    # A range may end before an earlier one does, so only the furthest end so far shows a gap.
    reach = np.maximum.accumulate(ranges[:, 1])
    breaks = np.flatnonzero(ranges[1:, 0] > reach[:-1])
    starts = ranges[np.concatenate([[0], breaks + 1]), 0]
    stops = reach[np.concatenate([breaks, [len(reach) - 1]])]
    return np.stack([starts, stops], axis=1)


def _from(ranges: Array, position: int) -> Array:
    behind: Array = ranges[ranges[:, 1] > position]
    behind[:, 0] = np.maximum(behind[:, 0], position)
    return behind
