"""How much a node may hold: bytes, and descriptors.

Runs in: agent
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable

from sparkdl.core.errors import FeedTimeoutError

_OTHER_DESCRIPTORS = 256
"""Descriptors that the agent, or the child with its framework, needs beside segments."""
_MAX_SEGMENTS = 30_000
"""Half of what a process may map by Linux's default (vm.max_map_count)."""


def _affordable_segments() -> int:
    """Return how many segments this process may hold: one descriptor each, one more on its way."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_SEGMENTS
    return max(1, min(_MAX_SEGMENTS, (limit - _OTHER_DESCRIPTORS) // 2))


class Budget:
    """Bytes that a node's logs may hold together. Appending waits while it is spent.

    Each segment has a descriptor, here and in the child, so that their number is limited as well.
    """

    def __init__(
        self,
        limit_nbytes: int,
        on_pressure: Callable[[], None],
        limit_segments: int | None = None,
    ) -> None:
        self.limit_nbytes = limit_nbytes
        self.limit_segments = limit_segments or _affordable_segments()
        self.used_nbytes = 0
        self.num_segments = 0
        self._on_pressure = on_pressure
        self._changed = threading.Condition()

    def take(self, nbytes: int, timeout_s: float, is_wanted: Callable[[], bool]) -> bool:
        """Wait for room and take it. A single segment larger than the limit fits when it is alone.

        Returns:
            False if `is_wanted` turned false while waiting.

        Raises:
            FeedTimeoutError: if nothing was released for `timeout_s`.
        """
        with self._changed:
            while self._is_full(nbytes):
                if not is_wanted():
                    return False
                self._on_pressure()
                if not self._changed.wait(timeout_s):
                    raise FeedTimeoutError(
                        f"the node's {self.limit_nbytes} bytes of feed memory stayed full for "
                        f"{timeout_s:g} s: user code reads no rows. Raise feed_timeout if a step "
                        "may take that long"
                    )
            self.used_nbytes += nbytes
            self.num_segments += 1
            return True

    def give_back(self, nbytes: int) -> None:
        """Return a segment's bytes and wake whoever waits for them."""
        with self._changed:
            self.used_nbytes -= nbytes
            self.num_segments -= 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Let waiting appends look again whether they are still wanted."""
        with self._changed:
            self._changed.notify_all()

    def _is_full(self, nbytes: int) -> bool:
        if not self.num_segments:
            return False
        is_over = self.used_nbytes + nbytes > self.limit_nbytes
        return is_over or self.num_segments >= self.limit_segments
