"""A queue for the task slots of a Spark application: the clusters of a program take turns.

Runs in: driver

Without it, two clusters that start at once may each get a part of the slots and wait for the rest
for ever, or both rely on the last slot for feeding. A cluster therefore reserves all its slots here
before it asks Spark for the first; clusters are served in the order of their requests.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, LaunchError, ReservationTimeoutError
from sparkdl.core.listing import count

_log = logging.getLogger(__name__)
_MAX_GATES = 16


@dataclass(frozen=True)
class Need:
    """The slots that a cluster needs as long as it lives.

    Attributes:
        cluster: its id.
        nodes: the number of nodes that Spark's tasks start.
        slots: the slots of these, of detached ones too: they use their cores even without a slot.
        is_feeding: its rows come by tasks that need a slot beside those of attached nodes.
        room: how many nodes of this size fit at all; fewer than there are slots, if a node takes
            most of an executor.
    """

    cluster: str
    nodes: int
    slots: int
    is_feeding: bool
    room: int = sys.maxsize


@dataclass(frozen=True)
class Turn:
    """A cluster's turn at the gate of its application.

    Attributes:
        slots: how many there are now; asked again and again, for executors come and go.
        timeout_s: how long to wait where nothing would ever make room.
        starter: the thread that launches the cluster.
    """

    gate: Gate
    need: Need
    slots: Callable[[], int]
    timeout_s: float
    starter: threading.Thread = field(default_factory=threading.current_thread)
    since_s: float = field(default_factory=time.monotonic)

    def wait(self, is_wanted: Callable[[], bool]) -> None:
        """Wait for it, see `Gate.enter`."""
        self.gate.enter(self, is_wanted)

    def watch(self, unfed: Callable[[], str]) -> None:
        """Note how to find out that the cluster waits to be fed, see `Launch.unfed`."""
        self.gate.watch(self.need.cluster, unfed)

    def end(self) -> None:
        """Give the slots back; does nothing the second time."""
        self.gate.leave(self.need.cluster)

    def is_others(self, thread: threading.Thread) -> bool:
        """Whether another thread, which lives, may make room."""
        return self.starter.is_alive() and self.starter is not thread

    def __str__(self) -> str:
        age_s = time.monotonic() - self.since_s
        return (
            f"{self.need.cluster} ({count(self.need.nodes, 'node')}, launched {age_s:.0f} s ago in "
            f"thread {self.starter.name})"
        )


class Gate:
    """The slots of one Spark application. All methods may be called from any thread.

    Args:
        look_s: between two looks at how many slots there are.
    """

    def __init__(self, look_s: float = 1.0) -> None:
        self._look_s = look_s
        self._changed = threading.Condition()
        self._inside: dict[str, Turn] = {}
        self._unfed: dict[str, Callable[[], str]] = {}
        self._waiting: deque[str] = deque()

    def enter(self, turn: Turn, is_wanted: Callable[[], bool]) -> None:
        """Wait until it is this cluster's turn; `leave` gives the slots back.

        While a cluster of another living thread holds slots, wait without limit: it may end. A
        cluster of this thread may end by itself, until the time is over. It cannot if all its nodes
        wait for a feed that was never fed, and no other thread of the program could feed it or shut
        it down. In that case the call fails at once.

        Args:
            is_wanted: whether the cluster is still to be launched; asked after each look that
                found no room.

        Raises:
            ConfigError: if there can be no room.
            ReservationTimeoutError: if there was no room in time.
            LaunchError: if it is not wanted any more.
        """
        cluster = turn.need.cluster
        with self._changed:
            self._waiting.append(cluster)
            try:
                self._wait(turn, is_wanted)
                self._inside[cluster] = turn
            finally:
                self._waiting.remove(cluster)
                self._changed.notify_all()

    def leave(self, cluster: str) -> None:
        """Give the slots of a cluster back; does nothing the second time."""
        with self._changed:
            self._inside.pop(cluster, None)
            self._unfed.pop(cluster, None)
            self._changed.notify_all()

    def watch(self, cluster: str, unfed: Callable[[], str]) -> None:
        """Note how to find out that a cluster waits to be fed; nothing if it has left."""
        with self._changed:
            if cluster in self._inside:
                self._unfed[cluster] = unfed

    def others(self, cluster: str) -> int:
        """Return how many slots the other clusters that are inside may take."""
        with self._changed:
            return sum(held.need.slots for name, held in self._inside.items() if name != cluster)

    def _wait(self, turn: Turn, is_wanted: Callable[[], bool]) -> None:
        need = turn.need
        deadline = Deadline.after(turn.timeout_s)
        has_warned = False
        # In order, or small clusters could overtake a large one for ever.
        while not (self._waiting[0] == need.cluster and self._fits(need, turn.slots())):
            if not is_wanted():
                raise LaunchError(f"cluster {need.cluster} is not wanted any more")
            text = self._describe(need, turn.slots())
            if not has_warned:
                _log.warning("Waiting for its turn: %s", text)
                has_warned = True
            # A cluster that this very thread launched cannot end while the thread waits here.
            if any(held.is_others(turn.starter) for held in self._inside.values()):
                deadline = Deadline.after(turn.timeout_s)
            elif why := self._hopeless(turn.starter):
                raise ConfigError(
                    f"{text}. {why}, and only this thread could feed it or shut it down: do so "
                    "first, or launch in another thread, or add executors or cores"
                )
            elif deadline.has_passed:
                raise ReservationTimeoutError(
                    f"{text}. No slots became free within {turn.timeout_s:g} s: shut the other "
                    "cluster down first, or add executors or cores"
                )
            self._changed.wait(self._look_s)
        if has_warned:
            _log.info("Cluster %s has its task slots and starts", need.cluster)

    def _hopeless(self, thread: threading.Thread) -> str:
        """Return why none of the clusters inside, all of this thread, can end; empty if one may."""
        if not self._inside or any(map(partial(_may_act, thread), threading.enumerate())):
            return ""
        # `str()` is empty: a cluster that has not started yet does not wait for rows.
        unfed = {cluster: self._unfed.get(cluster, str)() for cluster in self._inside}
        if not all(unfed.values()):
            return ""
        return "; ".join(
            f"cluster {cluster} waits for feed {feed}, which was never fed"
            for cluster, feed in unfed.items()
        )

    def _describe(self, need: Need, slots: int) -> str:
        holders = ", ".join(map(str, self._inside.values())) or "no cluster"
        before = list(self._waiting).index(need.cluster)
        return (
            f"cluster {need.cluster} needs {count(need.slots, 'task slot')} for "
            f"{count(need.nodes, 'node')}"
            f"{' and one for feeding' if need.is_feeding else ''}; of {slots} slots "
            f"{sum(held.need.slots for held in self._inside.values())} are held by {holders}, "
            f"and {before} clusters wait before it"
        )

    def _fits(self, need: Need, slots: int) -> bool:
        held = [each.need for each in self._inside.values()]
        if not held:
            return True  # whether it fits alone has been checked with all that can be known
        feeding = any(each.is_feeding for each in (*held, need))
        is_free = sum(each.slots for each in (*held, need)) + feeding <= slots
        return is_free and sum(each.nodes for each in held) + need.nodes <= need.room


def _may_act(waits: threading.Thread, other: threading.Thread) -> bool:
    """Whether another thread may be one of the user's, which can use a cluster."""
    return other is not waits and not other.daemon and not other.name.startswith("sparkdl-")


# Module-level, because what takes turns are the clusters of a whole program: launches know nothing
# of each other, and a gate has to outlive the cluster that was first to ask for it.
_gates: OrderedDict[str, Gate] = OrderedDict()
_lock = threading.Lock()


def gate_of(application: str) -> Gate:
    """Return the gate of a Spark application, by its id."""
    with _lock:
        gate = _gates.setdefault(application, Gate())
        # A program that stops Spark and starts it again leaves gates that no cluster uses.
        while len(_gates) > _MAX_GATES:
            _gates.popitem(last=False)
        return gate
