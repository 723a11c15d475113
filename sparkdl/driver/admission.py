"""Who may start nodes on a Spark application now: clusters of one program take turns for its slots.

Runs in: driver

Two clusters that gather at once may each get a part of the slots and wait for the rest for ever;
and two that each count on the last slot for feeding leave none. So a cluster gets all slots that
it needs before it asks Spark for the first, in the order in which clusters ask.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ReservationTimeoutError

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
_MAX_GATES = 16


@dataclass(frozen=True)
class Need:
    """What a cluster needs for as long as it lives.

    Attributes:
        cluster: its id.
        nodes: that Spark's tasks start.
        slots: that these take, detached ones too: they use their cores, whoever has the slots.
        is_feeding: it is fed, by tasks that need a slot beside those of attached nodes.
        room: how many nodes of this size fit at all; fewer than there are slots, if a node takes
            most of an executor.
    """

    cluster: str
    nodes: int
    slots: int
    is_feeding: bool
    room: int = sys.maxsize


class Gate:
    """The slots of one Spark application. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[str, tuple[Need, threading.Thread]] = {}
        self._waiting: deque[str] = deque()

    def enter(self, need: Need, slots: Callable[[], int], timeout_s: float) -> None:
        """Wait until it is this cluster's turn; `leave` ends its stay.

        As long as a cluster that another living thread has started holds slots, the wait is
        that cluster's; otherwise nobody would ever make room, and `timeout_s` counts.

        Args:
            slots: how many there are now; asked again and again, for executors come and go.

        Raises:
            ReservationTimeoutError: if nobody made room in time.
        """
        with self._changed:
            self._waiting.append(need.cluster)
            try:
                self._wait(need, slots, timeout_s)
                self._inside[need.cluster] = (need, threading.current_thread())
            finally:
                self._waiting.remove(need.cluster)
                self._changed.notify_all()

    def leave(self, cluster: str) -> None:
        """Give the slots of a cluster to whoever waits; does nothing the second time."""
        with self._changed:
            self._inside.pop(cluster, None)
            self._changed.notify_all()

    def others(self, cluster: str) -> int:
        """Return how many slots the other clusters that are inside may take."""
        with self._changed:
            return sum(need.slots for name, (need, _) in self._inside.items() if name != cluster)

    def _wait(self, need: Need, slots: Callable[[], int], timeout_s: float) -> None:
        deadline = Deadline.after(timeout_s)
        has_told = False
        while not (self._waiting[0] == need.cluster and self._fits(need, slots())):
            holders = ", ".join(
                f"{cluster} ({held.nodes} nodes)" for cluster, (held, _) in self._inside.items()
            )
            before = list(self._waiting).index(need.cluster)
            text = (
                f"cluster {need.cluster} needs {need.slots} task slots for {need.nodes} nodes"
                f"{' and one for feeding' if need.is_feeding else ''}; of {slots()} slots "
                f"{sum(held.slots for held, _ in self._inside.values())} are held by "
                f"{holders or 'nobody'}, and {before} clusters wait before it"
            )
            if not has_told:
                _log.info("Waiting for its turn: %s", text)
                has_told = True
            if self._is_others():
                deadline = Deadline.after(timeout_s)
            elif deadline.has_passed:
                raise ReservationTimeoutError(
                    f"{text}. Nobody made room for {timeout_s:g} s: shut the other cluster down "
                    "first, or add executors or cores"
                )
            self._changed.wait(_LOOK_S)
        if has_told:
            _log.info("It is the turn of cluster %s", need.cluster)

    def _fits(self, need: Need, slots: int) -> bool:
        held = [each for each, _ in self._inside.values()]
        if not held:
            return True  # whether it fits alone has been checked with all that can be known
        feeding = any(each.is_feeding for each in (*held, need))
        is_free = sum(each.slots for each in (*held, need)) + feeding <= slots
        return is_free and sum(each.nodes for each in held) + need.nodes <= need.room

    def _is_others(self) -> bool:
        me = threading.current_thread()
        return any(thread.is_alive() and thread is not me for _, thread in self._inside.values())


_gates: OrderedDict[str, Gate] = OrderedDict()
_lock = threading.Lock()


def gate_of(application: str) -> Gate:
    """Return the gate of a Spark application, by its id."""
    with _lock:
        gate = _gates.setdefault(application, Gate())
        while len(_gates) > _MAX_GATES:
            _gates.popitem(last=False)
        return gate
