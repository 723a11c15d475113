"""Inference partitions that wait for their results: one result per row, in order.

Runs in: agent
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

from sparkdl.core.errors import InferenceError

WRONG_ANSWER = "inference partition"
"""In every reason that lies in the answers: another node would give no better ones."""
CLUSTER_FAILED = "the cluster has failed"
"""In the reason of every node once no node will answer any more."""


class Exchange:
    """One inference partition at the node that answers it.

    The Flight thread that received the partition waits in `results`; the agent's loop adds what
    the child sends back.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._changed = threading.Condition()
        self._ready: deque[tuple[bytes, int]] = deque()
        self._rows_in = 0
        self._rows_out = 0
        self._moved_s = time.monotonic()
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
                self._moved_s = time.monotonic()
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
            self._moved_s = time.monotonic()
            if self._rows_out > self._rows_in:
                self._failure = (
                    f"map_fun gave {self._rows_out} results for {self._rows_in} rows of "
                    f"{WRONG_ANSWER} {self.name}; batch_results needs exactly one result per row"
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
        left_s = self._moved_s + timeout_s - time.monotonic()
        if left_s > 0:
            self._changed.wait(left_s)
            return
        self._failure = (
            f"no result came for {timeout_s:g} s; {self._rows_out} of {self._rows_in} rows of "
            f"{WRONG_ANSWER} {self.name} were answered. map_fun must give batch_results exactly "
            "one result per row; if it only needs longer, raise the timeout (feed_timeout)"
        )
