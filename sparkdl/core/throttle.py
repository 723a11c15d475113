"""Rate limiter: runs at once when idle, and otherwise once per period at most."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

REPORTS_PER_S = 300
"""Reports from all nodes together, at most; messages that the driver waits for do not count."""
LOTS_PER_S = 3000
"""Likewise, of reports by which rows are assigned. Nodes wait for these."""


def period_s(shortest_s: float, nodes: int, per_s: int = REPORTS_PER_S) -> float:
    """Return how often each of so many nodes may report: the more there are, the more seldom.

    Args:
        per_s: reports of all of them in a second, at most.
    """
    return max(shortest_s, nodes / per_s)


class Throttle:
    """Calls `action` on an event loop when asked to, but not twice within `period_s` seconds.

    The first request is served at once; requests within the period are served together at its end,
    so the last change is always passed on. All methods are called on the loop.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, action: Callable[[], None], period_s: float
    ) -> None:
        self._loop = loop
        self._action = action
        self._period_s = period_s
        # Not 0.0: the loop's clock is near zero on a host that has just booted.
        self._rests_until_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Call `action`: now, or when the period since the last call is over."""
        if self._timer is not None:
            return
        wait_s = self._rests_until_s - self._loop.time()
        if wait_s <= 0:
            self.call()
        else:
            self._timer = self._loop.call_later(wait_s, self.call)

    def call(self) -> None:
        """Call `action` now, in the place of the call that is due."""
        self.cancel()
        # Before the action: a request made within it waits for the next period.
        self._rests_until_s = self._loop.time() + self._period_s
        self._action()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
