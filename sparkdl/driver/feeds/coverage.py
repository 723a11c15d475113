"""The history of all feeds' calls: their epochs, and the rows that no checkpoint covers.

Runs in: driver. Pure; all of it runs on the controller's loop.

    call 0            call 1                              call 2
    ▓▓▓▓▓▓ ▓▓▓▓▓▓     ▓▓▓▓▓▓ ▓▓▓▒▒▒ ▒░░░░░ ░░░░░░         ░░░░░░      one block: one epoch
    covered           0      1      2      3

    ▓ a checkpoint covers it    ▒ used since    ░ to be fed

When a new generation begins, the rows ▒ are fed to it again, before the rows ░ and in the same
order. A fully covered epoch is skipped; of a partly covered one only the other rows are fed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from sparkdl.control.rows import (
    UNKNOWN,
    CallShape,
    Digest,
    EpochRows,
    FeedCoverage,
    PartRows,
    merge_epochs,
    num_rows,
)
from sparkdl.core.errors import ConfigError
from sparkdl.feed.transfer.messages import WHAT_TO_DO, other_data

READERS = ("auto", "spark", "nodes")
"""Choices for reading a DataFrame that only scans Parquet files."""
SHUFFLES = (None, "global")
"""Choices for redistributing all rows over all nodes in each epoch."""
_NOTHING = FeedCoverage()


@dataclass(frozen=True)
class FeedRequest:
    """The user's request to feed data.

    Attributes:
        to: the role whose nodes are fed, `None` for the nodes that train.
        shape: the known part of the data's shape, before the data is read.
        reader: one of `READERS`; `auto` means the nodes where they are sure to read the same rows.
        seed: of the shuffle, where rows have a fixed order.
    """

    data: Any
    epochs: int = 1
    timeout_s: float | None = None
    to: str | None = None
    reader: str = "auto"
    shuffle: str | None = None
    seed: int = 0
    is_micro_batch: bool = False
    shape: CallShape = UNKNOWN


@dataclass(frozen=True)
class EpochLeft:
    """An epoch of a call with rows to feed: all except those `done`."""

    epoch: int
    done: PartRows = field(default_factory=dict)


@dataclass
class Call:
    """One `feed` call.

    Attributes:
        number: in the order of the calls; below zero for micro-batches.
        run: names its Spark jobs, together with generation and epoch.
        whole: epochs before this one are covered as a whole.
        covered: rows of others that are covered.
        fed_in: the last generation that has received all its rows.
        has_ended_early: the nodes wanted no more.
        has_begun: some generation has been fed rows of it.
        jobs: the name of the last job that brought each epoch's rows.
        digests: by partition, of the furthest rows that came, and the job that brought them.
        is_broken: feeding it failed; it is not tried again.
    """

    number: int
    request: FeedRequest
    run: str
    shape: CallShape = UNKNOWN
    whole: int = 0
    covered: EpochRows = field(default_factory=dict)
    fed_in: int = -1
    has_ended_early: bool = False
    has_begun: bool = False
    jobs: dict[int, str] = field(default_factory=dict)
    digests: dict[int, tuple[Digest, str]] = field(default_factory=dict)
    is_broken: bool = False

    @property
    def is_empty(self) -> bool:
        return 0 < self.shape.partitions == len(self.covered_partitions({}))

    @property
    def rows_covered(self) -> int:
        """How many rows a checkpoint covers, of epochs whose number of rows is known."""
        partial = sum(num_rows(rows) for epoch, rows in self.covered.items() if epoch >= self.whole)
        return self.whole * sum(self.shape.rows.values()) + partial

    def left(self) -> list[EpochLeft]:
        return [
            EpochLeft(epoch, self.covered.get(epoch, {}))
            for epoch in range(self.whole, self.request.epochs)
            if not self._is_whole(self.covered.get(epoch, {}))
        ]

    def rows_of(self, left: Sequence[EpochLeft]) -> int:
        """Return how many rows of these epochs there are to feed; 0 if that is not known yet."""
        if not 0 < self.shape.partitions == len(self.shape.rows):
            return 0
        rows = sum(self.shape.rows.values())
        return sum(rows - num_rows(each.done) for each in left)

    def covered_partitions(self, done: PartRows) -> frozenset[int]:
        return frozenset(
            partition
            for partition, rows in self.shape.rows.items()
            if done.get(partition, ()) == ((0, rows),) or not rows
        )

    def note_digest(self, partition: int, digest: Digest, job: str) -> bool:
        """Note the digest of rows that have come; false if the same job has sent others before."""
        before, last = self.digests.get(partition, (digest, ""))
        if job != last or digest[0] > before[0]:
            self.digests[partition] = (digest, job)
        return job != last or digest[0] != before[0] or digest == before

    @property
    def furthest(self) -> dict[int, Digest]:
        """The digests that rows must have if any of them are not to be fed again."""
        return {partition: digest for partition, (digest, _) in self.digests.items()}

    def _is_whole(self, done: PartRows) -> bool:
        partitions = self.shape.partitions
        return bool(done) and 0 < partitions == len(self.covered_partitions(done))

    def mark_covered(self, rows: EpochRows) -> None:
        if not rows:
            return
        # Epochs before the first one listed are covered as a whole.
        self.whole = max(self.whole, min(rows))
        self.covered = {epoch: part for epoch, part in rows.items() if part}


def agreed(feed: str, before: CallShape, now: CallShape) -> CallShape:
    """Merge what an earlier run and this one know about the data of a call."""
    if before.numbering != now.numbering:
        way = "spark" if now.numbering else "nodes"
        raise ConfigError(
            f"feed {feed!r}: the checkpoint was made with another reader=, or with other Parquet "
            f"files. If it is the same DataFrame, feed it with reader={way!r}. {WHAT_TO_DO}"
        )
    if 0 < before.partitions != now.partitions > 0:
        raise other_data(feed, before.partitions, now.partitions)
    if any(before.rows.get(part, rows) != rows for part, rows in now.rows.items()):
        raise ConfigError(
            f"feed {feed!r}: the checkpoint was made with {sum(before.rows.values())} rows of "
            f"files, and there are {sum(now.rows.values())} now. {WHAT_TO_DO}"
        )
    rows = {**before.rows, **now.rows}
    return CallShape(now.partitions or before.partitions, rows, now.numbering, before.digests)


class CallHistory:
    """The calls of one feed, oldest first, except covered ones, or, without `keeps`, those fed."""

    def __init__(self, feed: str, keeps: bool = True, restored: FeedCoverage = _NOTHING) -> None:
        self._feed = feed
        self.keeps = keeps
        self._calls: dict[int, Call] = {}
        self._next_number = 0
        self._next_micro_batch = -1
        self._first = 0
        """All calls with smaller numbers are covered."""
        self._restored = restored
        self._generation = 0
        self._owners: dict[int, tuple[int, int]] = {}
        """Call and epoch of the call, by epoch of this generation."""
        self._next_epoch = 0

    def add(self, request: FeedRequest) -> Call:
        # Negative, because a later run counts calls again from 0.
        if request.is_micro_batch:
            number, self._next_micro_batch = self._next_micro_batch, self._next_micro_batch - 1
        else:
            number, self._next_number = self._next_number, self._next_number + 1
        rows = self._restored.rows.get(number, {})
        before = self._restored.shapes.get(number, UNKNOWN)
        call = Call(number, request, uuid.uuid4().hex, request.shape)
        # An earlier run has fed this call, and its checkpoint covers it as a whole.
        if 0 <= number < self._restored.calls:
            call.whole = request.epochs
        elif number >= 0 and number in self._restored.rows:
            # Without covered rows their numbers do not matter, and another reader may number them.
            if any(rows.values()) or before.numbering == request.shape.numbering:
                call.shape = agreed(self._feed, before, request.shape)
                call.digests = {p: (digest, "") for p, digest in before.digests.items()}
            call.mark_covered(rows)
        self._calls[number] = call
        return call

    def begin(self, generation: int) -> list[Call]:
        """Begin a generation if it is new. It will be fed the rows without a checkpoint.

        Returns:
            The micro-batches without a checkpoint, which cannot be fed again.
        """
        if generation <= self._generation:
            return []
        self._generation = generation
        self._owners, self._next_epoch = {}, 0
        for call in self._calls.values():
            call.has_ended_early = False
        # Spark has committed a micro-batch that the nodes have read, and does not bring it again.
        lost = [c for c in self._calls.values() if c.request.is_micro_batch and c.fed_in >= 0]
        for call in lost:
            del self._calls[call.number]
        return lost

    def next(self, up_to: Call | None = None) -> Call | None:
        for call in self._calls.values():
            if call.fed_in < self._generation and not call.is_broken and call.left():
                return call
            if call is up_to:
                break
        return None

    def allocate_epochs(self, call: Call, epochs: Sequence[int]) -> int:
        first = self._next_epoch
        self._next_epoch += len(epochs)
        for i, epoch in enumerate(epochs):
            self._owners[first + i] = (call.number, epoch)
        return first

    def record_shape(self, call: Call, partitions: int, rows: Mapping[int, int]) -> None:
        call.shape = CallShape(partitions, {**call.shape.rows, **rows})

    def mark_fed(self, call: Call, has_ended_early: bool) -> None:
        call.fed_in, call.has_ended_early = self._generation, has_ended_early
        self._forget()

    def mark_failed(self, call: Call) -> None:
        call.is_broken = True
        self._forget()

    def coverage(self, generation: int, parts: Iterable[EpochRows]) -> FeedCoverage:
        """Return the coverage of a checkpoint, including that of the last one."""
        found: dict[int, list[EpochRows]] = {}
        reached = -1
        # Epochs are numbered in each generation: those of another one name other rows.
        for part in parts if generation == self._generation else ():
            # Nodes read in order, so the furthest epoch shows which calls they have passed.
            reached = max(reached, *part, -1)
            for epoch, rows in part.items():
                if epoch in self._owners:
                    number, own = self._owners[epoch]
                    found.setdefault(number, []).append({own: rows})
        first, rows_by_call, shapes = self._first, dict[int, EpochRows](), dict[int, CallShape]()
        for number, call in sorted(self._calls.items()):
            # A copy, because this checkpoint may never become complete.
            now = Call(number, call.request, call.run, call.shape, call.whole)
            now.covered = merge_epochs([call.covered, *found.get(number, ())])
            left = [] if self._is_passed(call, reached) else now.left()
            # Only calls without a gap between them can be left out of the coverage.
            if not left and number == first:
                first += 1
            elif left and (left[0].epoch or now.covered):
                whole = left[0].epoch
                rows_by_call[number] = {
                    e: now.covered.get(e, {}) for e in {whole, *now.covered} if e >= whole
                }
                shapes[number] = structs.replace(call.shape, digests=call.furthest)
            elif not left:
                # Covered as a whole, behind one that is not: the epoch after its last says so.
                rows_by_call[number] = {call.request.epochs: {}}
        return FeedCoverage(first, rows_by_call, shapes)

    def covered_to(self, generation: int) -> int:
        """Return the first epoch of a generation that the last checkpoint does not fully cover."""
        if generation != self._generation:
            return 0
        for epoch, (number, own) in sorted(self._owners.items()):
            if number in self._calls and own >= self._calls[number].whole:
                return epoch
        return self._next_epoch

    def mark_covered(self, coverage: FeedCoverage) -> None:
        for number, call in self._calls.items():
            if 0 <= number < coverage.calls:
                call.whole = call.request.epochs
            else:
                call.mark_covered(coverage.rows.get(number, {}))
        self._forget()

    def _is_passed(self, call: Call, reached: int) -> bool:
        """Whether nodes have passed a call that has no more rows for them, covered or not."""
        own = [epoch for epoch, owner in self._owners.items() if owner[0] == call.number]
        return (call.has_ended_early or call.is_empty) and bool(own) and reached > max(own)

    def _forget(self) -> None:
        for number, call in list(self._calls.items()):
            is_covered = not call.left()
            is_over = call.fed_in == self._generation or call.is_broken or is_covered
            if is_over and (call.request.is_micro_batch or not self.keeps or is_covered):
                # Data of the driver's own may be large, and nothing reads them again.
                call.request = replace(call.request, data=None)
            # In order, since `_first` promises that every call before it is covered.
            is_done = is_covered and number <= self._first
            if is_done or (is_over and not self.keeps):
                del self._calls[number]
                self._owners = {e: o for e, o in self._owners.items() if o[0] != number}
                self._first = max(self._first, number + 1)


class CoverageStore:
    """The histories of all feeds, and their coverage by checkpoints."""

    def __init__(self, keeps: bool = True) -> None:
        self._keeps = keeps
        self._histories: dict[str, CallHistory] = {}
        self._restored: dict[str, FeedCoverage] = {}

    def history(self, feed: str) -> CallHistory:
        if feed not in self._histories:
            restored = self._restored.get(feed, _NOTHING)
            self._histories[feed] = CallHistory(feed, self._keeps, restored)
        return self._histories[feed]

    def restore(self, coverage: Mapping[str, FeedCoverage]) -> None:
        self._restored = dict(coverage)

    def coverage(
        self, generation: int, parts: Mapping[int, Mapping[str, EpochRows]]
    ) -> dict[str, FeedCoverage]:
        """Return the coverage of a checkpoint of these parts, by feed.

        Files that nodes read themselves (`sparkdl.parquet`) count as one call. Its epochs have the
        same numbers in all generations.
        """
        feeds = {feed for part in parts.values() for feed in part}
        covered = {}
        for feed in sorted({*feeds, *self._histories, *self._restored}):
            found = [part[feed] for part in parts.values() if feed in part]
            if feed in self._histories:
                covered[feed] = self._histories[feed].coverage(generation, found)
            else:
                covered[feed] = before = self._restored.get(feed, _NOTHING)
                if found:
                    rows = merge_epochs([before.rows.get(0, {}), *found])
                    covered[feed] = structs.replace(before, rows={**before.rows, 0: rows})
        return covered

    def covered_to(self, generation: int) -> dict[str, int]:
        return {feed: history.covered_to(generation) for feed, history in self._histories.items()}

    def mark_covered(self, coverage: Mapping[str, FeedCoverage]) -> None:
        for feed, covered in coverage.items():
            if feed in self._histories:
                self._histories[feed].mark_covered(covered)
            else:
                self._restored = {**self._restored, feed: covered}
