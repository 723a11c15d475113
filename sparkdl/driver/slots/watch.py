"""Watches the task slots beside nodes that run: executors come and go.

Runs in: driver
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sparkdl.driver.slots.placement import UNCOUNTED, Standing

LOOK_S = 2.0
"""Between two counts."""
LASTING_S = 5.0
"""For how long a count has to stay before it is told: a lost executor may be replaced soon."""


class SlotWatch:
    """Tells what the slots mean for a cluster, each time that this changes for good.

    Args:
        nodes: of the cluster, which have room and can be fed at the beginning.
        count: returns what the slots mean now; `None` if they cannot be counted.
        on_counted: is told.
        now_s: a monotonic clock.
    """

    def __init__(
        self,
        nodes: int,
        count: Callable[[], Standing | None],
        on_counted: Callable[[Standing], object],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count
        self._on_counted = on_counted
        self._now_s = now_s
        self._told = self._seen = (nodes, False)
        self._since_s = now_s()

    def look(self, is_node_lost: bool = False) -> None:
        """Count again. Where that cannot be done, the loss of a node has to be enough."""
        standing = self._count()
        if standing is None:
            if not is_node_lost:
                return
            standing = UNCOUNTED
        meaning = (standing.room, standing.is_short)
        if meaning != self._seen:
            self._seen, self._since_s = meaning, self._now_s()
        lasts = standing is UNCOUNTED or self._now_s() - self._since_s >= LASTING_S
        if meaning != self._told and lasts:
            self._told = meaning
            self._on_counted(standing)
