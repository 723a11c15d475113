"""Keeping Spark's own progress bar out of the output of sparkdl, the nodes and the user.

Runs in: driver

Spark's bar is on in shells and in programs that plain Python starts. It is drawn without a line's
end, wherever the error stream goes, and stays while any job is active. The nodes' job is active as
long as the cluster, so all output would be mixed with remains of the bar.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from sparkdl.core.jobs import is_ours

PERIOD_S = 0.1
"""Spark's bar comes back after half a second, and this thread may be late on a busy machine."""


class ConsoleBar:
    """Spark's bar of an application.

    Args:
        context: `None` with Spark Connect, whose server has the bar.
        is_printing: whether nodes' lines are printed here, beside which no bar can stand.
    """

    def __init__(self, context: Any, is_printing: bool) -> None:
        self._is_printing = is_printing
        self._ours: dict[int, bool] = {}
        self._closed = threading.Event()
        self._context, self._bar = context, None
        with suppress(Exception):  # Spark is gone, perhaps, or has another bar in this version
            bar = context._jsc.sc().progressBar()
            self._bar = bar.get() if bar.isDefined() else None

    @property
    def is_there(self) -> bool:
        """Whether there is a bar to hide."""
        return self._bar is not None

    def hide(self) -> None:
        """Hide the bar for half a second, as Spark does itself whenever a job ends."""
        if self._bar is not None:
            with suppress(Exception):  # Spark is gone, perhaps
                self._bar.finishAll()

    def keep_away(self) -> None:
        """Hide the bar until `close`, except beside the user's own jobs."""
        while not self._closed.wait(PERIOD_S):
            if self.is_unwanted():
                self.hide()

    def is_unwanted(self) -> bool:
        """Whether the bar would show sparkdl's own jobs alone, or disturb nodes' lines."""
        if self._is_printing:
            return True
        try:
            active = self._context.statusTracker().getActiveJobsIds()
            self._ours = {
                job: self._ours[job] if job in self._ours else is_ours(self._context, job)
                for job in active
            }
        except Exception:  # noqa: BLE001 (Spark or the job is gone: the next look finds out)
            return False
        return all(self._ours.values())

    def close(self) -> None:
        """Leave the bar alone."""
        self._closed.set()
