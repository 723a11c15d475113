"""A node's feeds at its agent: rows from Flight go to the child, counts to the coordinator.

Runs in: agent
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from sparkdl.control.channel import (
    Consumed,
    EndMark,
    EpochMark,
    Local,
    Reclaim,
    Release,
    Results,
    Segment,
    Terminated,
)
from sparkdl.control.messages import EpochEnd, FeedCount, FeedEnd, FeedProgress
from sparkdl.feed.inbox import Inbox, InboxListener
from sparkdl.feed.receiver import Receiver
from sparkdl.feed.segment import StoredSegment

PROGRESS_PERIOD_S = 0.1
"""Counts go to the coordinator this often while they change."""
_SHUTDOWN_S = 2.0


@dataclass(frozen=True)
class _Read:
    rows: int = 0
    epochs: int = 0


class NodeFeeds:
    """All feeds of one node. Runs on the agent's loop; Flight's threads come in by the inbox.

    Args:
        send_to_child: takes a message and, for good, a descriptor or -1.
        tell: sends counts to the coordinator.
    """

    def __init__(
        self,
        inbox_limit_nbytes: int,
        timeout_s: float,
        send_to_child: Callable[[Local, int], None],
        tell: Callable[[FeedProgress], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._send_to_child = send_to_child
        self._tell = tell
        listener = InboxListener(self._on_segment, self._on_received, self._on_pressure)
        self._inbox = Inbox(inbox_limit_nbytes, timeout_s, listener)
        self._receiver: Receiver | None = None
        self._read: dict[str, _Read] = {}
        self._reclaimed: set[str] = set()
        self._ended: set[str] = set()
        self._has_failed = False
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, host: str, token: str) -> str:
        """Start receiving; return the Flight URI."""
        self._receiver = Receiver(host, token, self._inbox)
        return self._receiver.uri

    # From the coordinator.

    def epoch_end(self, message: EpochEnd) -> None:
        """Tell the child that an epoch is complete."""
        self._inbox.log(message.feed).forget_sources(message.epoch)
        self._send_to_child(EpochMark(message.feed, message.epoch, message.rows), -1)

    def feed_end(self, message: FeedEnd) -> None:
        """Tell the child that feeds have ended; no names: all, those that nobody used yet too."""
        for feed in message.feeds or ("",):
            self._ended.add(feed)
            self._send_to_child(EndMark(feed), -1)

    # From the child.

    def on_child_message(self, message: Local, fd: int) -> None:
        """Take what the child says of its feeds; `fd` is ours."""
        if isinstance(message, Consumed):
            before = self._read.get(message.feed, _Read())
            self._read[message.feed] = _Read(message.rows, message.epochs)
            if message.epochs != before.epochs:  # the child has forgotten that it was to release
                self._reclaimed.discard(message.feed)
                self._inbox.press_again()
            self._report_soon()
        elif isinstance(message, Release):
            self._reclaimed.discard(message.feed)
            self._inbox.log(message.feed).release(message.number)
        elif isinstance(message, Terminated):
            self._inbox.log(message.feed).close()
            self._report_soon()
        elif isinstance(message, Results):
            self._answer(message, fd)

    # From the agent.

    def close(self, reason: str, has_failed: bool = False) -> None:
        """Take no more rows.

        Args:
            has_failed: the coordinator is not told that the feeds are closed then, or a feed
                would seem to have ended in order before the failure is known.
        """
        self._has_failed = has_failed
        self._inbox.close(reason)
        self._report()

    def reopen(self, generation: int) -> None:
        """Begin anew for another child, which is told of the feeds that have ended already."""
        feeds = [log.feed for log in self._inbox.logs]
        self._inbox.reopen(generation)
        self._has_failed = False
        self._read.clear()
        self._reclaimed.clear()
        self._tell(FeedProgress(tuple(FeedCount(feed, 0, 0, 0, False) for feed in feeds)))
        for feed in self._ended:
            self._send_to_child(EndMark(feed), -1)

    def shut_down(self) -> None:
        """Stop receiving; a peer that stalls in the middle of a call is not waited for."""
        self._inbox.close("the node has ended")
        if self._timer:
            self._timer.cancel()
        if self._receiver:
            thread = threading.Thread(target=self._receiver.shutdown, daemon=True)
            thread.start()
            thread.join(_SHUTDOWN_S)

    # From Flight's threads.

    def _on_segment(self, segment: StoredSegment) -> None:
        message = Segment(
            segment.feed,
            segment.number,
            segment.epoch,
            segment.rows,
            segment.nbytes,
            segment.exchange,
            segment.is_last,
        )
        self._loop.call_soon_threadsafe(self._send_to_child, message, os.dup(segment.fd))

    def _on_received(self, feed: str) -> None:
        self._loop.call_soon_threadsafe(self._report_soon)

    def _on_pressure(self, feed: str) -> None:
        self._loop.call_soon_threadsafe(self._reclaim, feed)

    # On the loop.

    def _reclaim(self, feed: str) -> None:
        if feed not in self._reclaimed:
            self._reclaimed.add(feed)
            self._send_to_child(Reclaim(feed), -1)

    def _answer(self, message: Results, fd: int) -> None:
        try:
            with open(fd, "rb", closefd=False) as file:
                file.seek(0)
                data = file.read()
        finally:
            os.close(fd)
        exchange = self._inbox.exchange(message.exchange)
        if exchange:
            exchange.add(data, message.rows)

    def _report_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(PROGRESS_PERIOD_S, self._report)

    def _report(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        counts = []
        for log in self._inbox.logs:
            read = self._read.get(log.feed, _Read())
            closed = log.is_closed and not self._has_failed
            counts.append(FeedCount(log.feed, log.rows_received, read.rows, read.epochs, closed))
        if counts:
            self._tell(FeedProgress(tuple(counts)))
