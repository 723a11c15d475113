"""The store of one node's feeds: spools, logs, and inference that waits for results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkdl.control.messages import SpooledRange
from sparkdl.core.errors import FeedClosedError
from sparkdl.core.failure import Code
from sparkdl.feed.store.buffer import Budget
from sparkdl.feed.store.log import Log
from sparkdl.feed.store.segment import StoredSegment
from sparkdl.feed.store.session import Exchange
from sparkdl.feed.store.spool import Spool


@dataclass(frozen=True)
class StoreLimits:
    memory_nbytes: int
    disk_nbytes: int = 0
    folder: Path | None = None
    keeps: bool = False


class NodeStore:
    """The feeds of one node, by name. A feed is created when it is first named.

    Any thread may call it. All that it holds is guarded by one lock, `Budget.lock`, so the
    listeners are called with it held: they must not block.

    Args:
        on_segment: called with each segment added to a log, and a descriptor of it for the child.
        on_spooled: called with the feed, the epoch and the rows of each segment that is spooled;
            with none if a segment waits for room in the spool.
        on_pressure: called with the name of a feed that must release the rows it has read.
    """

    def __init__(
        self,
        limits: StoreLimits,
        timeout_s: float,
        on_segment: Callable[[StoredSegment, int], None],
        on_spooled: Callable[[str, int, list[SpooledRange]], None],
        on_pressure: Callable[[str], None],
    ) -> None:
        self.timeout_s = timeout_s
        self._on_segment = on_segment
        self._on_spooled = on_spooled
        self._on_pressure = on_pressure
        self.budget = Budget(
            limits.memory_nbytes, self._press, disk_nbytes=limits.disk_nbytes, folder=limits.folder
        )
        self._keeps = limits.keeps
        self._logs: dict[str, Log] = {}
        self._spools: dict[str, Spool] = {}
        self._exchanges: dict[str, Exchange] = {}
        self._closed = ""
        self._has_shut_down = False
        self.generation = 0

    @property
    def logs(self) -> tuple[Log, ...]:
        with self.budget.lock:
            return tuple(self._logs.values())

    def log(self, feed: str) -> Log:
        """Return the log of `feed`; it is closed from the start if the child takes no rows."""
        with self.budget.lock:
            log = self._logs.get(feed)
            if log is None:
                log = self._logs[feed] = Log(
                    feed, self.budget, self._on_segment, bool(self._closed), self._keeps
                )
            return log

    def spool(self, feed: str, generation: int | None = None) -> Spool:
        """Return the spool of `feed`, for other nodes too; a closed one for another generation."""
        with self.budget.lock:
            spool = self._spools.get(feed)
            is_current = generation in (None, self.generation) and not self._has_shut_down
            if spool is None or not is_current:
                log = self.log(feed)
                # Rows go to disk only for an epoch that can still be read again as a whole.
                spool = Spool(feed, self.budget, self._on_spooled, lambda: log.is_whole)
                if is_current:
                    self._spools[feed] = spool
                else:
                    spool.close()
            return spool

    def assign(self, feed: str, number: int, skip: int, rows: int) -> None:
        """Move rows of the own spool to the log, without copying them or waiting for room."""
        with self.budget.lock:
            # Under one lock, so that `close` never finds the rows between spool and log.
            self.log(feed).enter(self.spool(feed).take(number, skip, rows))

    def recall(self, feed: str, epoch: int, run: str) -> Sequence[SpooledRange]:
        """Spool retained rows again that a job has brought; return what there is."""
        with self.budget.lock:
            found = self.budget.pop_retained(lambda each, _: (each.feed, each.run) == (feed, run))
            return self.spool(feed).recall(epoch, found)

    def open_exchange(self, name: str) -> Exchange:
        exchange = Exchange(name)
        with self.budget.lock:
            if self._closed:
                raise FeedClosedError(self._closed)
            self._exchanges[name] = exchange
        return exchange

    @property
    def is_answering(self) -> bool:
        return bool(self._exchanges)

    def exchange(self, name: str) -> Exchange | None:
        with self.budget.lock:
            return self._exchanges.get(name)

    def close_exchange(self, name: str) -> None:
        with self.budget.lock:
            self._exchanges.pop(name, None)

    def close(self, reason: str) -> None:
        """Take no more rows for the child in any feed; end what waits. Spools go on.

        The first reason is reported, unless a later one is that the cluster has failed.
        """
        with self.budget.lock:
            if not self._closed or Code.CLUSTER_FAILED.is_in(reason):
                self._closed = reason
            exchanges = list(self._exchanges.values())
            for log in self._logs.values():
                log.close()
        # After the budget's lock: an exchange has its own, and no thread may hold two.
        for exchange in exchanges:
            exchange.fail(reason)

    def reopen(self, generation: int) -> None:
        """Start over for another child: empty logs and spools for the rows of its generation."""
        with self.budget.lock:
            for log in self._logs.values():
                log.close()
            self._close_spools()
            self._logs.clear()
            self._closed = ""
            self.generation = generation

    def shut_down(self, reason: str) -> None:
        """Take no more rows at all, and free the rows here."""
        self.close(reason)
        with self.budget.lock:
            self._has_shut_down = True
            self._close_spools()
            self.budget.free_retained(lambda *_: True)

    def _close_spools(self) -> None:
        for feed, spool in self._spools.items():
            for segment in spool.close():
                self.log(feed).retain(segment)
        self._spools.clear()

    def _press(self) -> None:
        for log in self.logs:
            if log.press():
                self._on_pressure(log.feed)
