"""Inference partitions that wait for their results: one result per row, in order.

Runs in: agent
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from sparkdl.core.errors import InferenceError


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
        self._all_rows_in = False
        self._failure = ""

    @property
    def failure(self) -> str:
        """Why not every row gets its result, or empty."""
        return self._failure

    def expect(self, rows: int) -> None:
        """Count rows that were handed to the child."""
        with self._changed:
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
            if self._rows_out > self._rows_in:
                self._failure = (
                    f"map_fun gave {self._rows_out} results for {self._rows_in} rows of inference "
                    f"partition {self.name}; batch_results needs exactly one result per row"
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

        Raises:
            InferenceError: if there are too many, or none came for `timeout_s`, or the child ended.
        """
        given = 0
        while True:
            with self._changed:
                while not self._ready and not self._failure:
                    if self._all_rows_in and given == self._rows_in:
                        return
                    if not self._changed.wait(timeout_s):
                        self._failure = (
                            f"no result came for {timeout_s:g} s; {self._rows_out} of "
                            f"{self._rows_in} rows of inference partition {self.name} were answered"
                        )
                if self._failure:
                    raise InferenceError(self._failure)
                data, rows = self._ready.popleft()
                given += rows
            yield data
