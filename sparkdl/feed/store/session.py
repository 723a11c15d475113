"""A session: a task sends rows to a node that answers them in order, and both count.

Runs in: feeder, agent

Answers do not name their rows: they are counted off against the rows sent. By a `Session`, a task
and a node know how many answers are owed, since when, and whether all are answered. `map_fun`
chooses how many rows it reads before it answers, so a limit of unanswered rows could wait for ever:
the node's feed memory is the limit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sparkdl.core.errors import InferenceError
from sparkdl.core.failure import Code


@dataclass
class Session:
    """One end's count of a session, in rows. Pure.

    Attributes:
        is_through: nothing more will be sent.
        moved_s: when the last answer came, or when rows were sent while no answer was owed.
    """

    sent: int = 0
    answered: int = 0
    is_through: bool = False
    moved_s: float = 0.0

    @property
    def owed(self) -> int:
        """How many answers are missing; negative if there were too many."""
        return self.sent - self.answered

    @property
    def is_over(self) -> bool:
        return self.is_through and not self.owed

    def send(self, count: int, now_s: float = 0.0) -> None:
        """Count rows as sent; the time before, in which no answer was owed, does not count."""
        if self.owed <= 0:
            self.moved_s = now_s
        self.sent += count

    def answer(self, count: int, now_s: float = 0.0) -> None:
        self.answered += count
        self.moved_s = now_s

    def owed_s(self, now_s: float) -> float:
        return now_s - self.moved_s if self.owed > 0 else 0.0


class Exchange:
    """The session of one inference partition, at the node that answers it.

    The Flight thread of the partition waits in `results`; the agent's loop adds the child's.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._clock = clock
        self._changed = threading.Condition()
        self._rows = Session()
        self._ready: deque[bytes] = deque()
        self._failure = ""

    @property
    def failure(self) -> str:
        """Why not every row gets its result, or empty."""
        return self._failure

    def expect(self, rows: int) -> None:
        with self._changed:
            self._rows.send(rows, self._clock())
            self._changed.notify_all()

    def finish_input(self) -> None:
        with self._changed:
            self._rows.is_through = True
            self._changed.notify_all()

    def add(self, data: bytes, rows: int) -> None:
        """Take results: an Arrow IPC stream of `rows` encoded rows."""
        with self._changed:
            self._rows.answer(rows, self._clock())
            if self._rows.owed < 0:
                self._failure = (
                    f"{Code.WRONG_ANSWER} map_fun gave {self._rows.answered} results for "
                    f"{self._rows.sent} rows of inference partition {self.name}; batch_results "
                    "needs exactly one result per row"
                )
            self._ready.append(data)
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """End the wait with an error, unless all results are there."""
        with self._changed:
            # Results that are all here count, whatever becomes of the node.
            if not self._rows.is_over:
                self._failure = self._failure or reason
            self._changed.notify_all()

    def results(self, timeout_s: float) -> Iterator[bytes]:
        """Yield results as they come, until each row has one.

        Args:
            timeout_s: how long rows that are here may wait for a result. The time until Spark
                brings more rows does not count.
        """
        while True:
            with self._changed:
                while not self._ready and not self._failure:
                    if self._rows.is_over:
                        return
                    self._wait(timeout_s)
                if self._failure:
                    raise InferenceError(self._failure)
                data = self._ready.popleft()
            # Without the lock, because Flight may wait for the task while it sends.
            yield data

    def _wait(self, timeout_s: float) -> None:
        if self._rows.owed <= 0:
            # Without a limit: Spark may need long for more rows, and `fail` ends this wait, too.
            self._changed.wait()
            return
        left_s = timeout_s - self._rows.owed_s(self._clock())
        if left_s > 0:
            self._changed.wait(left_s)
            return
        self._failure = (
            f"{Code.WRONG_ANSWER} no result came for {timeout_s:g} s; {self._rows.answered} of "
            f"{self._rows.sent} rows of inference partition {self.name} were answered. map_fun "
            "must give batch_results exactly one result per row; if it only needs longer, raise "
            "the timeout (Feeding(timeout_s=…))"
        )
