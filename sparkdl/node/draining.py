"""Lets `ctx.is_draining` turn true at the same call on all nodes; they then make a checkpoint.

The notice reaches nodes at different moments, but a checkpoint needs all of them at the same step.
Each node therefore reports its number of calls so far, and its next call waits for all reports. The
answer is true from the call after the largest number on. The thread that receives the notice sends
the report: the training thread may stand in a collective, waiting for a node whose call waits here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sparkdl.control.messages import AllGathered, Drain, Gather
from sparkdl.control.values import decode_value, encode_value
from sparkdl.core.deadline import Deadline

_ANSWER_S = 10.0
"""The wait for the reports of all nodes; without them training continues, no node is asked."""


class DrainNotice:
    """Whether this node was asked for a checkpoint.

    Args:
        report: sends how many calls of `is_due` there were.
    """

    def __init__(self, report: Callable[[Gather], None]) -> None:
        self._report = report
        self._changed = threading.Condition()
        self._calls = 0
        self._open: set[int] = set()
        """Notices that not all nodes have answered."""
        self._due: set[int] = set()
        """The calls from which on the answer is true."""

    def hear(self, notice: Drain) -> None:
        """Report the number of calls; the next one waits for the other nodes' reports."""
        with self._changed:
            self._open.add(notice.number)
            calls = self._calls
        self._report(Gather(notice.generation, notice.number, encode_value(calls)))

    def settle(self, end: AllGathered) -> None:
        """Take the reports of all nodes; there are none if one has returned from `map_fun`."""
        with self._changed:
            if end.values:
                # One after the largest number: no node has made this call yet, so all can still
                # answer alike.
                self._due.add(1 + max(map(decode_value, end.values)))
            self._open.discard(end.number)
            self._changed.notify_all()

    def is_due(self) -> bool:
        """Return whether all nodes are to make a checkpoint now; see `NodeContext.is_draining`."""
        with self._changed:
            self._calls += 1
            if self._open and not self._changed.wait_for(
                lambda: not self._open, Deadline.after(_ANSWER_S).wait_s
            ):
                self._open.clear()
            return any(call <= self._calls for call in self._due)

    def clear(self) -> None:
        """Note that a checkpoint was made; calls to come do not count."""
        with self._changed:
            self._due = {call for call in self._due if call > self._calls}
