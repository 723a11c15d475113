"""Agents that are kept for the next launch: for how long, and their end.

Runs in: driver

The connections of agents that are kept are those of the cluster that they were of, and so is the
thread that serves them. It lives on without a port until the last of them has ended.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache

from sparkdl.control.auth import new_token
from sparkdl.control.server import CoordinatorServer
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError

VARIABLE = "SPARKDL_KEEP_WARM_S"
NOTEBOOK_S = 120.0
"""Between two cells a person thinks."""
TUNING_S = 60.0
"""Between two fits of a search others are evaluated."""
_TUNERS = ("pyspark.ml.tuning", "sparkdl.ml.tuning")
_END_S = 10.0
_LOOK_S = 0.1


class Keeper:
    """The thread of a cluster that has ended, as long as agents of it are kept.

    Args:
        thread: runs `loop`, and closes it at the end.
        server: of the cluster; it listens no more.
        is_there: whether the agents' place still exists: Spark's session, for example.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        server: CoordinatorServer,
        is_there: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._thread = thread
        self._server = server
        self._is_there = is_there
        with _lock:
            _keepers.add(self)

    def look(self) -> None:
        """On the loop: end it once nobody is kept any more."""
        if not self._server.keeps:
            with _lock:
                _keepers.discard(self)
            self._loop.stop()
            return
        if not self._is_there():
            self._server.dismiss()
        self._loop.call_later(_LOOK_S, self.look)

    def dismiss(self) -> None:
        """End the agents soon."""
        with suppress(RuntimeError):  # they have ended
            self._loop.call_soon_threadsafe(self._server.dismiss)

    def join(self, timeout_s: float) -> None:
        """Wait until they have ended."""
        self._thread.join(timeout_s)


# Module-level, because what ends them is a call that knows of no cluster.
_keepers: set[Keeper] = set()
_lock = threading.Lock()


@cache
def warm_key() -> str:
    """Return by what agents of this process are found; nobody else knows it."""
    return new_token()


def stop_warm() -> None:
    """End all agents that launches of this process keep, and wait until they have ended.

    They belong to launches that have ended, see `keep_warm_s` of `sparkdl.launch`; what runs is not
    touched. Does nothing where there are none.
    """
    with _lock:
        keepers = list(_keepers)
    for keeper in keepers:
        keeper.dismiss()
    deadline = Deadline.after(_END_S)
    for keeper in keepers:
        keeper.join(deadline.remaining_s)


def chosen_keep_s(
    asked_s: float | None, is_in_notebook: Callable[[], bool], environ: Mapping[str, str]
) -> float:
    """Return for how long agents are kept, in seconds.

    Raises:
        ConfigError: if the environment variable is no number.
    """
    if asked_s is not None:
        return float(asked_s)
    if text := environ.get(VARIABLE):
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{VARIABLE}={text!r} is no number of seconds") from None
    if is_in_search():
        return TUNING_S
    return NOTEBOOK_S if is_in_notebook() else 0.0


def is_in_search() -> bool:
    """Whether a search of Spark ML's, or of sparkdl's, has called this: it will call again."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in _TUNERS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
