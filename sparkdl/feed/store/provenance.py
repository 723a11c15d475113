"""Which rows of which partitions are in the segments of a log.

Runs in: agent
"""

from __future__ import annotations

from bisect import bisect_left

from sparkdl.control.rows import EpochRows
from sparkdl.core.row_ranges import Range, Span, merge_ranges, spans_within


class Provenance:
    """Which rows the segments of one feed hold, or held before they were freed, by their numbers.

    The caller holds the lock of the budget.
    """

    def __init__(self) -> None:
        self._spans: dict[int, tuple[int, tuple[Span, ...]]] = {}
        self._settled: list[int] = []

    def add(self, segment: int, epoch: int, spans: tuple[Span, ...]) -> None:
        """Note what a segment holds that came in `epoch`."""
        self._spans[segment] = epoch, spans

    def settle(self, epoch: int) -> None:
        """Note that no epoch after `epoch` reads segments that came in it or before."""
        if not self._settled or epoch > self._settled[-1]:
            self._settled.append(epoch)

    def forget(self, epoch: int) -> None:
        """Forget rows that only epochs before `epoch` read: a checkpoint covers them."""
        self._spans = {
            segment: (came, spans)
            for segment, (came, spans) in self._spans.items()
            if not self.last_epoch(came) < epoch
        }
        self._settled = [e for e in self._settled if e >= epoch]

    def knows(self, segment: int) -> bool:
        """Whether the rows of a segment are not forgotten."""
        return segment in self._spans

    def rows(self, consumed: EpochRows, dropped_to: int = -1) -> EpochRows:
        """Return by partition which rows were consumed, given by segment.

        Args:
            dropped_to: all rows that came in epochs up to this one count as consumed.
        """
        found: dict[int, dict[int, list[Range]]] = {}
        for epoch, segments in consumed.items():
            for segment, ranges in segments.items():
                _, spans = self._spans.get(segment, (0, ()))
                for partition, start, stop in spans_within(spans, ranges):
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
