"""The child's end of one feed: segments in order, a position, and what may be forgotten.

Runs in: child

    segments   ▓▓▓ ▓▓▓ ▓▓▓ ░░░ ░░░ │end of epoch 0│ ░░░ …
               ▲           ▲
               start       position          ▓ read, kept until the epoch ends   ░ not read yet

An epoch's iterator moves the position. If it is abandoned before its end, the next one begins at
the start again: what was read is given back. Segments are released when their epoch has been read
to its end, or, when the agent asks because feeders wait for room, as soon as they have been read;
what is released can't be given back.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from sparkdl.control.channel import (
    Consumed,
    EndMark,
    EpochMark,
    Local,
    Release,
    Segment,
    Terminated,
)
from sparkdl.core.errors import FeedClosedError, FeedTimeoutError
from sparkdl.feed.segment import read_segment


@dataclass
class Item:
    """A segment that has arrived. The descriptor is open until the batch is first wanted."""

    segment: Segment
    fd: int
    _batch: pa.RecordBatch | None = None

    @property
    def rows(self) -> int:
        """Rows that count as consumed: those of inference do not."""
        return 0 if self.segment.exchange else self.segment.rows

    def batch(self) -> pa.RecordBatch:
        """Map the segment, without copying."""
        if self._batch is None:
            self._batch = read_segment(self.fd)
            self.close()
        return self._batch

    def close(self) -> None:
        """Close the descriptor; a batch that is mapped stays valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class FeedReader:
    """One feed. The receiving thread adds, user code reads; all methods may be called by either."""

    def __init__(
        self, feed: str, send: Callable[[Local], None], timeout_s: float | None = None
    ) -> None:
        self.feed = feed
        self._send = send
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._items: deque[Item | EpochMark | EndMark] = deque()
        self._position = 0
        self._owner = 0
        self._under_pressure = False
        self._terminated = False
        self._lost = False
        self._is_waiting = False
        self._rows = 0
        self._rows_at_start = 0
        self._epochs = 0

    # What the receiving thread calls.

    def add(self, item: Item | EpochMark | EndMark) -> None:
        """Append what came from the agent."""
        with self._changed:
            if self._terminated:
                if isinstance(item, Item):
                    item.close()
                return
            if isinstance(item, EpochMark):
                self._items.insert(self._place_of(item), item)
            else:
                self._items.append(item)
            self._changed.notify_all()

    def reclaim(self) -> None:
        """Release what has been read, from now to the end of the epoch: feeders wait for room."""
        with self._changed:
            self._under_pressure = True
            self._forget(self._position if self._is_waiting else self._num_given())

    def lose(self) -> None:
        """The agent is gone: fail every wait."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    # What user code's thread calls.

    def claim(self) -> int:
        """Become the one who reads; whoever read before gets nothing more.

        Rows that the previous owner took from an unfinished epoch are given back.
        """
        with self._changed:
            self._owner += 1
            self._position = 0
            self._rows = self._rows_at_start
            self._changed.notify_all()
            return self._owner

    def peek_batch(self) -> pa.RecordBatch | None:
        """Wait for the next segment; return its batch without moving, `None` at the feed's end."""
        with self._changed:
            self._wait(lambda: any(not isinstance(item, EpochMark) for item in self._items))
            first = next(item for item in self._items if not isinstance(item, EpochMark))
            return first.batch() if isinstance(first, Item) else None

    def take(self, owner: int) -> Item | EpochMark | EndMark | None:
        """Wait for the next item and return it; `None` once somebody else has claimed.

        A segment is mapped and moved past. A mark is not moved past: see `finish_epoch`.
        """
        with self._changed:
            if self._under_pressure:
                self._forget(self._num_given())
            self._is_waiting = True
            if self._under_pressure and not self._is_due():
                self._forget(self._position)
            try:
                self._wait(lambda: owner != self._owner or self._is_due())
            finally:
                self._is_waiting = False
            if owner != self._owner:
                return None
            item = self._items[self._position]
            if isinstance(item, Item):
                item.batch()  # here, where nobody forgets it meanwhile
                self._position += 1
            return item

    def give(self, owner: int, rows: int) -> bool:
        """Count rows that are about to be handed to user code, and tell the agent.

        Returns:
            False once somebody else has claimed: then nothing may be handed out.
        """
        with self._changed:
            if owner != self._owner:
                return False
            self._rows += rows
            self._send(Consumed(self.feed, self._rows, self._epochs))
            return True

    def finish_epoch(self, owner: int) -> None:
        """Move past the epoch's end: all before it is released and can't be given back."""
        with self._changed:
            if owner != self._owner or self._position >= len(self._items):
                return
            if isinstance(self._items[self._position], EpochMark):
                self._position += 1
                self._epochs += 1
                self._under_pressure = False
                self._forget(self._position)
                self._send(Consumed(self.feed, self._rows, self._epochs))

    def release_taken(self) -> None:
        """Forget everything that was taken: it can't be given back any more."""
        with self._changed:
            self._forget(self._position)

    def terminate(self) -> None:
        """Take no more rows; drop those that are here."""
        with self._changed:
            if self._terminated:
                return
            self._terminated = True
            for item in self._items:
                if isinstance(item, Item):
                    item.close()
            self._items = deque([EndMark(self.feed)])
            self._position = 0
            self._changed.notify_all()
        self._send(Terminated(self.feed))

    def _place_of(self, mark: EpochMark) -> int:
        """Return where a mark belongs: segments of the next epoch may have overtaken it."""
        for place, item in enumerate(self._items):
            if isinstance(item, Item) and item.segment.epoch > mark.epoch:
                return place
        return len(self._items)

    def _is_due(self) -> bool:
        """Whether the next item is there and is not of an epoch after the one being read."""
        if self._position >= len(self._items):
            return False
        item = self._items[self._position]
        if isinstance(item, Item) and not isinstance(self._items[-1], EndMark):
            return item.segment.epoch <= self._epochs
        return True

    def _num_given(self) -> int:
        """Return how many of the items before the position have been given to user code whole."""
        rows = self._rows_at_start
        for count in range(self._position):
            item = self._items[count]
            if isinstance(item, Item):
                rows += item.rows
                if rows > self._rows:
                    return count
        return self._position

    def _forget(self, count: int) -> None:
        number = -1
        for _ in range(count):
            item = self._items.popleft()
            if isinstance(item, Item):
                number = item.segment.number
                self._rows_at_start += item.rows
                item.close()
        self._position -= count
        if number >= 0:
            self._send(Release(self.feed, number))

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        if not self._changed.wait_for(lambda: is_ready() or self._lost, self._timeout_s):
            raise FeedTimeoutError(
                f"feed {self.feed!r} brought no row for {self._timeout_s:g} s; is it being fed?"
            )
        if self._lost and not is_ready():
            raise FeedClosedError(f"feed {self.feed!r}: the agent of this node is gone")
