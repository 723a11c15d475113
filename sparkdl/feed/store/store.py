"""What one node has received and not yet forgotten: logs, and inference that waits for results.

Runs in: agent
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparkdl.control.rows import PartRows
from sparkdl.core.codes import Code
from sparkdl.core.errors import FeedClosedError
from sparkdl.feed.infer.session import Exchange
from sparkdl.feed.store.budget import Budget, RetainedSegments
from sparkdl.feed.store.log import Log
from sparkdl.feed.store.segment import StoredSegment


@dataclass(frozen=True)
class StoreLimits:
    """How much a node may hold, and where.

    Attributes:
        memory_nbytes: of all feeds together.
        disk_nbytes: of rows that later epochs read again and for which there is no memory.
        folder: on whose disk.
        keeps: retain rows that were read while there is room: another child may want them again.
    """

    memory_nbytes: int
    disk_nbytes: int = 0
    folder: Path | None = None
    keeps: bool = False


class NodeStore:
    """The feeds of one node, by name. A feed is created when it is first named.

    Args:
        on_segment: called with each segment that is added, and with a descriptor of it that is for
            the child; must not block.
        on_pressure: called with the name of a feed that is to release what is read; likewise.

    Attributes:
        budget: how much memory and disk they use, and may use.
    """

    def __init__(
        self,
        limits: StoreLimits,
        timeout_s: float,
        on_segment: Callable[[StoredSegment, int], None],
        on_pressure: Callable[[str], None],
    ) -> None:
        self.timeout_s = timeout_s
        self._on_segment = on_segment
        self._on_pressure = on_pressure
        self._folder = limits.folder
        disk_nbytes = limits.disk_nbytes if limits.folder else 0
        self.budget = Budget(
            limits.memory_nbytes,
            self._press,
            disk_nbytes=disk_nbytes,
            evict=lambda: self._retained.evict(),
        )
        self._retained = RetainedSegments(self.budget)
        self._keeps = limits.keeps
        self._lock = threading.Lock()
        self._logs: dict[str, Log] = {}
        self._exchanges: dict[str, Exchange] = {}
        self._closed = ""
        self._generation = 0

    @property
    def logs(self) -> tuple[Log, ...]:
        """All logs there are."""
        with self._lock:
            return tuple(self._logs.values())

    def log(self, feed: str, generation: int | None = None) -> Log:
        """Return the log of `feed`; it is closed from the start if the node takes no rows.

        Args:
            generation: the world whose rows are to come; a closed log if it is not this one.
        """
        with self._lock:
            if generation not in (None, self._generation):
                return self._new_log(feed, is_closed=True)
            log = self._logs.get(feed)
            if log is None:
                log = self._logs[feed] = self._new_log(feed, bool(self._closed))
            return log

    def resume(self, feed: str, epoch: int, run: str, done: PartRows, limit: int) -> None:
        """Let rows that the previous child was brought come again, as rows of `epoch`.

        Args:
            run: of the job that brought them.
            done: rows that are not to come again.
            limit: how many come again at most.
        """
        self.log(feed).resume(epoch, run, self._retained.pop(feed, run), done, limit)

    def forget(self, feed: str, epoch: int) -> None:
        """A checkpoint covers all rows of the epochs before `epoch`."""
        provenance = self.log(feed).provenance
        self._retained.forget(provenance, epoch)
        provenance.forget(epoch)

    def clear(self) -> None:
        """Free what is retained for another child."""
        self._retained.clear()

    def open_exchange(self, name: str) -> Exchange:
        """Begin an inference partition.

        Raises:
            FeedClosedError: if the node takes no rows.
        """
        exchange = Exchange(name)
        with self._lock:
            if self._closed:
                raise FeedClosedError(self._closed)
            self._exchanges[name] = exchange
        return exchange

    @property
    def is_answering(self) -> bool:
        """Whether an inference partition is being answered."""
        return bool(self._exchanges)

    def exchange(self, name: str) -> Exchange | None:
        """Return the inference partition called `name` while it waits."""
        with self._lock:
            return self._exchanges.get(name)

    def close_exchange(self, name: str) -> None:
        """Forget an inference partition."""
        with self._lock:
            self._exchanges.pop(name, None)

    def close(self, reason: str) -> None:
        """Take no more rows in any feed; end what waits.

        The first reason is reported, unless a later one is that the cluster has failed.
        """
        with self._lock:
            if not self._closed or Code.CLUSTER_FAILED.is_in(reason):
                self._closed = reason
            logs, exchanges = list(self._logs.values()), list(self._exchanges.values())
        for log in logs:
            log.close()
        for exchange in exchanges:
            exchange.fail(reason)

    def reopen(self, generation: int) -> None:
        """Begin anew for another child: empty logs that take the rows of its generation."""
        with self._lock:
            self._logs.clear()
            self._closed = ""
            self._generation = generation
        self._retained.begin_child()

    def press_again(self) -> None:
        """Call `on_pressure` once more if an append waits for room."""
        self.budget.wake()

    def _new_log(self, feed: str, is_closed: bool) -> Log:
        retained = self._retained if self._keeps else None
        return Log(feed, self.budget, self._on_segment, is_closed, self._folder, retained)

    def _press(self) -> None:
        for log in self.logs:
            if log.press():
                self._on_pressure(log.feed)
