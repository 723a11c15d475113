"""Rows on their way from segments to batches: gathered, mixed, cut.

Runs in: child
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from sparkdl.feed.reader.consumed import Origin, Part, part_of, places_of
from sparkdl.feed.values.columns import concat, slice_columns

Columns = dict[str, np.ndarray[Any, Any]]
"""Arrays by column name, all with the same first dimension: `[rows, …]`."""

MIX_NBYTES = 32 * 1024 * 1024
"""Rows are mixed within so many bytes where no number of rows is given."""


class GatheredRows:
    """Columns of segments that were taken and not yet handed out.

    Attributes:
        count: rows that can be cut off; those that still wait to be mixed do not count.
    """

    def __init__(self) -> None:
        self.count = 0
        self._parts: deque[tuple[Columns, int, int, Origin]] = deque()
        self._random: np.random.Generator | None = None
        self._window: int | bool = False
        self._unmixed: list[Columns] = []
        self._unmixed_origins: list[tuple[Origin, int]] = []
        self._unmixed_rows = self._unmixed_nbytes = 0

    def shuffle(self, random: np.random.Generator, window: int | bool) -> None:
        """Mix what is added from now on, within `window` rows, or `MIX_NBYTES` if it is `True`."""
        self._random, self._window = random, window

    def add(self, columns: Columns, rows: int, origin: Origin = None) -> None:
        """Take the columns of `rows` rows, all of them with an origin, or none."""
        if not rows:
            return
        if self._random is None:
            self._parts.append((columns, 0, rows, origin))
            self.count += rows
            return
        self._unmixed.append(columns)
        self._unmixed_origins.append((origin, rows))
        self._unmixed_rows += rows
        self._unmixed_nbytes += sum(array.nbytes for array in columns.values())
        is_enough = (
            self._unmixed_nbytes >= MIX_NBYTES
            if self._window is True
            else self._unmixed_rows >= self._window
        )
        if is_enough:
            self.flush()

    def flush(self) -> None:
        """Mix what waits for more."""
        if not self._unmixed:
            return
        assert self._random is not None
        order = self._random.permutation(self._unmixed_rows)
        columns = {name: array[order] for name, array in concat(self._unmixed).items()}
        origin: Origin = None
        if self._unmixed_origins[0][0] is not None:
            places = [places_of(origin, rows) for origin, rows in self._unmixed_origins]
            origin = np.concatenate(places)[order]
        self._parts.append((columns, 0, self._unmixed_rows, origin))
        self.count += self._unmixed_rows
        self._unmixed, self._unmixed_rows, self._unmixed_nbytes = [], 0, 0
        self._unmixed_origins = []

    def cut(self, rows: int) -> tuple[Columns, list[Part]]:
        """Remove and return the first `rows` rows, and where they come from.

        The columns are views where they lie in one segment.
        """
        pieces, origins = [], []
        self.count -= rows
        while rows:
            columns, start, stop, origin = self._parts.popleft()
            if stop - start > rows:
                self._parts.appendleft((columns, start + rows, stop, origin))
                stop = start + rows
            rows -= stop - start
            pieces.append(slice_columns(columns, start, stop))
            origins += part_of(origin, start, stop)
        return (pieces[0] if len(pieces) == 1 else concat(pieces)), origins

    def rest(self) -> list[tuple[Columns, int, Origin]]:
        """Remove and return all rows in parts: columns, how many rows, and their origin."""
        parts = [
            (slice_columns(columns, start, stop), stop - start, _from(origin, start, stop))
            for columns, start, stop, origin in self._parts
        ]
        self._parts.clear()
        self.count = 0
        return parts


def _from(origin: Origin, start: int, stop: int) -> Origin:
    if origin is None:
        return None
    return origin + start if isinstance(origin, int) else origin[start:stop]
