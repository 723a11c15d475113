"""Half-open ranges of row numbers: merged, cut, and what is missing between them.

Runs in: anywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]
"""Rows [start, stop)."""


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Return half-open `ranges` sorted, with those that touch or overlap made one.

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


def first_rows(ranges: Iterable[Range], rows: int) -> list[Range]:
    """Return the first `rows` rows of half-open ranges; all if they have fewer."""
    found: list[Range] = []
    for start, stop in ranges:
        if rows <= 0:
            break
        found.append((start, min(stop, start + rows)))
        rows -= stop - start
    return found


def uncovered(start: int, stop: int, ranges: Sequence[Range]) -> list[Range]:
    """Return the parts of [`start`, `stop`) that no range covers, in order.

    Args:
        start: first offset asked about.
        stop: the offset past the last one asked about.
        ranges: half-open ranges, in any order.
    """
    missing: list[Range] = []
    for covered_start, covered_stop in merge_ranges(ranges):
        if start < min(covered_start, stop):
            missing.append((start, min(covered_start, stop)))
        start = max(start, covered_stop)
    if start < stop:
        missing.append((start, stop))
    return missing
