"""What one node has received and not yet forgotten: logs, and inference that waits for results.

Runs in: agent
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkdl.control.rows import PartRows
from sparkdl.core.codes import Code
from sparkdl.core.errors import FeedClosedError, InferenceError
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


class Exchange:
    """One inference partition at the node that answers it.

    The Flight thread that received the partition waits in `results`; the agent's loop adds what
    the child sends back.

    Args:
        clock: the monotonic clock; tests hand in their own.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._clock = clock
        self._changed = threading.Condition()
        self._ready: deque[tuple[bytes, int]] = deque()
        self._rows_in = 0
        self._rows_out = 0
        self._moved_s = clock()
        self._all_rows_in = False
        self._failure = ""

    @property
    def failure(self) -> str:
        """Why not every row gets its result, or empty."""
        return self._failure

    def expect(self, rows: int) -> None:
        """Count rows that were handed to the child."""
        with self._changed:
            if not self._is_owed:
                self._moved_s = self._clock()
                self._changed.notify_all()
            self._rows_in += rows

    def finish_input(self) -> None:
        """All rows of the partition have been handed over."""
        with self._changed:
            self._all_rows_in = True
            self._changed.notify_all()

    def add(self, data: bytes, rows: int) -> None:
        """Take results: an Arrow IPC stream of `rows` encoded rows."""
        with self._changed:
            self._rows_out += rows
            self._moved_s = self._clock()
            if self._rows_out > self._rows_in:
                self._failure = (
                    f"{Code.WRONG_ANSWER} map_fun gave {self._rows_out} results for "
                    f"{self._rows_in} rows of inference partition {self.name}; batch_results "
                    "needs exactly one result per row"
                )
            self._ready.append((data, rows))
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """End the wait with an error, unless all results are there."""
        with self._changed:
            if not (self._all_rows_in and self._rows_out == self._rows_in):
                self._failure = self._failure or reason
            self._changed.notify_all()

    def results(self, timeout_s: float) -> Iterator[bytes]:
        """Yield results as they come, until each row has one.

        Args:
            timeout_s: how long rows that are here may wait for a result. The time until Spark
                brings more rows does not count.

        Raises:
            InferenceError: if there are too many, or none came for `timeout_s`, or the child ended.
        """
        given = 0
        while True:
            with self._changed:
                while not self._ready and not self._failure:
                    if self._all_rows_in and given == self._rows_in:
                        return
                    self._wait(timeout_s)
                if self._failure:
                    raise InferenceError(self._failure)
                data, rows = self._ready.popleft()
                given += rows
            yield data

    @property
    def _is_owed(self) -> bool:
        return self._rows_out < self._rows_in

    def _wait(self, timeout_s: float) -> None:
        if not self._is_owed:
            self._changed.wait()
            return
        left_s = self._moved_s + timeout_s - self._clock()
        if left_s > 0:
            self._changed.wait(left_s)
            return
        self._failure = (
            f"{Code.WRONG_ANSWER} no result came for {timeout_s:g} s; {self._rows_out} of "
            f"{self._rows_in} rows of inference partition {self.name} were answered. map_fun must "
            "give batch_results exactly one result per row; if it only needs longer, raise the "
            "timeout (feed_timeout)"
        )
