"""What a child does beside its feeds, for the coordinator's hang watch and the cluster's table.

Runs in: agent
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sparkdl.control.channel import Consumed, Local, ReadParquet, Reported
from sparkdl.control.messages import NodeActive
from sparkdl.node.logs import ChildLog

PERIOD_S = 0.1
"""Steps go to the coordinator this often while they change."""
MAX_LOG_PERIOD_S = 10.0


def log_period_s(hang_timeout_s: float | None) -> float | None:
    """Return how often the hang watch wants to know whether a child prints; `None` for never."""
    return None if hang_timeout_s is None else min(MAX_LOG_PERIOD_S, hang_timeout_s / 4)


class Activity:
    """One node's. Runs on the agent's loop.

    Args:
        log_period_s: how often to look whether the child has printed something; `None` for never.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[NodeActive], None],
        log_period_s: float | None,
    ) -> None:
        self._loop = loop
        self._tell = tell
        self._log_period_s = log_period_s
        self._now = self._told = NodeActive(0)
        self._log: ChildLog | None = None
        self._own: dict[str, int] = {}
        """Batches of the files that the child reads itself, by feed."""
        self._timer: asyncio.TimerHandle | None = None
        self._log_timer: asyncio.TimerHandle | None = None

    def begin(self, generation: int, log: ChildLog) -> None:
        """Watch another child."""
        self._now = self._told = NodeActive(generation)
        self._own.clear()
        self._log = log
        if self._log_period_s is not None and self._log_timer is None:
            self._look_at_log()

    def note(self, message: Local) -> None:
        """Take what the child says."""
        now = self._now
        match message:
            case Reported(step, metrics):
                now = NodeActive(now.generation, step, metrics, now.batches, now.log_nbytes)
            case ReadParquet(feed):
                self._own[feed] = 0
            case Consumed(feed) if feed in self._own:
                self._own[feed] = message.steps
                batches = sum(self._own.values())
                now = NodeActive(now.generation, now.step, now.metrics, batches, now.log_nbytes)
            case _:
                return
        self._change(now)

    def close(self) -> None:
        """End the timers."""
        for timer in (self._timer, self._log_timer):
            if timer:
                timer.cancel()

    def _change(self, now: NodeActive) -> None:
        self._now = now
        if now != self._told and self._timer is None:
            self._timer = self._loop.call_later(PERIOD_S, self._tell_now)

    def _tell_now(self) -> None:
        self._timer = None
        self._told = self._now
        self._tell(self._now)

    def _look_at_log(self) -> None:
        assert self._log is not None
        assert self._log_period_s is not None
        now = self._now
        nbytes = self._log.nbytes()
        self._change(NodeActive(now.generation, now.step, now.metrics, now.batches, nbytes))
        self._log_timer = self._loop.call_later(self._log_period_s, self._look_at_log)
