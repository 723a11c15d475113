"""Which rows were in the batches that user code was handed. No locks, no messages.

Runs in: child

Each segment that is taken is laid on a line, behind those before it, so that a row is a place:

    │ epoch 0, segment 0 │ epoch 0, segment 1 │ epoch 1, segment 0 again │ …
    ├─ batch 0 ─┼─ batch 1 ─┼─ …

A batch is a few ranges of places, or one place for each row where rows are mixed.
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
"""Where rows lie: the place of the first, or int64 `[rows]`; `None` where nobody asks."""
Part = tuple[int, int] | Array
"""Rows that lie in one half-open range of places, or int64 `[rows]`, the place of each."""
Turn = tuple[int, ...]

MAX_BATCHES = 1 << 16
MAX_PLACES = 1 << 22
"""Batches that can be told apart: the latest, this many at most, or of so many mixed rows (32 MB).
What reads ahead of the training must stay within them."""
_MIN_BATCHES = 64
_NO_RANGES = np.empty((0, 2), np.int64)


def part_of(origin: Origin, start: int, stop: int) -> list[Part]:
    """Return rows `start` to `stop` of those that lie at `origin`."""
    if origin is None:
        return []
    if isinstance(origin, int):
        return [(origin + start, origin + stop)]
    return [origin[start:stop]]


def places_of(origin: Origin, rows: int) -> Array:
    """Return the place of each of `rows` rows, int64 `[rows]`."""
    assert origin is not None
    return np.arange(origin, origin + rows) if isinstance(origin, int) else origin


@dataclass
class _Batch:
    parts: list[Part]
    turn: Turn

    @property
    def num_places(self) -> int:
        return sum(len(part) for part in self.parts if not isinstance(part, tuple))


@dataclass
class ConsumedRows:
    """The batches of one feed, in order, since this process began.

    Batches beyond the floor are taken back when an iteration is abandoned.

    Attributes:
        feed: its name, for errors.
        is_wanted: nothing is noted otherwise.
        count: how many batches.
        ahead: how many of them the training was not given yet; `None` if nobody knows.
        turn: of the next batch: where in the order they come out, if not in that of `add`. No
            batch comes out before one whose turn is smaller.
    """

    feed: str = ""
    is_wanted: bool = False
    count: int = 0
    ahead: int | None = 0
    turn: Turn = ()
    _floor: int = 0
    _kept: deque[_Batch] = field(default_factory=deque)
    """The latest batches; those before them are folded into ranges of the line."""
    _kept_places: int = 0
    _below_floor: Array = field(default_factory=lambda: _NO_RANGES)
    _since_floor: Array = field(default_factory=lambda: _NO_RANGES)
    _starts: list[int] = field(default_factory=list)
    _segments: list[tuple[int, int, int]] = field(default_factory=list)
    """What begins at each of `_starts`: epoch, segment, rows."""

    def lay(self, epoch: int, segment: int, rows: int) -> int | None:
        """Lay a segment on the line; return the place of its first row."""
        if not self.is_wanted:
            return None
        start = self._starts[-1] + self._segments[-1][2] if self._starts else 0
        self._starts.append(start)
        self._segments.append((epoch, segment, rows))
        return start

    def add(self, parts: list[Part]) -> None:
        """A batch is handed out."""
        if not self.is_wanted:
            return
        turn, self.turn = self.turn, ()
        batch = _Batch(parts, turn)
        at = len(self._kept)
        while turn and at and self._kept[at - 1].turn > turn:
            at -= 1
        self._kept.insert(at, batch)
        self.count += 1
        self._kept_places += batch.num_places
        if len(self._kept) > 2 * MAX_BATCHES or self._kept_places > 2 * MAX_PLACES:
            self._fold(MAX_BATCHES, MAX_PLACES)

    def drop(self, parts: list[Part]) -> None:
        """Count rows that are not used on purpose with the batch before them."""
        if self._kept:
            last = self._kept[-1]
            self._kept_places -= last.num_places
            last.parts = [*last.parts, *parts]
            self._kept_places += last.num_places
        else:
            self._below_floor = _merged([self._below_floor, _ranges(parts)])

    def raise_floor(self) -> None:
        """Take none of the batches back that are here."""
        self._floor = self.count
        if len(self._since_floor):
            self._below_floor = _merged([self._below_floor, self._since_floor])
            self._since_floor = _NO_RANGES

    def rewind(self) -> None:
        """Take the batches since the floor back."""
        self.turn = ()
        if self.ahead is not None:
            self.ahead = 0
        while self.count > self._floor and self._kept:
            self._kept_places -= self._kept.pop().num_places
            self.count -= 1
        self.count = self._floor
        self._since_floor = _NO_RANGES

    def position(self, batches: int | None) -> EpochRows:
        """Return the rows of the first `batches` batches, by epoch and segment.

        Raises:
            ConfigError: see `FeedReader.position`.
        """
        if not self.is_wanted:
            raise ConfigError(
                f"nobody notes which rows of feed {self.feed!r} are used; launch with "
                "checkpoint_dir"
            )
        if batches is None:
            if self.ahead is None and self.count:
                raise ConfigError(
                    f"feed {self.feed!r} is read ahead of the training (by tf.data, or by workers "
                    "of a DataLoader), so that only you know how much of it the model has used. "
                    "Pass batches=: how many batches of the feed since map_fun began"
                )
            batches = self.count - (self.ahead or 0)
        folded = self.count - len(self._kept)
        if not folded <= batches <= self.count:
            why = (
                "what reads ahead of the training is too far ahead of it"
                if 0 <= batches < folded
                else "count the batches that the model has used since map_fun began"
            )
            raise ConfigError(
                f"batches={batches}: {self.count} batches of feed {self.feed!r} have been handed "
                f"out, and what the first {folded} to {self.count} held is known; {why}"
            )
        parts = [part for i in range(batches - folded) for part in self._kept[i].parts]
        found = _merged([self._below_floor, self._since_floor, _ranges(parts)])
        return self._by_segment(found)

    def forget(self, epoch: int) -> None:
        """Rows of epochs before `epoch` need not be told any more."""
        gone = 0
        while gone < len(self._segments) - 1 and self._segments[gone][0] < epoch:
            gone += 1
        del self._starts[:gone], self._segments[:gone]
        if gone:
            self._below_floor = _from(self._below_floor, self._starts[0])
            self._since_floor = _from(self._since_floor, self._starts[0])

    def _fold(self, batches: int, places: int) -> None:
        """Keep so many batches, of so many places, and no more."""
        number = self.count - len(self._kept)
        below: list[Part] = []
        since: list[Part] = []
        while len(self._kept) > batches or (
            self._kept_places > places and len(self._kept) > _MIN_BATCHES
        ):
            batch = self._kept.popleft()
            self._kept_places -= batch.num_places
            (below if number < self._floor else since).extend(batch.parts)
            number += 1
        self._below_floor = _merged([self._below_floor, _ranges(below)])
        self._since_floor = _merged([self._since_floor, _ranges(since)])

    def _by_segment(self, ranges: Array) -> EpochRows:
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
    """Return the ranges that hold the places, merged, int64 `[ranges, 2]`."""
    pairs: list[tuple[int, int]] = []
    places: list[Array] = []
    for part in parts:
        if not isinstance(part, tuple):
            places.append(part)
        elif pairs and pairs[-1][1] == part[0]:
            pairs[-1] = pairs[-1][0], part[1]
        else:
            pairs.append(part)
    found = np.array(pairs, np.int64).reshape(-1, 2)
    if places:
        each = np.sort(np.concatenate(places))
        breaks = np.flatnonzero(np.diff(each) > 1)
        starts = each[np.concatenate([[0], breaks + 1])] if len(each) else each
        stops = each[np.concatenate([breaks, [-1]])] + 1 if len(each) else each
        found = _merged([found, np.stack([starts, stops], axis=1)])
    return found


def _merged(arrays: Sequence[Array]) -> Array:
    """Return the ranges of several arrays, sorted, with those that touch or overlap made one."""
    ranges = np.concatenate(arrays)
    if len(ranges) < 2:
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ranges[:, 1])
    breaks = np.flatnonzero(ranges[1:, 0] > reach[:-1])
    starts = ranges[np.concatenate([[0], breaks + 1]), 0]
    stops = reach[np.concatenate([breaks, [len(reach) - 1]])]
    return np.stack([starts, stops], axis=1)


def _from(ranges: Array, place: int) -> Array:
    """Return what of `ranges` lies at `place` or behind it."""
    behind: Array = ranges[ranges[:, 1] > place]
    behind[:, 0] = np.maximum(behind[:, 0], place)
    return behind
