"""Which rows the segments of a feed hold, or held before they were freed.

Runs in: agent
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable

from sparkdl.control.coverage import EpochRows, PartRows
from sparkdl.core.row_ranges import Range, merge_ranges, uncovered
from sparkdl.feed.transfer.append import Span


class Provenance:
    """The rows of the segments of one feed, by the segments' numbers. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[int, tuple[int, tuple[Span, ...]]] = {}
        self._settled: list[int] = []

    def add(self, segment: int, epoch: int, spans: tuple[Span, ...]) -> None:
        """Note what a segment holds that came in `epoch`."""
        with self._lock:
            self._spans[segment] = epoch, spans

    def spans(self, segment: int) -> tuple[Span, ...]:
        """Return what a segment holds; nothing if that has been forgotten."""
        with self._lock:
            return self._spans.get(segment, (0, ()))[1]

    def settle(self, epoch: int) -> None:
        """Segments that came up to `epoch` are not read after it."""
        with self._lock:
            if not self._settled or epoch > self._settled[-1]:
                self._settled.append(epoch)

    def forget(self, epoch: int) -> None:
        """Nobody asks for rows of the epochs before `epoch` any more."""
        with self._lock:
            self._spans = {
                segment: (came, spans)
                for segment, (came, spans) in self._spans.items()
                if not self.last_epoch(came) < epoch
            }
            self._settled = [e for e in self._settled if e >= epoch]

    def rows(self, used: EpochRows, dropped_to: int = -1) -> EpochRows:
        """Return by partition which rows were used, given by segment.

        Args:
            dropped_to: all rows that came in epochs up to this one count as used.
        """
        found: dict[int, dict[int, list[Range]]] = {}
        with self._lock:
            for epoch, segments in used.items():
                for segment, ranges in segments.items():
                    _, spans = self._spans.get(segment, (0, ()))
                    for partition, start, stop in within(spans, ranges):
                        found.setdefault(epoch, {}).setdefault(partition, []).append((start, stop))
            if dropped_to >= 0:
                for epoch, spans in self._spans.values():
                    for partition, start, stop in spans if epoch <= dropped_to else ():
                        found.setdefault(epoch, {}).setdefault(partition, []).append((start, stop))
        return {
            epoch: {part: tuple(merge_ranges(ranges)) for part, ranges in sorted(rows.items())}
            for epoch, rows in sorted(found.items())
        }

    def last_epoch(self, came: int) -> float:
        """Return the last epoch that reads what came in one, if it is known."""
        at = bisect_left(self._settled, came)
        return self._settled[at] if at < len(self._settled) else float("inf")


def within(spans: Iterable[Span], ranges: Iterable[Range]) -> list[Span]:
    """Return the parts of `spans`, laid end to end, that lie in `ranges`, which are sorted."""
    found: list[Span] = []
    wanted = list(ranges)
    offset = 0
    for partition, first, last in spans:
        end = offset + last - first
        for start, stop in wanted:
            low, high = max(start, offset), min(stop, end)
            if low < high:
                found.append((partition, first + low - offset, first + high - offset))
        offset = end
    return found


def rows_left(spans: Iterable[Span], done: PartRows) -> list[Range]:
    """Return which rows of `spans`, laid end to end, `done` does not name."""
    found: list[Range] = []
    offset = 0
    for partition, first, last in spans:
        for start, stop in uncovered(first, last, done.get(partition, ())):
            found.append((offset + start - first, offset + stop - first))
        offset += last - first
    return merge_ranges(found)
