"""The child's end of one feed: waits for rows, and reports the rows read to the agent.

`cursor.py` holds the arrived segments and the reader's position.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from msgspec import structs

from sparkdl.control.channel import Consumed, EndMark, Local, Reclaim, Release, Reopened, Terminated
from sparkdl.control.messages import EpochEnd, FeedBegin, FeedCovered, Granted
from sparkdl.control.rows import EpochRows
from sparkdl.core.errors import (
    ConfigError,
    EndOfFeedError,
    FeedClosedError,
    SparkdlError,
    UnfedError,
)
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import Member
from sparkdl.feed.reader.consumed import Part
from sparkdl.feed.reader.cursor import Item, ReaderCursor, release_all

_log = logging.getLogger(__name__)

FeedMessage = FeedBegin | Granted | EpochEnd | Reopened | FeedCovered | Reclaim | EndMark
"""The messages that a reader receives of its feed, besides the segments."""
REPORT_PERIOD_S = 0.02
"""Rows read are reported this often at most, and when user code waits for more.

A message for each batch would cost as much as a small step. The agent throttles further, because a
loop that waits at every step reports each time."""
WARNED_ITERATION = 2
"""Keras looks at the first batch and begins again, so one abandoned iteration is normal."""
MAX_EXTRA_EPOCHS = 1000
"""Empty iterations allowed after the end of a feed in a world that continues an earlier one, where
loops may count epochs from 0 again."""


class TrainingWatch:
    """Hears of a node's epochs, and ignores them; see `frameworks/independent_models.py`."""

    def epoch_over(self, feed: str) -> None:
        """Note that an epoch has been read to its end."""

    def fit_begins(self, model: Any, feed: str) -> None:
        """Check a model of Keras that `fit` is about to train."""

    def look(self) -> None:
        """Look how the node trains: its next iteration begins, or `map_fun` has returned."""


class Passes(Protocol):
    """Iterations of so many steps; see `feed/reader/batches.py`."""

    replayed: int


class FeedRegistry:
    """What all readers of a node share: its world, and which feeds are being fed. Thread-safe.

    Between two calls of `cluster.feed` a node waits as long as it takes. It gives up a feed that
    has never been fed: its name may be misspelt, or the driver may never feed.

    Attributes:
        watch: of the training.
        is_resumed: this world continues an earlier one, whose feeds may be over.
        tracks: whether to note which rows user code was given, see `FeedReader.position`.
        raised: the last error of an iteration within TensorFlow, which raises its own for it.
        own: feeds that the node reads from files itself: no driver feeds them.
    """

    def __init__(self) -> None:
        self.watch = TrainingWatch()
        self.is_resumed = self.tracks = False
        self.raised: SparkdlError | None = None
        self.own: set[str] = set()
        self._warned: set[tuple[str, str]] = set()
        self._begun: set[str] = set()
        self._touched_s = 0.0
        self._timeout_s: float | None = None
        self._unfed_node: str | None = None
        self._is_first = False
        self._node, self._roles = "this node", ""

    def expect(
        self, spec: ClusterSpec, member: Member, is_resumed: bool, watch: TrainingWatch
    ) -> None:
        """Take the world, and give up unfed feeds from now on."""
        self.watch, self.is_resumed = watch, is_resumed
        self.tracks = spec.checkpoint_dir is not None
        self._unfed_node, self._node = None, member.node.name
        if any(node.role.can_be_fed and not node.role.is_fed for node in spec.nodes):
            self._roles = ". A call feeds one role: the one in role=…, or else all that train"
        if not spec.is_fed:
            self._unfed_node = "a cluster with Feeding(fed=False), as sparkdl.run launches it"
        elif not member.role.can_be_fed:
            self._unfed_node = f"{member.node.name}, for its role takes no rows"
        self._is_first = not is_resumed and member.role.finishes_job
        if not is_resumed and (member.role.finishes_job or member.role.is_server):
            self._timeout_s = spec.settings.feeding.timeout_s

    def warn(self, feed: str, text: str) -> None:
        if (feed, text) not in self._warned:
            self._warned.add((feed, text))
            _log.warning("Feed %r: %s", feed, text)

    def begin(self, feed: str) -> None:
        self._begun.add(feed)

    def touch(self) -> None:
        self._touched_s = time.monotonic()

    def error_if_unreachable(self, feed: str) -> ConfigError | None:
        """Return the error if `feed` can never receive rows, else `None`."""
        if self._unfed_node is None or feed in self._begun | self.own:
            return None
        return ConfigError(
            f"feed {feed!r} cannot be read: {self._unfed_node} is not fed. Launch with "
            "Feeding(fed=True) and call cluster.feed, or read files: feed=sparkdl.parquet(…)"
        )

    def error_if_never_fed(self, feed: str) -> UnfedError | None:
        """Return the error of a feed that has ended without a call feeding it; `None` otherwise.

        A world that continues an earlier one cannot know.
        """
        if not self._is_first or feed in self._begun:
            return None
        return self.timeout_error(
            feed,
            "before the driver ended the feeds: call cluster.feed before cluster.results(), "
            "cluster.shutdown() or the end of the `with` block",
        )

    def remaining_s(self, feed: str, since_s: float) -> float | None:
        """Return how long to wait for a feed on; `None` for as long as it takes."""
        if self._timeout_s is None or feed in self._begun | self.own:
            return None
        # User code that is busy with another feed is not waiting for this one.
        return max(0.0, max(since_s, self._touched_s) + self._timeout_s - time.monotonic())

    def timeout_error(self, feed: str, when: str = "") -> UnfedError:
        when = when or f"within {self._timeout_s:g} s (Feeding(timeout_s=…))"
        fed = ", ".join(map(repr, sorted(self._begun))) or "none"
        return UnfedError(
            f"feed {feed!r} received no data on {self._node} {when}; feeds with data: {fed}. Give "
            f"cluster.feed(…, feed=…) and ctx.batches(…, feed=…) the same name{self._roles}"
        )


def end_of_feed(feed: str, count: int) -> EndOfFeedError:
    epochs = f"after {count} epoch{'s' * (count > 1)}" if count else "before any row came"
    return EndOfFeedError(
        f"feed {feed!r} ended {epochs}, but map_fun goes on to epoch {count + 1}, which has no "
        "batches: each loop over it, each epoch of fit, and each evaluate or predict takes one. "
        "Give cluster.feed(epochs=…) as many epochs as map_fun takes, or loop `while "
        f"ctx.has_epoch({feed!r})`. To validate, feed the validation rows as another feed: "
        "cluster.feed_async(rows, epochs=…, feed='validation') before cluster.feed(…), and read "
        "it with feed='validation'"
    )


class FeedReader:
    """One feed. The receiving thread adds, user code reads; all methods may be called by either.

    Attributes:
        passes: the iterations of so many steps, see `EpochBatches.steps`.
    """

    report_period_s = REPORT_PERIOD_S

    def __init__(
        self, feed: str, send: Callable[[Local], None], registry: FeedRegistry | None = None
    ) -> None:
        self.feed, self._send = feed, send
        self.passes: Passes | None = None
        self.registry, self._waits_forever = registry or FeedRegistry(), False
        self._changed = threading.Condition()
        self._cursor = ReaderCursor(feed)
        self.begin()
        self._owner = 0
        self._reported_at_s, self._is_reported = -math.inf, True
        self._is_waiting = self._is_terminated = False
        self._problem: SparkdlError | None = None

    # What the receiving thread calls.

    def begin(self) -> None:
        """Let the reader know its world, before user code reads."""
        self._cursor.consumed.is_wanted = self.registry.tracks

    def wait_forever(self) -> None:
        """Wait for a first row as long as it takes: inference may be asked at any time."""
        with self._changed:
            self._waits_forever = True

    @property
    def steps(self) -> int:
        return self._cursor.given.counts.steps + (self.passes.replayed if self.passes else 0)

    def add(self, item: Item) -> None:
        with self._changed:
            if self._is_terminated:
                item.close()
            else:
                self._cursor.add(item)
            self._changed.notify_all()

    def on_message(self, message: FeedMessage) -> None:
        cursor = self._cursor
        with self._changed:
            match message:
                case FeedBegin(_, epoch):
                    cursor.skip_to(epoch)
                case Granted(_, epoch, rows):
                    cursor.grant(epoch, rows)
                case EpochEnd() if not self._is_terminated:
                    cursor.add_mark(message)
                case Reopened(_, epoch):
                    self._is_terminated = False
                    cursor.skip_to(epoch)
                    self._release(cursor.enter(max(cursor.epoch, epoch)))
                    self._report()
                case FeedCovered(_, epoch):
                    cursor.consumed.forget(epoch)
                case Reclaim():  # from now to the end of the epoch
                    cursor.now.is_pressed = True
                    self._release(cursor.releasable(self._is_waiting))
                case EndMark():
                    cursor.has_ended = True
            self._changed.notify_all()

    def on_agent_lost(self) -> None:
        """The agent is gone: fail every wait."""
        with self._changed:
            lost = FeedClosedError(f"feed {self.feed!r}: the agent of this node is gone")
            self._problem = self._problem or lost
            self._changed.notify_all()

    def fail(self, problem: SparkdlError) -> None:
        """Expect no more rows: raise `problem` once the rows here have been read."""
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    # What user code's thread calls.

    def claim(self) -> int:
        """Take exclusive ownership; the previous owner receives no more items.

        Rows that it took from an unfinished epoch are given back.
        """
        with self._changed:
            self._owner += 1  # an abandoned iteration must not take rows of the next one
            now = self._cursor.now
            before = now.abandoned
            self._cursor.rewind()
            if before < now.abandoned == WARNED_ITERATION:
                self.registry.warn(
                    self.feed,
                    "a loop over it was left early twice in one epoch. Each loop begins the epoch "
                    "again, in another order if it is shuffled, so some of its rows may never be "
                    "read. With steps=…, as in ctx.batches(…, steps=100), a loop ends after that "
                    "many batches, and the next loop continues there",
                )
            self._is_reported &= before == now.abandoned
            self._changed.notify_all()
            return self._owner

    def owns(self, owner: int) -> bool:
        with self._changed:
            return owner == self._owner

    @property
    def abandoned(self) -> int:
        return self._cursor.now.abandoned

    def peek_batch(self, is_needed: bool = False) -> pa.RecordBatch | None:
        """Wait for the next segment; return its batch without moving, `None` at the feed's end.

        It is an error if it is needed, and the epoch has no row for this node.
        """
        cursor = self._cursor
        with self._changed:

            def lacks_rows() -> bool:
                mark = cursor.mark
                return is_needed and mark is not None and not mark.goes_on

            self._wait_row(lambda: bool(cursor.first_item() or cursor.has_ended or lacks_rows()))
            if (item := cursor.first_item()) is not None:
                return item.batch()
            if cursor.mark is not None and lacks_rows():
                raise too_few_rows(cursor.mark)
            return None

    def is_short(self) -> bool:
        """Wait until it is known whether some nodes have rows of the epoch, and others none."""
        cursor = self._cursor
        with self._changed:
            self._wait_row(lambda: cursor.now.granted > 0 or cursor.is_complete)
            rows = cursor.mark.rows.values() if cursor.mark else ()
            return sum(rows) > min(rows, default=0) == 0

    def has_epoch(self) -> bool:
        """Wait until there is an epoch to read, or the rest of one; false at the feed's end."""
        with self._changed:
            self._wait_row(lambda: self._cursor.is_begun or self._is_due())
            return not self._cursor.is_over

    def report_extra_epoch(self) -> None:
        with self._changed:
            if not self._cursor.given.counts.extra_epochs:
                self._cursor.count_extra_epoch()
            self._report()

    def end_of_feed(self) -> EndOfFeedError | UnfedError:
        unfed = self.registry.error_if_never_fed(self.feed)
        return unfed or end_of_feed(self.feed, self._cursor.epoch)

    def wait_epoch(self, owner: int, begins: bool = True) -> int | None:
        """Wait for the first item of an epoch; return the epoch's number, `None` as `take` does.

        Of iterations that find none the first is empty, the second raises: no loop is endless.
        """
        with self._changed:
            self._wait_row(lambda: owner != self._owner or self._is_due())
            if owner != self._owner:
                return None
            if begins and self._cursor.is_over:
                self._on_extra_epoch()
            return self._cursor.epoch

    def take(self, owner: int, with_exchange: bool = False) -> Item | EpochEnd | EndMark | None:
        """Wait for the next item and return it; `None` once another owner has claimed.

        A segment is mapped and moved past. A mark is not moved past: see `finish_epoch`.

        Args:
            with_exchange: rows of inference as well, when no others are due.

        Raises:
            ConfigError: if an abandoned epoch cannot begin again, for want of feed memory.
        """
        cursor = self._cursor
        with self._changed:
            if cursor.now.is_pressed:
                # Who waits for more has gathered the rows that it took before, so they may go.
                self._release(cursor.releasable(not self._is_due(with_exchange)))
            self._wait_row(lambda: owner != self._owner or self._is_due(with_exchange))
            if owner != self._owner:
                return None
            if cursor.now.position < cursor.now.first:
                raise ConfigError(
                    f"feed {self.feed!r}: a loop over it was left early, and the epoch cannot "
                    "begin again: it does not fit in the node's feed memory, so its first rows "
                    "have been released. Pass steps=… (ctx.batches(…, steps=100)): a loop ends "
                    "after that many batches, and the next loop continues there. Or read the "
                    "epoch to its end, or raise Feeding(memory_nbytes=…)"
                )
            if cursor.next_item is not None:  # before inference, which belongs to no epoch
                return cursor.take()
            if cursor.mark is not None:
                return cursor.mark
            if with_exchange and cursor.inference:
                item = cursor.inference.popleft()
                item.batch()
                return item
            return EndMark(self.feed)

    def known_mark(self, owner: int) -> EpochEnd | None:
        with self._changed:
            return self._cursor.mark if owner == self._owner else None

    def reorder(self, owner: int, random: np.random.Generator) -> None:
        with self._changed:
            if owner == self._owner:
                self._cursor.reorder(random)

    def is_granted(self, owner: int, rows: int) -> bool:
        """Wait whether every node has so many rows of the epoch; false once another has claimed."""
        cursor = self._cursor
        with self._changed:

            def has_rows() -> bool:
                return cursor.now.granted >= rows

            self._wait(lambda: owner != self._owner or has_rows() or cursor.is_complete)
            return owner == self._owner and has_rows()

    def give(self, owner: int, rows: int, padded: int = 0, parts: list[Part] | None = None) -> bool:
        """Count a batch before it is handed out; false, and do not, once another has claimed."""
        with self._changed:
            if owner != self._owner:
                return False
            self._cursor.give(rows, padded, steps=1, for_good=False)
            self._cursor.consumed.add(parts or [])
            self._report_if_due()
            return True

    def give_for_good(self, owner: int, rows: int) -> None:
        """Count rows that stay given if others claim; `note_batch` says in which batch."""
        with self._changed:
            if owner == self._owner:
                self._cursor.give(rows, padded=0, steps=0, for_good=True)
                self._report_if_due()

    def note_batch(self, parts: list[Part]) -> None:
        """Record the rows of a batch; `give_for_good` has counted them already."""
        with self._changed:
            self._cursor.consumed.add(parts)
            self._cursor.consumed.commit()

    def finish_epoch(self, owner: int, dropped: int = 0, parts: list[Part] | None = None) -> bool:
        """Move past the epoch's end, and release; false once another owner has claimed."""
        with self._changed:
            if owner != self._owner:
                return False
            self._cursor.drop(dropped, parts or [])
            self._release(self._cursor.finish_epoch())
            self._report()
            return True

    def read_ahead(self, batches: int | None) -> None:
        """Set how many of the batches that are handed out the training has not been given yet.

        It is unknown from `None` on, until `reach_end`.
        """
        with self._changed:
            consumed = self._cursor.consumed
            consumed.ahead = None if consumed.ahead is None else batches

    def reach_end(self) -> None:
        """Note that the training was given the last batch of an epoch, whatever reads ahead.

        Without effect if the epoch has not been read to its end.
        """
        with self._changed:
            self._cursor.consumed.reach_end()

    @property
    def batches_ended(self) -> int:
        """How many batches the epochs had that were read to their end; 0 unless tracked."""
        return self._cursor.consumed.ended

    def batches_beside(self) -> int:
        """Return how many batches count as used where only those of other feeds were counted.

        With code that reads ahead, these are the epochs that were read to their end.
        """
        with self._changed:
            consumed = self._cursor.consumed
            if consumed.ahead is not None:
                return consumed.used()
            if consumed.ended < consumed.count:
                self.registry.warn(
                    self.feed,
                    "a checkpoint was made within an epoch of it, which begins again "
                    "after a restart. If the model trains on this feed, name it in batches=",
                )
            return consumed.ended

    @property
    def batches_given(self) -> int:
        return self._cursor.consumed.count

    def position(self, batches: int | None) -> EpochRows:
        """Return the rows of the first batches handed out, by epoch and segment.

        Args:
            batches: how many, of all iterations together, without batches that an abandoned one
                gave back; `None` for all that the training was given.
        """
        with self._changed:
            return self._cursor.consumed.position(batches)

    def report(self) -> None:
        """Report what has not been reported yet: no more is read for a while."""
        with self._changed:
            if not self._is_reported:
                self._report()

    def answer_taken(self, item: Item) -> None:
        """Release a segment of inference: user code has its rows."""
        self._release(release_all([item]))

    def terminate(self) -> None:
        """Take no more rows of the current feeding; drop its rows that are here."""
        with self._changed:
            if self._is_terminated:
                return
            self._is_terminated = True
            self._owner += 1
            self._cursor.clear()
            self._report()
            self._changed.notify_all()
        self._send(Terminated(self.feed))

    # The lock is held.

    def _is_due(self, with_exchange: bool = False) -> bool:
        self._release(self._cursor.skip_missing())
        return self._cursor.is_due or (with_exchange and bool(self._cursor.inference))

    def _on_extra_epoch(self) -> None:
        """Count an iteration that finds no epoch: the first one is only warned."""
        error = self.end_of_feed()
        if isinstance(error, UnfedError):
            raise error
        extra = self._cursor.count_extra_epoch()
        if extra > (MAX_EXTRA_EPOCHS if self.registry.is_resumed else 1):
            raise error
        if extra == 1:
            _log.warning("%s", error)
            self._report()

    def _release(self, numbers: Iterable[int]) -> None:
        if numbers := tuple(numbers):
            self._send(Release(self.feed, numbers))

    def _report(self) -> None:
        self._reported_at_s, self._is_reported = time.monotonic(), True
        self._send(self._consumed())

    def _consumed(self) -> Consumed:
        given = structs.replace(self._cursor.given.counts, epochs=self._cursor.epoch)
        waits = self._is_waiting and not self._waits_forever  # inference may wait for any time
        return Consumed(self.feed, given, waits)

    def _report_if_due(self) -> None:
        self._is_reported = False
        if time.monotonic() - self._reported_at_s >= self.report_period_s:
            self._report()

    def _wait_row(self, is_ready: Callable[[], bool]) -> None:
        """Wait for rows, and report the wait: the driver may then assign rows to this node."""
        self._is_waiting = True
        try:
            self._wait(is_ready)
        finally:
            self._is_waiting = False

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        def is_over() -> bool:
            return is_ready() or self._problem is not None

        if not is_over():
            self._begin_wait()
            self.wait_until(is_over)
        # Rows that are here can be read although the agent is gone or reading has failed.
        if is_ready():
            return
        if self._problem is not None:
            raise self._problem

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Wait; a thread that stands here waits for rows (`node/waits.py`)."""
        since_s = time.monotonic()
        while not self._changed.wait_for(is_over, self._remaining_s(since_s)):
            if self._remaining_s(since_s) == 0:
                raise self.registry.timeout_error(self.feed)

    def _begin_wait(self) -> None:
        if problem := self.registry.error_if_unreachable(self.feed):
            raise problem
        # Each wait for a row is reported: the agent takes the next segment for its end. The first
        # one also says which feed user code reads.
        if not self._is_reported:
            self._report()
        elif self._is_waiting and not self._waits_forever:
            self._send(self._consumed())

    def _remaining_s(self, since_s: float) -> float | None:
        return None if self._waits_forever else self.registry.remaining_s(self.feed, since_s)


def too_few_rows(mark: EpochEnd) -> ConfigError:
    counts = "no row for this node"
    if mark.rows:
        counts = f"{sum(mark.rows.values())} rows for {len(mark.rows)} nodes"
    return ConfigError(
        f"epoch {mark.epoch} of feed {mark.feed!r} has {counts}; a synchronous step, and a dataset "
        "that must know the types, need a row on each. Feed more rows or use fewer nodes"
    )
