"""A node's feeds at its agent: rows from Flight go to the child, counts to the coordinator."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec import convert, structs

from sparkdl.control import channel, messages as msg
from sparkdl.control.descriptors import OUT_OF_DESCRIPTORS
from sparkdl.control.rows import EpochRows, FeedCount
from sparkdl.control.tls import Tls
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedClosedError
from sparkdl.core.failure import FailureKind
from sparkdl.core.throttle import LOTS_PER_S, Throttle, period_s
from sparkdl.feed.store.log import Log
from sparkdl.feed.store.segment import StoredSegment
from sparkdl.feed.store.spool import ShareLoader
from sparkdl.feed.store.store import NodeStore, StoreLimits
from sparkdl.feed.transfer.fetch import Fetch, Fetcher, NodeDirectory
from sparkdl.feed.transfer.server import FlightServer

PROGRESS_PERIOD_S = 0.1
"""Counts go to the coordinator this often at most, less often from many nodes; counts that it
waits for go at once."""
ASSIGN_PERIOD_S = 0.02
"""Likewise, for reports by which the driver assigns rows: spooled rows, and waiting readers."""
_SHUTDOWN_S = 2.0
"""How long the end waits for reading and fetching threads, all daemons, and again for Flight."""


@dataclass
class NodeFeed:
    """One feed, of one child.

    Attributes:
        last_epoch_end: the epoch of the last `EpochEnd`; `None` before, when no end is awaited.
        answered: the last report of the values that the driver waits for, see `awaited`.
        is_waiting: user code waits for a row, and has been sent all that there are.
        is_wait_reported: the driver knows of it.
        is_reclaimed: the child was asked for room and has not released anything yet.
        ranges: rows that were spooled and not reported yet, by epoch.
        full: the last epoch with a segment that has waited for room in the spool.
        fetcher: fetches rows from other agents, once some were assigned.
        requested: how many ranges of rows of other agents were assigned in all.
        fetched: how many of them are here.
        lacks_rows: some rows are not where they should be: no mark goes past them.
        pending: the actions to perform once so many have arrived, in order.
    """

    log: Log
    consumed: channel.Consumed
    began: int = -1
    last_epoch_end: int | None = None
    answered: tuple[int, ...] = ()
    is_waiting: bool = False
    is_wait_reported: bool = False
    is_reclaimed: bool = False
    ranges: dict[int, list[msg.SpooledRange]] = field(default_factory=dict)
    full: int = -1
    fetcher: Fetcher | None = None
    requested: int = 0
    fetched: int = 0
    lacks_rows: bool = False
    problem: str = ""
    pending: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)

    def run_ready(self) -> None:
        # In order, so an action without a fetch of its own still waits for those before it.
        while not self.lacks_rows and self.pending and self.pending[0][0] <= self.fetched:
            self.pending.popleft()[1]()

    def stop(self) -> None:
        self.pending.clear()
        if self.fetcher is not None:
            self.fetcher.stop()

    def count(self, has_failed: bool) -> FeedCount:
        """Return the counts for the driver; closed after a failure, it would seem in order."""
        log = self.log
        count = FeedCount(
            log.feed,
            log.rows_received,
            self.consumed.given,
            self.is_waiting,
            self.began,
            cut=log.last_cut,
            closed=log.is_closed and not has_failed,
            closed_to=log.terminated_to,
            problem=self.problem,
        )
        return structs.replace(count, epoch_rows=log.rows_of(count.epoch))

    def awaited(self, count: FeedCount) -> tuple[int, ...]:
        """Return the values the driver waits for: first rows, the last epoch's end.

        Each change answers a message of the driver, so changes are as rare as those messages.
        """
        is_over = self.last_epoch_end is not None and count.given.epochs > self.last_epoch_end
        return count.epoch, count.epoch_rows > 0, is_over


class NodeFeeds:
    """All feeds of one node. Runs on the agent's loop; Flight's threads come in through the store.

    Args:
        directory: this node among the nodes that report and hold rows.
        send_to_child: takes a message and, for good, a descriptor or -1.
        report: sends counts, and the rows spooled, to the coordinator.
        fail: called, once for a child, if rows that the driver has assigned cannot come; their
            agent is silent where it is `unreachable`.
    """

    def __init__(
        self,
        directory: NodeDirectory,
        limits: StoreLimits,
        timeout_s: float,
        send_to_child: Callable[[channel.Local, int], None],
        report: Callable[[msg.FeedProgress | msg.Spooled], None],
        fail: Callable[[FailureKind, str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._directory = directory
        self._send_to_child = send_to_child
        self._report_to_driver = report
        self._fail = fail
        self.store = NodeStore(
            limits,
            timeout_s,
            self._on_segment,
            self._on_spooled,
            partial(self._soon, self._reclaim),
        )
        self._memory_nbytes = limits.memory_nbytes
        self._receiver: FlightServer | None = None
        self._feeds: dict[str, NodeFeed] = {}
        self._ended: set[str] = set()
        self._loaders: list[ShareLoader] = []
        self._fetchers: list[Fetcher] = []
        self._has_failed = self._lacks_rows = False
        self._own_steps = 0
        nodes = len(directory.names)
        self._progress = Throttle(
            self._loop, self._report_counts, period_s(PROGRESS_PERIOD_S, nodes)
        )
        needs_s = period_s(ASSIGN_PERIOD_S, nodes, LOTS_PER_S)
        self._needs = Throttle(self._loop, self._report_needs, needs_s)

    def listen(self, host: str, tls: Tls | None = None, files: Path = Path("/dev/null")) -> str:
        on_lacking = partial(self._soon, self._note_lacking)
        token = self._directory.spec.token
        self._receiver = FlightServer(host, token, self.store, tls, on_lacking, files)
        return self._receiver.uri

    def _feed(self, name: str) -> NodeFeed:
        if name not in self._feeds:
            self._feeds[name] = NodeFeed(self.store.log(name), channel.Consumed(name))
        return self._feeds[name]

    # From the coordinator.

    def on_driver_message(self, message: msg.ToFeeds) -> None:
        """Handle a message of the coordinator about the feeds.

        All messages except `Assign` are handled in order: behind marks that wait for assigned rows.
        """
        match message:
            case msg.Assign(feed):
                self._assign(self._feed(feed), message)
            case msg.FeedCovered(feed, epoch):
                self.store.log(feed).forget(epoch)
                self._send_to_child(message, -1)
            case msg.Granted():
                self._send_to_child(message, -1)
            case msg.FeedEnd(feeds):
                self._ended.update(feeds or ("",))
                for feed in feeds:
                    self._after_fetches(
                        feed, partial(self._send_to_child, channel.EndMark(feed), -1)
                    )
                if not feeds:
                    self._loop.call_soon(self._end_all, self.store.generation)
            # A call that ends early does not wait for fetches: the nodes count what they have.
            case msg.FeedCut(feed, epoch, is_short=True):
                self.store.spool(feed).refuse(epoch)
                self._loop.call_soon(self._in_order, message)
            case msg.FeedCut(feed, epoch) | msg.EpochEnd(feed, epoch):
                # Feeders are refused at once, however long the count has to wait for fetches.
                self.store.spool(feed).refuse(epoch)
                self._after_fetches(feed, partial(self._in_order, message))
            case msg.FeedBegin(feed) | msg.ReadShare(feed):
                self._after_fetches(feed, partial(self._in_order, message), is_mark=False)

    def _after_fetches(self, name: str, action: Callable[[], None], is_mark: bool = True) -> None:
        """Run `action` after those queued behind fetches, and if it is a mark, after all fetches.

        Even without fetches the action runs in a later turn of the loop: segments of the own spool
        reach the child by the loop as well, and must come first.
        """
        feed = self._feed(name)
        feed.pending.append((feed.requested if is_mark else 0, action))
        self._loop.call_soon(feed.run_ready)

    def _in_order(
        self, message: msg.FeedBegin | msg.ReadShare | msg.FeedCut | msg.EpochEnd
    ) -> None:
        feed = self._feed(message.feed)
        log = feed.log
        match message:
            case msg.FeedBegin(name, epoch, last_epoch, run, retain):
                self._send_to_child(message, -1)
                if run and (ranges := self.store.recall(name, epoch, run)):
                    feed.ranges.setdefault(epoch, []).extend(ranges)
                    self._needs.call()  # before it is reported that the epoch has begun
                log.expect(last_epoch)
                log.retain_read(retain)
                feed.began, feed.problem = epoch, ""
                if run:
                    self._progress.call()
            case msg.ReadShare(name):
                on_problem = partial(self._soon, self._note_problem, feed)
                spool = self.store.spool(name)
                loader = ShareLoader(message, spool, self._memory_nbytes, on_problem)
                self._loaders = [each for each in self._loaders if each.is_alive()]
                self._loaders.append(loader)
                loader.start()
            case msg.FeedCut(epoch=epoch):
                log.cut(epoch)
                self._progress.call()
            case msg.EpochEnd(epoch=epoch):
                feed.last_epoch_end, feed.is_waiting = epoch, False
                log.cut(epoch)
                if not message.again:
                    log.settle(epoch)
                self._send_to_child(message, -1)

    def _end_all(self, generation: int) -> None:
        """End all feeds, also those not used yet, once no rows are fetched any more."""
        for name, feed in self._feeds.items():
            if feed.pending or feed.lacks_rows or feed.fetched < feed.requested:
                self._after_fetches(name, partial(self._end_all, generation))
                return
        if generation == self.store.generation:
            # Feeds may have waited for fetches, and another child may run by now.
            self._send_to_child(channel.EndMark(""), -1)

    def _assign(self, feed: NodeFeed, order: msg.Assign) -> None:
        """Pass rows of the own spool to the child; have those of others fetched."""
        name, fetches = order.feed, list[Fetch]()
        try:
            for each in order.ranges:
                if each.holder == self._directory.node_id and not order.in_order:
                    self.store.assign(name, each.number, each.skip, each.rows)
                else:
                    fetches.append((each, order))
        except (FeedClosedError, OSError) as error:
            feed.lacks_rows = True
            self._note_lacking(self.store.generation, "exception", str(error))
        for piece in order.unwanted:
            self.store.spool(name).free(piece.number, piece.skip, piece.rows)
        if fetches:
            self._fetch(feed, fetches)

    def _fetch(self, feed: NodeFeed, fetches: list[Fetch]) -> None:
        feed.requested += len(fetches)
        if feed.fetcher is None:
            assert self._receiver is not None
            feed.fetcher = Fetcher(
                self._directory,
                self._receiver.fd_receiver,
                feed.log,
                self.store.spool(feed.log.feed),
                self.store.generation,
                self._memory_nbytes,
                partial(self._soon, self._on_fetched, feed),
                partial(self._soon, self._note_lacking, self.store.generation),
            )
            # `shut_down` joins these threads; the ended ones need not be remembered.
            self._fetchers = [each for each in self._fetchers if each.is_alive()]
            self._fetchers.append(feed.fetcher)
            feed.fetcher.start()
        feed.fetcher.add(fetches)

    # From the child.

    def on_child_message(self, message: channel.Local, fd: int) -> None:
        """Handle a message of the child about its feeds; `fd` is ours."""
        if isinstance(message, channel.Consumed) and message.is_own:
            self._own_steps = max(self._own_steps, message.given.steps)
        elif isinstance(message, channel.Consumed):
            feed = self._feed(message.feed)
            # After an epoch the child has forgotten that it was to release.
            if feed.consumed.given.epochs != message.given.epochs:
                feed.is_reclaimed = False
                self.store.budget.wake()  # what waits for room presses again
            # Each report with `is_waiting` is about another wait, and the driver has to hear of it.
            feed.consumed, feed.is_waiting = message, message.is_waiting
            feed.is_wait_reported = False
            self._report(feed)
        elif isinstance(message, channel.Release):
            feed = self._feed(message.feed)
            feed.is_reclaimed = False
            feed.log.release(message.numbers)
        elif isinstance(message, channel.Terminated):
            log = self._feed(message.feed).log
            # The log first: `terminated_to`, by which the spool refuses rows, is set there.
            log.close_call()
            self.store.spool(message.feed).refuse(log.terminated_to)
            self._send_to_child(channel.Reopened(message.feed, log.closed_to + 1), -1)
            self._progress.call()
        elif isinstance(message, channel.Results):
            self._answer(message, fd)

    # From the agent.

    def coverage(self, feeds: Mapping[str, EpochRows]) -> dict[str, EpochRows]:
        return {feed: self.store.log(feed).coverage(consumed) for feed, consumed in feeds.items()}

    @property
    def steps(self) -> int:
        fed = (feed.consumed.given.steps for feed in self._feeds.values())
        return max((self._own_steps, *fed))

    def close(self, reason: str, has_failed: bool = False) -> None:
        """Take no more rows; the driver is not told before it knows of a failure."""
        self._has_failed = has_failed
        self.store.close(reason)
        if has_failed:  # unfetched rows stay at their holders, for the next child
            for feed in self._feeds.values():
                feed.stop()
        self._progress.call()

    def reopen(self, generation: int) -> None:
        """Start over for another child, and send it the feeds that have ended already."""
        if generation != self.store.generation:
            self._ended.clear()  # rows may be fed again; the coordinator repeats the ends
        self.store.reopen(generation)
        self._has_failed = self._lacks_rows = False
        for feed in self._feeds.values():
            feed.stop()
        # Zeros for each feed, or a late report of the former child would count as the new one's.
        counts = tuple(FeedCount(feed) for feed in self._feeds)
        self._report_to_driver(msg.FeedProgress(generation, counts))
        self._feeds.clear()
        self._own_steps = 0
        for name in self._ended:
            self._send_to_child(channel.EndMark(name), -1)

    def shut_down(self) -> None:
        """Stop receiving; a peer that stalls in the middle of a call is not waited for."""
        reason = "the node has ended"
        # All that the threads wait for is closed before they are joined.
        self.store.close(reason)
        self.store.shut_down(reason)
        for feed in self._feeds.values():
            feed.stop()
        deadline = Deadline.after(_SHUTDOWN_S)
        for thread in (*self._loaders, *self._fetchers):
            thread.join(deadline.remaining_s)
        self._progress.cancel()
        self._needs.cancel()
        if self._receiver:
            # Flight waits for its calls without a limit, so it may be left behind.
            stopping = threading.Thread(target=self._receiver.shutdown, daemon=True)
            stopping.start()
            stopping.join(_SHUTDOWN_S)

    # Called on threads of Flight, and on the threads that fetch rows or read files.

    def _on_segment(self, segment: StoredSegment, fd: int) -> None:
        message = convert(segment, channel.Segment, from_attributes=True)
        self._soon(self._pass_segment, message, fd)

    def _on_spooled(self, feed: str, epoch: int, ranges: list[msg.SpooledRange]) -> None:
        self._soon(self._note_spooled, self.store.generation, feed, epoch, ranges)

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, and no caller waits
            self._loop.call_soon_threadsafe(function, *arguments)

    # On the loop.

    def _pass_segment(self, message: channel.Segment, fd: int) -> None:
        self._send_to_child(message, fd)
        if not message.exchange:
            feed = self._feed(message.feed)
            feed.is_waiting = False
            self._report(feed)

    def _note_spooled(
        self, generation: int, name: str, epoch: int, ranges: list[msg.SpooledRange]
    ) -> None:
        feed = self._feed(name)
        # Threads of Flight may be late with rows of a spool that is closed by now.
        if generation != self.store.generation or not (ranges or epoch > feed.full):
            return
        if not ranges:
            feed.full = epoch
        feed.ranges.setdefault(epoch, []).extend(ranges)
        self._needs.request()

    def _on_fetched(self, feed: NodeFeed, fetches: int) -> None:
        feed.fetched += fetches
        feed.run_ready()

    def _note_problem(self, feed: NodeFeed, problem: str) -> None:
        """Report why files cannot be read: the driver ends the call."""
        own_name = self._directory.names[self._directory.node_id]
        feed.problem = feed.problem or f"{own_name} {problem}"
        self._progress.call()

    def _note_lacking(self, generation: int, kind: FailureKind, what: str) -> None:
        """Fail: the driver begins another generation, to which it has lost rows fed again.

        Rows are not where they should be, or another agent does not give them.
        """
        if generation == self.store.generation and not self._lacks_rows:
            self._lacks_rows = True
            self._fail(kind, what)

    def _reclaim(self, name: str) -> None:
        """Ask the child to release rows, but not for an epoch that is over.

        The next epoch may be whole: then the feed is pressed again, and decides again.
        """
        feed = self._feed(name)
        if feed.log.is_whole:
            self.store.budget.wake()  # what waits for room presses again
        elif not feed.is_reclaimed:
            feed.is_reclaimed = True
            self._send_to_child(channel.Reclaim(name), -1)

    def _answer(self, message: channel.Results, fd: int) -> None:
        exchange = self.store.exchange(message.exchange)
        # The kernel delivers a message without its descriptor when this process has none left.
        if fd < 0:
            if exchange:
                exchange.fail(f"results are lost: {OUT_OF_DESCRIPTORS}")
            return
        try:
            with open(fd, "rb", closefd=False) as file:
                # A descriptor that was passed on shares its position with the sender's.
                file.seek(0)
                data = file.read()
        finally:
            os.close(fd)
        if exchange:
            exchange.add(data, message.rows)

    def _report(self, feed: NodeFeed) -> None:
        """Report counts that have changed: at once if the driver waits for them, or else soon."""
        # The driver waits for these counts in a step of its own: no throttle holds them back.
        if feed.awaited(feed.count(self._has_failed)) != feed.answered:
            self._progress.call()
            return
        self._progress.request()
        if feed.is_waiting:
            self._needs.request()

    def _report_needs(self) -> None:
        for name, feed in self._feeds.items():
            ranges, feed.ranges = feed.ranges, {}
            for epoch, found in ranges.items():
                of = (self.store.generation, name, epoch)
                is_full = epoch <= feed.full
                self._report_to_driver(msg.Spooled(*of, tuple(found), self._memory_nbytes, is_full))
        # Rows cannot be assigned to a waiting node before the driver knows that it waits.
        if any(feed.is_waiting and not feed.is_wait_reported for feed in self._feeds.values()):
            self._progress.call()

    def _report_counts(self) -> None:
        counts = tuple(feed.count(self._has_failed) for feed in self._feeds.values())
        for feed, count in zip(self._feeds.values(), counts, strict=True):
            feed.answered, feed.is_wait_reported = feed.awaited(count), feed.is_waiting
        if counts:
            self._report_to_driver(msg.FeedProgress(self.store.generation, counts))
