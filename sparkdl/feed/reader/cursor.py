"""The arrived segments of a feed, epoch by epoch, and a position in them. No locks, no messages.

    epoch 0: ▓▓▓ ▓▓▓ ▓▓▓ ░░░ ░░░ mark        epoch 1: the same again, or segments of its own
             ▲       ▲   ▲
             floor   │   position            ▓ taken   ░ not taken yet
                     given: how far user code has been handed rows

An iteration that is abandoned goes back to the floor. A segment is released when no epoch reads it
any more, or, when room is wanted, as soon as user code has been given its rows. The epoch cannot
begin again then.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from msgspec import structs

from sparkdl.control.channel import Segment
from sparkdl.control.counts import Given
from sparkdl.control.messages import EpochEnd
from sparkdl.feed.reader.consumed import ConsumedRows, Part
from sparkdl.feed.store.segment import read_segment

HEAD_STEPS = 8
"""Batches at the start of an iteration that are given back even if room is wanted."""


@dataclass
class Item:
    """A segment that has arrived.

    Attributes:
        fd: open until the batch is first wanted; on disk, until the segment is released.
        skip: rows at its start that were used before an iteration was abandoned.
        epoch: the last one that has read it; several may.
        origin: the position of its first row in `ConsumedRows`, if rows are tracked.
    """

    segment: Segment
    fd: int
    skip: int = 0
    epoch: int = -1
    origin: int | None = None
    is_released: bool = False
    mapped: pa.RecordBatch | None = None

    def batch(self) -> pa.RecordBatch:
        """Map the segment, without copying. From disk it is mapped for as long as it is used."""
        batch = self.mapped
        if batch is None:
            batch = read_segment(self.fd)
            if not self.segment.is_on_disk:
                self.mapped = batch
                self.close()
        # Other nodes may have been assigned the other rows of the file.
        start, rows = self.segment.start, self.segment.rows
        return batch if batch.num_rows == rows else batch.slice(start, rows)

    def drop(self) -> int | None:
        """Forget the batch; return the segment's number unless it was released before."""
        self.close()
        self.mapped = None
        return self._release()

    def keep(self) -> int | None:
        """Keep the batch mapped while the agent frees the segment; return as `drop` does."""
        self.batch()
        return self._release()

    def _release(self) -> int | None:
        was_released, self.is_released = self.is_released, True
        return None if was_released else self.segment.number

    def close(self) -> None:
        """Close the descriptor; a batch that is mapped stays valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class ReaderCursor:
    """The segments and marks of a feed that have arrived, and a position among them.

    Attributes:
        epoch: the number of the epoch that is read.
        counts: the rows and batches that user code has been given; see `given`.
        inference: segments of inference, which belong to no epoch.
        has_ended: nothing more will arrive.
        granted: rows of the epoch, by its number, that every node has at least.
        abandoned: how many iterations over this epoch have been left early.
        consumed: the rows of the batches given to user code.
    """

    def __init__(self, feed: str = "") -> None:
        self.epoch = 0
        self.counts = Given()
        self.inference: deque[Item] = deque()
        self.has_ended = False
        self.granted: dict[int, int] = {}
        self.abandoned = 0
        self.consumed = ConsumedRows(feed)
        self._passes: dict[int, list[Item]] = {}
        self._marks: dict[int, EpochEnd] = {}
        self._base = 0
        """The epoch whose segments are read: `epoch`, or the one that it repeats."""
        self._start = 0
        self._first = 0
        """The first segment of the epoch that is still here."""
        self._position = 0
        self._given_items = self._given_rows = 0
        self._floor_items = self._floor_rows = 0
        self._counts_at_floor = Given()

    # What arrives.

    def add(self, item: Item) -> None:
        if item.segment.exchange:
            self.inference.append(item)
        else:
            self._passes.setdefault(item.segment.epoch, []).append(item)

    def add_mark(self, mark: EpochEnd) -> None:
        if mark.epoch >= self.epoch:
            self._marks[mark.epoch] = mark

    def start_at(self, epoch: int) -> None:
        self._start = max(self._start, epoch)

    # Where the reader stands.

    @property
    def mark(self) -> EpochEnd | None:
        return self._marks.get(self.epoch)

    @property
    def next_item(self) -> Item | None:
        items = self._items
        return items[self._position] if self._position < len(items) else None

    @property
    def is_gone(self) -> bool:
        """Whether the segment at the position has been released."""
        return self._position < self._first

    def first_item(self) -> Item | None:
        return next((items[0] for _, items in sorted(self._passes.items()) if items), None)

    @property
    def is_due(self) -> bool:
        """Whether the next segment or mark of the epoch is here, or nothing more will come."""
        return self.next_item is not None or self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether no further segment of the epoch will come."""
        return self.mark is not None or self.has_ended

    @property
    def is_over(self) -> bool:
        """Whether no iteration finds anything any more."""
        is_here = self._floor_items < len(self._items)
        return self.has_ended and not is_here and self.mark is None

    def skip_missing(self) -> list[int]:
        """Enter the next epoch, if there is nothing more of this one.

        Returns:
            The segments to release.
        """
        is_read = self.has_ended and self.next_item is None
        if self.mark is not None or (self._items and not is_read):
            return []
        later = [e for e in (*self._passes, *self._marks) if e > self.epoch]
        if self.has_ended and later:
            return self.enter(min(later))
        if self._start > self.epoch:
            return self.enter(min([self._start, *later]))
        return []

    def take(self) -> Item:
        """Map the segment at the position and move past it."""
        item = self._items[self._position]
        item.batch()  # here, under the lock: no other thread releases it meanwhile
        self._position += 1
        # Numbered once for each epoch that reads it, and not again when an abandoned iteration
        # does.
        if item.epoch != self.epoch:
            segment = item.segment
            item.origin = self.consumed.append_segment(self.epoch, segment.number, segment.rows)
        item.epoch = self.epoch
        return item

    def reorder(self, random: np.random.Generator) -> None:
        """Put the segments of an epoch that is complete and was not begun into random order."""
        if self._position == self._first == 0 and self.mark is not None:
            # By number first, so that the order depends on the seed and the epoch, not on earlier
            # orders.
            items = sorted(self._items, key=lambda item: item.segment.number)
            self._passes[self._base] = [items[i] for i in random.permutation(len(items))]

    def give(self, rows: int, padded: int, steps: int, for_good: bool) -> None:
        was = self.counts
        self.counts = structs.replace(
            was, rows=was.rows + rows, steps=was.steps + steps, padded=was.padded + padded
        )
        self._given_rows += rows
        while self._given_items < self._position:
            in_item = self._items[self._given_items].segment.rows
            if in_item > self._given_rows:
                break
            self._given_rows -= in_item
            self._given_items += 1
        if for_good:
            self.raise_floor()

    def drop(self, rows: int, parts: list[Part]) -> None:
        """Count rows that user code is not given."""
        self.counts = structs.replace(self.counts, dropped=self.counts.dropped + rows)
        self.consumed.drop(parts)

    def rewind(self) -> None:
        self.consumed.rewind()
        rows, again = self.counts.rows - self._counts_at_floor.rows, self.counts.again
        self.abandoned += rows > 0
        self.counts = structs.replace(self._counts_at_floor, again=again + rows)
        self._position = self._given_items = self._floor_items
        self._given_rows = self._floor_rows
        if self._position < len(self._items):
            self._items[self._position].skip = self._floor_rows

    def raise_floor(self) -> None:
        """Make what user code is given next the place to go back to."""
        self._floor_items, self._floor_rows = self._given_items, self._given_rows
        self._counts_at_floor = self.counts
        self.consumed.raise_floor()

    def given(self, beyond: int) -> Given:
        """Return all that user code has been given; `beyond` as there."""
        return structs.replace(self.counts, epochs=self.epoch, beyond=beyond)

    def finish_epoch(self) -> list[int]:
        """Move past the epoch's end; return the segments to release."""
        if self.mark is None:
            if self.has_ended:  # in the middle of the epoch, which is not read again
                self._position = self._given_items = len(self._items)
                self._given_rows = 0
                self.raise_floor()
            return []
        # The same segments again: nothing is released, and the position starts over.
        if self._marks[self.epoch].again:
            self._marks.pop(self.epoch)
            self.epoch += 1
            self._reset()
            return []
        return self.enter(self.epoch + 1)

    def enter(self, epoch: int) -> list[int]:
        """Begin `epoch`, whose segments are its own; return those of earlier ones."""
        gone = [e for e in self._passes if e < epoch]
        freed = release_all(item for e in gone for item in self._passes.pop(e))
        self._marks = {e: mark for e, mark in self._marks.items() if e >= epoch}
        self.granted = {e: rows for e, rows in self.granted.items() if e >= epoch}
        self.epoch = self._base = epoch
        self._first = 0
        self._reset()
        return freed

    def releasable(self, is_waiting: bool) -> list[int]:
        """Return the segments to release early: user code has been given their rows.

        They stay mapped here as long as an abandoned iteration would go back to them.

        Args:
            is_waiting: user code waits for more, so it has gathered the rows taken before.
        """
        mark = self.mark
        if self._base != self.epoch or (mark is not None and mark.again):
            return []  # a later epoch reads them again
        # The agent may free these files, while their rows stay mapped here until they are given.
        freed = _keep(self._items[self._given_items : self._position]) if is_waiting else []
        # Code that looks at the first batches, as Keras does, begins again: these stay mapped
        # until then.
        steps = self.counts.steps - self._counts_at_floor.steps
        unneeded = self._given_items if steps > HEAD_STEPS else self._floor_items
        freed += release_all(self._items[self._first : unneeded])
        freed += _keep(self._items[unneeded : self._given_items])
        self._first = max(self._first, unneeded)
        return freed

    def clear(self) -> None:
        release_all((*self.inference, *(item for items in self._passes.values() for item in items)))
        self.inference.clear()
        self._passes.clear()
        self._marks.clear()
        self.granted.clear()
        self._first = 0
        self._reset()

    @property
    def is_begun(self) -> bool:
        """Whether an iteration has taken anything of the epoch, and not read it to its end."""
        return self._position > 0 or self._given_items > 0 or self._given_rows > 0

    @property
    def _items(self) -> list[Item]:
        return self._passes.get(self._base, [])

    def _reset(self) -> None:
        """Begin an epoch at its first row."""
        for item in self._items:
            item.skip = 0
        self._position = self._given_items = self._given_rows = self.abandoned = 0
        self.raise_floor()


def release_all(items: Iterable[Item]) -> list[int]:
    """Forget segments; return the numbers of the ones not released before."""
    return [number for item in items if (number := item.drop()) is not None]


def _keep(items: Iterable[Item]) -> list[int]:
    """Keep segments mapped; return the numbers of the ones not released before."""
    return [number for item in items if (number := item.keep()) is not None]
