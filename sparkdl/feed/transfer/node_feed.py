"""An agent's state of one feed, for one child."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from sparkdl.control.channel import Consumed
from sparkdl.control.counts import FeedCount
from sparkdl.control.messages import Lot
from sparkdl.feed.store.loader import DirectLoader
from sparkdl.feed.store.log import Log
from sparkdl.feed.transfer.fetch import Fetcher


@dataclass
class NodeFeed:
    """One feed, of one child.

    Attributes:
        consumed: what the child has reported last.
        began: the epoch of the last `FeedBegin`.
        marked: the epoch of the last `EpochEnd`.
        answered: the last report of the values that the driver waits for, see `awaited`.
        waits: user code waits for a row, and has been sent all that there are.
        has_told_wait: the driver knows of it.
        is_reclaimed: the child was asked for room and has not released anything yet.
        direct: reads files that the child has asked for.
        lots: rows that were spooled and not reported yet, by epoch.
        full: the last epoch with a segment that has waited for room in the spool.
        fetcher: fetches rows from other agents, once some were assigned.
        ordered: how many grants of rows of other agents there were in all.
        arrived: how many of them are here.
        problem: why others cannot come.
        behind: the actions to perform once so many have arrived, in order.
    """

    log: Log
    consumed: Consumed
    began: int = -1
    # Before the first `EpochEnd` no end of an epoch is awaited: none is beyond this number.
    marked: int = sys.maxsize
    answered: tuple[int, ...] = ()
    waits: bool = False
    has_told_wait: bool = False
    is_reclaimed: bool = False
    direct: DirectLoader | None = None
    lots: dict[int, list[Lot]] = field(default_factory=dict)
    full: int = -1
    fetcher: Fetcher | None = None
    ordered: int = 0
    arrived: int = 0
    problem: str = ""
    behind: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)

    def go_on(self) -> None:
        """Perform the actions that no fetch holds back any more."""
        # In order, so an action without a fetch of its own still waits for those before it.
        while self.behind and self.behind[0][0] <= self.arrived:
            self.behind.popleft()[1]()

    def stop(self) -> None:
        """Fetch nothing more, and drop the waiting actions."""
        self.behind.clear()
        if self.fetcher is not None:
            self.fetcher.stop()

    def count(self, has_failed: bool) -> FeedCount:
        """Return the counts that the driver receives.

        Args:
            has_failed: do not report that it is closed, or it would seem to have ended in order.
        """
        log = self.log
        count = FeedCount(
            log.feed,
            log.rows_received,
            self.consumed.given,
            self.waits,
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
        return count.epoch, count.epoch_rows > 0, count.given.epochs > self.marked
