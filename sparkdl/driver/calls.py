"""The book of a feed's calls: what was fed as which epoch, and what no checkpoint covers. Pure.

Runs in: driver

    call 0            call 1                              call 2
    ▓▓▓▓▓▓ ▓▓▓▓▓▓     ▓▓▓▓▓▓ ▓▓▓▒▒▒ ▒░░░░░ ░░░░░░         ░░░░░░      one block: one epoch
    covered           0      1      2      3

    ▓ a checkpoint covers it    ▒ used since    ░ to be fed

What is ▒ when a new generation begins is fed to it again, before what is ░ and in the same order.
An epoch that is covered as a whole is not fed at all; of others only the rows that are not covered.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.feed.coverage import (
    UNKNOWN,
    CallShape,
    EpochRows,
    FeedCoverage,
    PartRows,
    merge_epochs,
    num_rows,
)


@dataclass(frozen=True)
class Asked:
    """What the user has asked to feed.

    Attributes:
        to: the role whose nodes are fed, `None` for those that train.
        is_micro_batch: of a stream, which brings it once.
        shape: what is known of the data before they have been read.
    """

    data: Any
    epochs: int = 1
    timeout_s: float | None = None
    to: str | None = None
    is_micro_batch: bool = False
    shape: CallShape = UNKNOWN


@dataclass(frozen=True)
class EpochLeft:
    """An epoch of a call of which there are rows to feed: all but those `done`."""

    epoch: int
    done: PartRows = field(default_factory=dict)


@dataclass
class Call:
    """One `feed` call.

    Attributes:
        number: in the order of the calls; below zero for micro-batches.
        run: names its Spark jobs, together with the epoch.
        whole: epochs before this one are covered as a whole.
        covered: rows of others that are covered.
        fed_in: the generation that has had all rows that are to be fed.
        has_ended_early: the nodes wanted no more.
        has_begun: some generation has been fed rows of it.
        is_broken: feeding it failed; it is not tried again.
    """

    number: int
    asked: Asked
    run: str
    shape: CallShape = UNKNOWN
    whole: int = 0
    covered: EpochRows = field(default_factory=dict)
    fed_in: int = -1
    has_ended_early: bool = False
    has_begun: bool = False
    is_broken: bool = False

    @property
    def is_covered(self) -> bool:
        """Whether a checkpoint covers all rows."""
        return not self.left()

    @property
    def is_empty(self) -> bool:
        """Whether the data are known to have no rows."""
        return 0 < self.shape.partitions == len(self.covered_partitions({}))

    @property
    def rows_covered(self) -> int:
        """How many rows a checkpoint covers, of epochs whose number of rows is known."""
        partial = sum(num_rows(rows) for epoch, rows in self.covered.items() if epoch >= self.whole)
        return self.whole * sum(self.shape.rows.values()) + partial

    def left(self) -> list[EpochLeft]:
        """Return the epochs of which there are rows to feed."""
        return [
            EpochLeft(epoch, self.covered.get(epoch, {}))
            for epoch in range(self.whole, self.asked.epochs)
            if not self._is_whole(self.covered.get(epoch, {}))
        ]

    def covered_partitions(self, done: PartRows) -> frozenset[int]:
        """Return the partitions of which all rows are `done`."""
        return frozenset(
            partition
            for partition, rows in self.shape.rows.items()
            if done.get(partition, ()) == ((0, rows),) or not rows
        )

    def _is_whole(self, done: PartRows) -> bool:
        partitions = self.shape.partitions
        return bool(done) and 0 < partitions == len(self.covered_partitions(done))

    def take(self, rows: EpochRows) -> None:
        """Take what a checkpoint covers: all that it does."""
        if not rows:
            return
        self.whole = max(self.whole, min(rows))
        self.covered = {epoch: part for epoch, part in rows.items() if part}


class CallBook:
    """The calls of one feed, oldest first; none that a checkpoint covers.

    Args:
        keeps: calls are kept until a checkpoint covers them; else until they have been fed.
    """

    def __init__(self, feed: str, keeps: bool = True) -> None:
        self._feed = feed
        self._keeps = keeps
        self._calls: dict[int, Call] = {}
        self._next_number = 0
        self._next_micro_batch = -1
        self._first = 0
        """All calls with smaller numbers are covered."""
        self._restored = FeedCoverage()
        self._generation = 0
        self._owners: dict[int, tuple[int, int]] = {}
        """Call and epoch of the call, by epoch of this generation."""
        self._next_epoch = 0

    def restore(self, coverage: FeedCoverage) -> None:
        """Begin with what a checkpoint of an earlier run covers; before the first call."""
        self._restored = coverage

    def add(self, asked: Asked) -> Call:
        """Enter a call.

        Raises:
            ConfigError: if an earlier run has fed a part of it, and it had other data.
        """
        if asked.is_micro_batch:
            number, self._next_micro_batch = self._next_micro_batch, self._next_micro_batch - 1
        else:
            number, self._next_number = self._next_number, self._next_number + 1
        call = Call(number, asked, uuid.uuid4().hex, asked.shape)
        if 0 <= number < self._restored.calls:
            call.whole = asked.epochs
        elif number >= 0 and number in self._restored.rows:
            before = self._restored.shapes.get(number, UNKNOWN)
            call.shape = self._agreed(before, asked.shape)
            call.take(self._restored.rows[number])
        self._calls[number] = call
        return call

    def begin(self, generation: int) -> list[Call]:
        """Begin a generation if it is new: what no checkpoint covers is to be fed again.

        Returns:
            The micro-batches that no checkpoint covers and that cannot be fed again.
        """
        if generation <= self._generation:
            return []
        self._generation = generation
        self._owners, self._next_epoch = {}, 0
        for call in self._calls.values():
            call.has_ended_early = False
        lost = [c for c in self._calls.values() if c.asked.is_micro_batch and c.fed_in >= 0]
        for call in lost:
            del self._calls[call.number]
        return lost

    def next(self, up_to: Call | None = None) -> Call | None:
        """Return the first call of which this generation has to be fed rows; none after `up_to`."""
        for call in self._calls.values():
            if call.fed_in < self._generation and not call.is_broken and call.left():
                return call
            if call is up_to:
                break
        return None

    def open_epochs(self, call: Call | None, epochs: Sequence[int]) -> int:
        """Number epochs of `call` in this generation; return the number of the first.

        Args:
            call: none for epochs that hold no rows.
        """
        first = self._next_epoch
        self._next_epoch += len(epochs)
        if call is not None:
            for i, epoch in enumerate(epochs):
                self._owners[first + i] = (call.number, epoch)
        return first

    def measured(self, call: Call, partitions: int, rows: Mapping[int, int]) -> None:
        """Note what a pass over the data has shown: its partitions, and rows of some of them."""
        call.shape = CallShape(partitions, {**call.shape.rows, **rows})

    def fed(self, call: Call, has_ended_early: bool) -> None:
        """This generation has all rows of `call`, or the nodes want no more of them."""
        call.fed_in, call.has_ended_early = self._generation, has_ended_early
        self._forget()

    def broke(self, call: Call) -> None:
        """Feeding `call` has failed."""
        call.is_broken = True
        self._forget()

    def coverage(self, generation: int, parts: Iterable[EpochRows]) -> FeedCoverage:
        """Return what a checkpoint covers, with what the last one does.

        Args:
            generation: whose epochs `parts` name: of each node the rows that it has used.
        """
        found: dict[int, list[EpochRows]] = {}
        reached = -1
        for part in parts if generation == self._generation else ():
            reached = max(reached, *part, -1)
            for epoch, rows in part.items():
                if epoch in self._owners:
                    number, own = self._owners[epoch]
                    found.setdefault(number, []).append({own: rows})
        first, rows_by_call, shapes = self._first, dict[int, EpochRows](), dict[int, CallShape]()
        for number, call in sorted(self._calls.items()):
            now = Call(number, call.asked, call.run, call.shape, call.whole)
            now.covered = merge_epochs([call.covered, *found.get(number, ())])
            left = [] if self._is_passed(call, reached) else now.left()
            if not left and number == first:
                first += 1
            elif left and (left[0].epoch or now.covered):
                whole = left[0].epoch
                rows_by_call[number] = {
                    e: now.covered.get(e, {}) for e in {whole, *now.covered} if e >= whole
                }
                shapes[number] = call.shape
            elif not left:
                rows_by_call[number] = {call.asked.epochs: {}}
        return FeedCoverage(first, rows_by_call, shapes)

    def cover(self, coverage: FeedCoverage) -> None:
        """A checkpoint is complete that covers this."""
        for number, call in self._calls.items():
            if 0 <= number < coverage.calls:
                call.whole = call.asked.epochs
            else:
                call.take(coverage.rows.get(number, {}))
        self._forget()

    def _is_passed(self, call: Call, reached: int) -> bool:
        """Whether nodes are behind a call that has no rows left for them, whatever is covered."""
        own = [epoch for epoch, owner in self._owners.items() if owner[0] == call.number]
        return (call.has_ended_early or call.is_empty) and bool(own) and reached > max(own)

    def _forget(self) -> None:
        """Let go of calls, and of data, that are not needed any more."""
        for number, call in list(self._calls.items()):
            is_over = call.fed_in == self._generation or call.is_broken or not call.left()
            if is_over and (call.asked.is_micro_batch or not self._keeps or not call.left()):
                call.asked = replace(call.asked, data=None)
            is_done = not call.left() and number <= self._first
            if is_done or (is_over and not self._keeps):
                del self._calls[number]
                self._owners = {e: o for e, o in self._owners.items() if o[0] != number}
                self._first = max(self._first, number + 1)

    def _agreed(self, before: CallShape, now: CallShape) -> CallShape:
        """Return what both say of the data.

        Raises:
            ConfigError: if they cannot be the same data.
        """
        if 0 < before.partitions != now.partitions > 0:
            raise other_data(self._feed, before.partitions, now.partitions)
        if any(before.rows.get(part, rows) != rows for part, rows in now.rows.items()):
            raise ConfigError(
                f"feed {self._feed!r}: the checkpoint was made with {sum(before.rows.values())} "
                f"rows of files, and there are {sum(now.rows.values())} now. {_WHAT_TO_DO}"
            )
        return CallShape(now.partitions or before.partitions, {**before.rows, **now.rows})


_WHAT_TO_DO = (
    "Which rows are left cannot be told: feed the same data, in the same partitions (cache a "
    "DataFrame whose partitions vary, or write it to Parquet), or take another checkpoint_dir"
)


def check_partitions(feed: str, call: Call, partitions: int) -> None:
    """Check that the data come in as many partitions as before.

    Raises:
        ConfigError: if they do not.
    """
    known = call.shape.partitions
    named = max((part for rows in call.covered.values() for part in rows), default=-1) + 1
    if known not in (0, partitions) or named > partitions:
        raise other_data(feed, known or named, partitions)


def other_data(feed: str, before: int, now: int) -> ConfigError:
    """Return the error for data that come in other partitions than before."""
    return ConfigError(
        f"feed {feed!r}: the data have {now} partitions, and {before} when rows of them were fed "
        f"before. {_WHAT_TO_DO}"
    )
