"""Half-open ranges of row numbers: merged, cut, and the gaps between them.

Runs in: anywhere. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Range = tuple[int, int]
"""Rows [start, stop)."""
Span = tuple[int, int, int]
"""Rows of one partition: its number, and the half-open range of the rows."""


class Slice(NamedTuple):
    """Part `number` of `of` even ones of each batch of rows, which begin at multiples of `rows`."""

    rows: int
    number: int
    of: int

    @classmethod
    def all(cls, rows: int, of: int) -> tuple[Slice, ...]:
        return tuple(cls(rows, number, of) for number in range(of))

    @property
    def size(self) -> int:
        return self.rows // self.of + (self.number < self.rows % self.of)

    @property
    def begin(self) -> int:
        return self.rows // self.of * self.number + min(self.number, self.rows % self.of)

    def before(self, row: int) -> int:
        """Return how many rows of the slice its partition has before `row`."""
        return row // self.rows * self.size + min(max(row % self.rows - self.begin, 0), self.size)


@dataclass(frozen=True)
class Sliced:
    """The rows of spans that are in slices, the first slice's first; made when iterated."""

    spans: tuple[Span, ...]
    slices: tuple[Slice, ...]

    def __iter__(self) -> Iterator[Span]:
        return (span for _, span in self.placed())

    def placed(self) -> Iterator[tuple[int, Span]]:
        """Yield them, each with its offset in the spans, laid end to end."""
        for each in self.slices:
            begin, size, offset = each.begin, each.size, 0
            for partition, start, stop in self.spans:
                for first in range(start - start % each.rows + begin, stop, each.rows):
                    low, high = max(start, first), min(stop, first + size)
                    if low < high:
                        yield offset + low - start, (partition, low, high)
                offset += stop - start

    @property
    def starts(self) -> list[tuple[int, ...]]:
        """For each of the spans and slices: where they would begin here with all `before` them."""
        places, at, many = list[int](), 0, len(self.spans)
        for each in self.slices:
            for _, start, stop in self.spans:
                places.append(at - each.before(start))
                at += each.before(stop) - each.before(start)
        return [tuple(places[span::many]) for span in range(many)]


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
