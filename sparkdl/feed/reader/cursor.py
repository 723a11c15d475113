"""The arrived segments of a feed, epoch by epoch, and a position in them. No locks, no messages.

    epoch 0: ▓▓▓ ▓▓▓ ▓▓▓ ░░░ ░░░ mark        epoch 1: the same again, or segments of its own
             ▲       ▲   ▲
         committed   │   position            ▓ taken   ░ not taken yet
                     given: how far user code has been handed rows

An abandoned iteration goes back to the committed position. A segment is released when no epoch
reads it any more, or, when room is wanted, as soon as user code has been given its rows. The epoch
cannot begin again then.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from msgspec import structs

from sparkdl.control.channel import Segment
from sparkdl.control.messages import EpochEnd
from sparkdl.control.rows import ReadCounts
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

    def release(self, stays_mapped: bool = False) -> int | None:
        """Let the agent free the segment; return its number unless it was released before."""
        if stays_mapped:
            self.batch()
        else:
            self.close()
            self.mapped = None
        was_released, self.is_released = self.is_released, True
        return None if was_released else self.segment.number

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class _Position:
    """How far user code has been handed rows: whole segments, rows of the next, counts of all."""

    items: int = 0
    rows: int = 0
    counts: ReadCounts = field(default_factory=ReadCounts)


@dataclass
class _Epoch:
    """What has arrived of an epoch, and how far it is read.

    Attributes:
        granted: rows of it that every node has at least.
        committed: where an iteration that is abandoned goes back to.
        first: the first segment that is still here.
        is_pressed: room is wanted: what user code has been given is released.
    """

    items: list[Item] = field(default_factory=list)
    mark: EpochEnd | None = None
    granted: int = 0
    committed: _Position = _Position()
    first: int = 0
    position: int = 0
    abandoned: int = 0
    is_pressed: bool = False


class ReaderCursor:
    """The segments and marks of a feed that have arrived, and a position among them."""

    def __init__(self, feed: str = "") -> None:
        self.epoch = 0
        self.given = _Position()
        self.inference: deque[Item] = deque()
        self.has_ended = False
        self.consumed = ConsumedRows(feed)
        self._epochs: dict[int, _Epoch] = {}
        self._start = 0

    # What arrives.

    def add(self, item: Item) -> None:
        if item.segment.exchange:
            self.inference.append(item)
        else:
            self._epochs.setdefault(item.segment.epoch, _Epoch()).items.append(item)

    def add_mark(self, mark: EpochEnd) -> None:
        if mark.epoch >= self.epoch:
            self._epochs.setdefault(mark.epoch, _Epoch()).mark = mark

    def grant(self, epoch: int, rows: int) -> None:
        if epoch >= self.epoch:
            self._epochs.setdefault(epoch, _Epoch()).granted = rows

    def skip_to(self, epoch: int) -> None:
        """No epoch before `epoch` will come any more."""
        self._start = max(self._start, epoch)

    # Where the reader stands.

    @property
    def now(self) -> _Epoch:
        return self._epochs.setdefault(self.epoch, _Epoch())

    @property
    def mark(self) -> EpochEnd | None:
        return self.now.mark

    @property
    def next_item(self) -> Item | None:
        now = self.now
        return now.items[now.position] if now.position < len(now.items) else None

    def first_item(self) -> Item | None:
        return next((each.items[0] for _, each in sorted(self._epochs.items()) if each.items), None)

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
        is_here = self.now.committed.items < len(self.now.items)
        return self.has_ended and not is_here and self.mark is None

    @property
    def is_begun(self) -> bool:
        """Whether an iteration has taken anything of the epoch, and not read it to its end."""
        return self.now.position > 0 or self.given.items > 0 or self.given.rows > 0

    def skip_missing(self) -> list[int]:
        """Enter the next epoch, if there is nothing more of this one; return what to release."""
        is_read = self.has_ended and self.next_item is None
        if self.mark is not None or (self.now.items and not is_read):
            return []
        here = [number for number, each in self._epochs.items() if each.items or each.mark]
        later = [number for number in here if number > self.epoch]
        if self.has_ended and later:
            return self.enter(min(later))
        if self._start > self.epoch:
            return self.enter(min([self._start, *later]))
        return []

    def take(self) -> Item:
        now = self.now
        item = now.items[now.position]
        item.batch()  # here, under the lock: no other thread releases it meanwhile
        now.position += 1
        # Numbered once for each epoch that reads it, not again for an abandoned iteration.
        if item.epoch != self.epoch:
            segment = item.segment
            item.origin = self.consumed.append_segment(self.epoch, segment.number, segment.rows)
        item.epoch = self.epoch
        return item

    def reorder(self, random: np.random.Generator) -> None:
        """Put the segments of an epoch that is complete and was not begun into random order."""
        now = self.now
        if now.position == now.first == 0 and now.mark is not None:
            # By number first, so that the order does not depend on earlier ones.
            items = sorted(now.items, key=lambda item: item.segment.number)
            now.items = [items[i] for i in random.permutation(len(items))]

    def give(self, rows: int, padded: int, steps: int, for_good: bool) -> None:
        was = self.given.counts
        counts = structs.replace(
            was, rows=was.rows + rows, steps=was.steps + steps, padded=was.padded + padded
        )
        now, items, left = self.now, self.given.items, self.given.rows + rows
        while items < now.position and (in_item := now.items[items].segment.rows) <= left:
            items, left = items + 1, left - in_item
        self.given = _Position(items, left, counts)
        if for_good:
            self.commit_position()

    def drop(self, rows: int, parts: list[Part]) -> None:
        counts = self.given.counts
        counts = structs.replace(counts, dropped=counts.dropped + rows)
        self.given = replace(self.given, counts=counts)
        self.consumed.drop(parts)

    def count_extra_epoch(self) -> int:
        """Count an iteration that has found no epoch; return how many there were."""
        counts = self.given.counts
        counts = structs.replace(counts, extra_epochs=counts.extra_epochs + 1)
        self.given = replace(self.given, counts=counts)
        return counts.extra_epochs

    def rewind(self) -> None:
        """Go back to where the iteration began; what was given for good stays given."""
        self.consumed.rewind()
        now, committed, counts = self.now, self.now.committed, self.given.counts
        rows = counts.rows - committed.counts.rows
        now.abandoned += rows > 0
        again, extra = counts.again + rows, counts.extra_epochs
        kept = structs.replace(committed.counts, again=again, extra_epochs=extra)
        self.given = replace(committed, counts=kept)
        now.position = committed.items
        if (item := self.next_item) is not None:
            item.skip = committed.rows

    def commit_position(self) -> None:
        """Make what user code is given next the place to go back to."""
        self.now.committed = self.given
        self.consumed.commit()

    def finish_epoch(self) -> list[int]:
        """Move past the epoch's end; return the segments to release."""
        now = self.now
        if now.mark is None:
            if self.has_ended:  # in the middle of the epoch, which is not read again
                now.position = len(now.items)
                self.given = replace(self.given, items=now.position, rows=0)
                self.commit_position()
            return []
        # The same segments again: nothing is released, and the position starts over.
        if now.mark.again:
            del self._epochs[self.epoch]
            self.epoch += 1
            self.now.items = now.items
            self._begin()
            return []
        return self.enter(self.epoch + 1)

    def enter(self, epoch: int) -> list[int]:
        """Begin `epoch`, whose segments are its own; return those of earlier ones."""
        gone = [e for e in self._epochs if e < epoch]
        freed = release_all(item for e in gone for item in self._epochs.pop(e).items)
        self.epoch = epoch
        self._begin()
        return freed

    def releasable(self, is_waiting: bool) -> list[int]:
        """Return the segments to release early: user code has been given their rows.

        They stay mapped here as long as an abandoned iteration would go back to them. Where user
        code waits for more, it has gathered the rows taken before.
        """
        now, given = self.now, self.given.items
        is_again = bool(now.items) and now.items[0].segment.epoch != self.epoch
        if is_again or (now.mark is not None and now.mark.again):
            return []  # a later epoch reads them again
        # The agent may free these files, while their rows stay mapped here until they are given.
        freed = release_all(now.items[given : now.position], stay_mapped=True) if is_waiting else []
        # Code that looks at the first batches, as Keras does, begins again: they stay mapped.
        steps = self.given.counts.steps - now.committed.counts.steps
        unneeded = given if steps > HEAD_STEPS else now.committed.items
        freed += release_all(now.items[now.first : unneeded])
        freed += release_all(now.items[unneeded:given], stay_mapped=True)
        now.first = max(now.first, unneeded)
        return freed

    def clear(self) -> None:
        release_all((*self.inference, *(i for each in self._epochs.values() for i in each.items)))
        self.inference.clear()
        self._epochs.clear()
        self._begin()

    def _begin(self) -> None:
        now = self.now
        for item in now.items:
            item.skip = 0
        now.position = now.first = now.abandoned = 0
        self.given = _Position(counts=self.given.counts)
        self.commit_position()


def release_all(items: Iterable[Item], stay_mapped: bool = False) -> list[int]:
    """Forget segments, or keep them mapped; return the numbers of those not released before."""
    return [number for item in items if (number := item.release(stay_mapped)) is not None]
