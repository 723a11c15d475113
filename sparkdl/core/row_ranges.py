"""Half-open ranges of row numbers: merged, cut, and the gaps between them.

Runs in: anywhere. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Range = tuple[int, int]
"""Rows [start, stop)."""
Span = tuple[int, int, int]
"""Rows of one partition: its number, and the half-open range of the rows."""
Slice = tuple[int, int, int]
"""Of each batch of rows: how many rows it has, the number of the slice, and how many there are."""


@dataclass(frozen=True)
class Sliced:
    """The rows of spans in one of `count` slices of each batch of `rows` rows, made when iterated.

    In each partition batches begin at multiples of `rows`.

    Attributes:
        index: of the slice; by default the rows are those of all slices, the first slice's first.
    """

    spans: tuple[Span, ...]
    rows: int
    count: int
    index: int | None = None

    def __iter__(self) -> Iterator[Span]:
        return (span for _, span in self.placed())

    def placed(self) -> Iterator[tuple[int, Span]]:
        """Yield them, each with its offset in the spans, laid end to end."""
        for index in range(self.count) if self.index is None else [self.index]:
            begin = _slice_start(self.rows, index, self.count)
            size, offset = slice_rows(self.rows, index, self.count), 0
            for partition, start, stop in self.spans:
                for first in range(start - start % self.rows + begin, stop, self.rows):
                    low, high = max(start, first), min(stop, first + size)
                    if low < high:
                        yield offset + low - start, (partition, low, high)
                offset += stop - start

    @property
    def starts(self) -> list[tuple[int, ...]]:
        """Return for each of the spans where its rows are among those of all slices, by slice.

        A row of the slice is so many rows behind this place as `rows_before` says.
        """
        places: list[list[int]] = [[] for _ in self.spans]
        at = 0
        for index in range(self.count):
            for place, (_, start, stop) in zip(places, self.spans, strict=True):
                before = rows_before(start, self.rows, index, self.count)
                place.append(at - before)
                at += rows_before(stop, self.rows, index, self.count) - before
        return [tuple(place) for place in places]


Spans = tuple[Span, ...] | Sliced


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Return half-open `ranges` sorted, touching and overlapping ones merged.

    Empty ranges (stop not past start) are left out.
    """
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def add_range(ranges: list[Range], start: int, stop: int) -> list[Range]:
    """Add [`start`, `stop`) to sorted ranges that do not touch; return the parts they lacked."""
    # Ranges that only touch [start, stop) are found as well, so that the result has no seams.
    low = bisect_left(ranges, start, key=lambda each: each[1])
    high = bisect_right(ranges, stop, low, key=lambda each: each[0])
    touched = ranges[low:high]
    missing = uncovered(start, stop, touched)
    if touched:
        start, stop = min(start, touched[0][0]), max(stop, touched[-1][1])
    ranges[low:high] = [(start, stop)]
    return missing


def remove_range(ranges: list[Range], start: int, stop: int) -> list[Range]:
    """Remove [`start`, `stop`) from sorted ranges that do not touch; return the parts they had."""
    low = bisect_right(ranges, start, key=lambda each: each[1])
    high = bisect_left(ranges, stop, low, key=lambda each: each[0])
    touched = ranges[low:high]
    ranges[low:high] = [part for each in touched for part in uncovered(*each, [(start, stop)])]
    return overlap(start, stop, touched)


def covers(ranges: Sequence[Range], start: int, stop: int) -> bool:
    """Return whether [`start`, `stop`) is within one of the sorted ranges, which do not touch."""
    at = bisect_right(ranges, start, key=lambda each: each[0]) - 1
    return at >= 0 and stop <= ranges[at][1]


def count_rows(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def take_rows(ranges: deque[Range], rows: int) -> list[Range]:
    """Remove and return the first `rows` rows, in their order; all if there are fewer.

    Ranges that touch are returned as one.
    """
    taken: list[Range] = []
    while rows > 0 and ranges:
        start, stop = ranges.popleft()
        if stop - start > rows:
            ranges.appendleft((start + rows, stop))
            stop = start + rows
        rows -= stop - start
        if taken and taken[-1][1] == start:
            start = taken.pop()[0]
        taken.append((start, stop))
    return taken


def overlap(start: int, stop: int, ranges: Iterable[Range]) -> list[Range]:
    """Return the parts of [`start`, `stop`) within `ranges`, which must be sorted."""
    return [
        (low, high)
        for first, last in ranges
        if (low := max(start, first)) < (high := min(stop, last))
    ]


def uncovered(start: int, stop: int, ranges: Sequence[Range]) -> list[Range]:
    """Return the parts of [`start`, `stop`) that no range covers, in order."""
    missing: list[Range] = []
    for covered_start, covered_stop in merge_ranges(ranges):
        if start < min(covered_start, stop):
            missing.append((start, min(covered_start, stop)))
        start = max(start, covered_stop)
    if start < stop:
        missing.append((start, stop))
    return missing


def spans_within(spans: Iterable[Span], ranges: Sequence[Range]) -> list[Span]:
    """Return the parts of `spans`, laid end to end, within `ranges`, which must be sorted."""
    found: list[Span] = []
    offset = 0
    for partition, first, last in spans:
        end = offset + last - first
        for start, stop in overlap(offset, end, ranges):
            found.append((partition, first + start - offset, first + stop - offset))
        offset = end
    return found


def rows_before(row: int, rows: int, index: int, count: int) -> int:
    """Return how many rows of a slice, as in `Sliced`, its partition has before `row`."""
    size = slice_rows(rows, index, count)
    return row // rows * size + min(max(row % rows - _slice_start(rows, index, count), 0), size)


def _slice_start(rows: int, index: int, count: int) -> int:
    return rows // count * index + min(index, rows % count)


def slice_rows(rows: int, index: int, count: int) -> int:
    """Return the size of one of `count` slices of `rows` rows, which differ by one at most."""
    return rows // count + (index < rows % count)
