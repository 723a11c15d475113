"""A node's feeds at its agent: rows from Flight go to the child, counts to the coordinator.

Runs in: agent
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from sparkdl.control.channel import (
    Consumed,
    EndMark,
    FeedStart,
    Local,
    ReadParquet,
    Reclaim,
    Release,
    Reopened,
    Results,
    Segment,
    Terminated,
    Withdraw,
    Withdrawn,
)
from sparkdl.control.descriptors import OUT_OF_DESCRIPTORS
from sparkdl.control.messages import (
    EpochEnd,
    FeedBegin,
    FeedCount,
    FeedCovered,
    FeedCut,
    FeedEnd,
    FeedHold,
    FeedProgress,
    Granted,
    PassOn,
    ReadShare,
    ToFeeds,
)
from sparkdl.control.rows import EpochRows
from sparkdl.control.tls import Tls, Trust
from sparkdl.core.deadline import Deadline
from sparkdl.core.throttle import Throttle, period_s
from sparkdl.feed.store.log import Log
from sparkdl.feed.store.parquet_loader import DirectLoader, ParquetLoader, ShareLoader, Sink
from sparkdl.feed.store.segment import StoredSegment
from sparkdl.feed.store.store import NodeStore, StoreLimits
from sparkdl.feed.transfer.pass_on import RowsPassing
from sparkdl.feed.transfer.server import FlightServer

PROGRESS_PERIOD_S = 0.1
"""Counts go to the coordinator this often at most, and more seldom from many nodes; what it
waits for goes at once."""
_SHUTDOWN_S = 2.0


@dataclass
class _ChildFeeds:
    """What is known of the feeds of one child, by name.

    Attributes:
        consumed: what it has reported last.
        began: the epoch of the last `FeedBegin`.
        marked: the epoch of the last `EpochEnd`.
        answered: what the driver was told last of that which it waits for, see `_awaited`.
        reclaimed: those for which it was asked for room and has not released anything yet.
        direct: those that it has asked to be read from files.
        share_ends: of the last `ReadShare` that has ended: its epoch, and its problem if any.
        passing: the last `PassOn`.
        passed_on: of the last `PassOn` that has ended: its epoch, and its problem if any.
    """

    consumed: dict[str, Consumed] = field(default_factory=dict)
    began: dict[str, int] = field(default_factory=dict)
    marked: dict[str, int] = field(default_factory=dict)
    answered: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reclaimed: set[str] = field(default_factory=set)
    direct: dict[str, DirectLoader] = field(default_factory=dict)
    share_ends: dict[str, tuple[int, str]] = field(default_factory=dict)
    passing: dict[str, PassOn] = field(default_factory=dict)
    passed_on: dict[str, tuple[int, str]] = field(default_factory=dict)


class NodeFeeds:
    """All feeds of one node. Runs on the agent's loop; Flight's threads come in through the store.

    Args:
        send_to_child: takes a message and, for good, a descriptor or -1.
        report: sends counts to the coordinator.
        nodes: how many there are that report.

    Attributes:
        store: what the node has received.
    """

    def __init__(
        self,
        limits: StoreLimits,
        timeout_s: float,
        send_to_child: Callable[[Local, int], None],
        report: Callable[[FeedProgress], None],
        nodes: int = 1,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._send_to_child = send_to_child
        self._report_to_driver = report
        self.store = NodeStore(
            limits, timeout_s, self._on_segment, partial(self._soon, self._reclaim)
        )
        self._memory_nbytes = limits.memory_nbytes
        self._receiver: FlightServer | None = None
        self._token = ""
        self._trust: Trust | None = None
        self._child = _ChildFeeds()
        self._ended: set[str] = set()
        self._generation = 0
        self._loaders: list[ParquetLoader] = []
        self._has_failed = False
        self._progress = Throttle(
            self._loop, self._report_counts, period_s(PROGRESS_PERIOD_S, nodes)
        )

    def listen(self, host: str, token: str, tls: Tls | None = None) -> str:
        """Start receiving; return the Flight URI."""
        self._token, self._trust = token, tls.trust if tls else None
        self._receiver = FlightServer(host, token, self.store, tls)
        return self._receiver.uri

    # From the coordinator.

    def on_driver_message(self, message: ToFeeds) -> None:  # noqa: C901 (one case a message)
        """Handle a message of the coordinator about the feeds."""
        match message:
            case FeedBegin(feed, epoch, last_epoch, run, done, limit):
                self._child.began[feed] = epoch
                self.store.log(feed).expect(last_epoch)
                self._send_to_child(FeedStart(feed, epoch), -1)
                if run:
                    self.store.resume(feed, epoch, run, done, limit)
                    self._progress.call()
            case ReadShare(feed):
                on_end = partial(self._soon, self._note_end)
                self._begin(ShareLoader(message, self._sink(feed), on_end))
            case PassOn(feed, epoch, to=to):
                self._child.passing[feed] = message
                self._send_to_child(Withdraw(feed, epoch, sum(each.rows for each in to)), -1)
            case FeedCut(feed, epoch):
                self.store.log(feed).cut(epoch)
                self._progress.call()
            case FeedCovered(feed, epoch):
                self.store.forget(feed, epoch)
                self._send_to_child(message, -1)
            case FeedHold() | Granted():
                self._send_to_child(message, -1)
            case EpochEnd(feed, epoch):
                self._child.marked[feed] = epoch
                self.store.log(feed).cut(epoch)
                if not message.again:
                    self.store.log(feed).settle(epoch)
                self._send_to_child(message, -1)
            case FeedEnd(feeds):
                for feed in feeds or ("",):  # without names all, also those not used yet
                    self._ended.add(feed)
                    self._send_to_child(EndMark(feed), -1)

    # From the child.

    def on_child_message(self, message: Local, fd: int) -> None:
        """Handle a message of the child about its feeds; `fd` is ours."""
        if isinstance(message, Consumed):
            before = self._child.consumed.get(message.feed)
            self._child.consumed[message.feed] = message
            self.store.log(message.feed)  # creates the log, so that its counts are reported
            # After an epoch the child has forgotten that it was to release.
            if before is None or message.epochs != before.epochs:
                self._child.reclaimed.discard(message.feed)
                self.store.press_again()
            if message.feed in self._child.direct:
                self._child.direct[message.feed].reached(message.epochs)
            self._report(message.feed)
        elif isinstance(message, Release):
            self._child.reclaimed.discard(message.feed)
            self.store.log(message.feed).release(message.numbers)
        elif isinstance(message, Withdrawn):
            log, order = self.store.log(message.feed), self._child.passing[message.feed]
            rows, trust = log.take_back(message.kept), self._trust
            on_end = partial(self._soon, self._note_passed)
            RowsPassing(order, rows, log, self._token, trust, on_end).start()
        elif isinstance(message, Terminated):
            log = self.store.log(message.feed)
            log.close_call()
            self._send_to_child(Reopened(message.feed, log.closed_to + 1), -1)
            self._progress.call()
        elif isinstance(message, ReadParquet):
            self._child.direct[message.feed] = DirectLoader(
                message, self._sink(message.feed), partial(self._soon, self._pass_on)
            )
            self._begin(self._child.direct[message.feed])
        elif isinstance(message, Results):
            self._answer(message, fd)

    # From the agent.

    def coverage(self, feeds: Mapping[str, EpochRows]) -> dict[str, EpochRows]:
        """Return which rows the child has used, by feed, epoch and partition.

        Args:
            feeds: the same by segment.
        """
        found = {}
        for feed, consumed in feeds.items():
            log = self.store.log(feed)
            found[feed] = log.provenance.rows(consumed, log.terminated_to)
        return found

    @property
    def steps(self) -> int:
        """How many batches the child has reported as read, of the feed with the most."""
        return max((read.steps for read in self._child.consumed.values()), default=0)

    def close(self, reason: str, has_failed: bool = False) -> None:
        """Take no more rows.

        Args:
            has_failed: do not report to the coordinator that the feeds are closed, or a feed would
                seem to have ended in order before the failure is known.
        """
        self._has_failed = has_failed
        self._close(reason)
        self._progress.call()

    def reopen(self, generation: int) -> None:
        """Begin anew for another child, and tell it which feeds have ended already."""
        feeds = [log.feed for log in self.store.logs]
        if generation != self._generation:
            self._ended.clear()  # rows may be fed again; the coordinator repeats the ends
        self._generation = generation
        self.store.reopen(generation)
        self._has_failed = False
        self._child = _ChildFeeds()
        self._report_to_driver(FeedProgress(tuple(FeedCount(feed) for feed in feeds)))
        for feed in self._ended:
            self._send_to_child(EndMark(feed), -1)

    def shut_down(self) -> None:
        """Stop receiving; a peer that stalls in the middle of a call is not waited for."""
        self._close("the node has ended")
        self.store.clear()
        deadline = Deadline.after(_SHUTDOWN_S)
        for loader in self._loaders:
            loader.join(deadline.remaining_s)
        self._progress.cancel()
        if self._receiver:
            thread = threading.Thread(target=self._receiver.shutdown, daemon=True)
            thread.start()
            thread.join(_SHUTDOWN_S)

    def _close(self, reason: str) -> None:
        self.store.close(reason)
        for loader in self._loaders:
            loader.stop()

    def _sink(self, feed: str) -> Sink:
        return Sink(self.store.log(feed), self._memory_nbytes)

    def _begin(self, loader: ParquetLoader) -> None:
        self._loaders = [each for each in self._loaders if each.is_alive()]
        self._loaders.append(loader)
        loader.start()

    # From threads of Flight, and those that read files.

    def _on_segment(self, segment: StoredSegment, fd: int) -> None:
        message = Segment(
            segment.feed,
            segment.number,
            segment.epoch,
            segment.rows,
            segment.nbytes,
            segment.exchange,
            segment.is_last,
            segment.is_on_disk,
        )
        self._loop.call_soon_threadsafe(self._pass_segment, message, fd)

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(function, *arguments)

    # On the loop.

    def _pass_segment(self, message: Segment, fd: int) -> None:
        self._send_to_child(message, fd)
        if not message.exchange:
            self._report(message.feed)

    def _note_end(self, loader: ShareLoader, problem: str) -> None:
        order = loader.order
        if loader.sink.log is self.store.log(order.feed):  # no other child has come since
            self._child.share_ends[order.feed] = order.epoch, problem
            self._progress.call()

    def _note_passed(self, order: PassOn, log: Log, problem: str) -> None:
        if log is self.store.log(order.feed):
            self._child.passed_on[order.feed] = order.epoch, problem
            self._progress.call()

    def _pass_on(self, loader: DirectLoader, message: Local) -> None:
        if self._child.direct.get(loader.sink.log.feed) is loader:
            self._send_to_child(message, -1)

    def _reclaim(self, feed: str) -> None:
        """Ask the child to release rows, but not for an epoch that is over.

        The next epoch may be whole: then it is pressed again, and decides anew.
        """
        if self.store.log(feed).is_whole:
            self.store.press_again()
        elif feed not in self._child.reclaimed:
            self._child.reclaimed.add(feed)
            self._send_to_child(Reclaim(feed), -1)

    def _answer(self, message: Results, fd: int) -> None:
        exchange = self.store.exchange(message.exchange)
        if fd < 0:
            if exchange:
                exchange.fail(f"results are lost: {OUT_OF_DESCRIPTORS}")
            return
        try:
            with open(fd, "rb", closefd=False) as file:
                file.seek(0)
                data = file.read()
        finally:
            os.close(fd)
        if exchange:
            exchange.add(data, message.rows)

    def _report(self, feed: str) -> None:
        """Report counts that have changed: at once if the driver waits for them, or else soon."""
        if self._awaited(self._count(self.store.log(feed))) != self._child.answered.get(feed):
            self._progress.call()
        else:
            self._progress.request()

    def _awaited(self, count: FeedCount) -> tuple[int, ...]:
        """Return what the driver waits for: first rows, the end of what it announced, a hold.

        Each of them follows a message of the driver's, so they come no more often than those.
        """
        has_read_all = count.epochs_done > self._child.marked.get(count.feed, sys.maxsize)
        return count.epoch, count.epoch_rows > 0, has_read_all, count.held

    def _report_counts(self) -> None:
        counts = tuple(
            self._count(log) for log in self.store.logs if log.feed not in self._child.direct
        )
        self._child.answered = {count.feed: self._awaited(count) for count in counts}
        if counts:
            self._report_to_driver(FeedProgress(counts))

    def _count(self, log: Log) -> FeedCount:
        read = self._child.consumed.get(log.feed, Consumed(log.feed, 0, 0))
        cut = log.last_cut
        read_to, problem = self._child.share_ends.get(log.feed, (-1, ""))
        passed_on, pass_problem = self._child.passed_on.get(log.feed, (-1, ""))
        epoch = max(cut.epoch + 1, self._child.began.get(log.feed, 0))
        return FeedCount(
            log.feed,
            rows_received=log.rows_received,
            rows_consumed=read.rows,
            rows_padded=read.padded,
            rows_dropped=read.dropped,
            steps=read.steps,
            epochs_done=read.epochs,
            closed=log.is_closed and not self._has_failed,
            closed_to=log.terminated_to,
            began=self._child.began.get(log.feed, -1),
            passed_on=passed_on,
            pass_problem=pass_problem,
            resumed=log.resumed,
            epoch=epoch,
            epoch_rows=log.rows_of(epoch),
            cut=cut.epoch,
            cut_rows=cut.rows,
            cut_whole=cut.is_whole,
            held=read.held,
            reading=read.reading,
            read_to=read_to,
            read_problem=problem,
            beyond=read.beyond,
        )
