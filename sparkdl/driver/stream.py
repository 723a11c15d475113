"""Who is called with a cluster's events: see Events in docs/design.md.

Runs in: driver
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from sparkdl.driver.events import Ended, Event

_log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_NODES_PER_S = 2000
"""Of more nodes, samples are taken and written more seldom."""
_MAX_EVENTS = 100_000
"""That wait while nothing can be written; the oldest are dropped."""
Subscriber = Callable[[Any], None]


def period_s(num_nodes: int) -> float:
    """Return how often that is sampled, and written, which changes all the time."""
    return max(_PERIOD_S, num_nodes / _NODES_PER_S)


class Stream:
    """The subscribers of one cluster, by the kinds of events that they want."""

    def __init__(self) -> None:
        self._by_kind: dict[type[Event], tuple[Subscriber, ...]] = {}
        self._ended: Ended | None = None

    def wants(self, kind: type[Event]) -> bool:
        """Whether anyone has subscribed to this kind."""
        return kind in self._by_kind

    def add(self, subscriber: Subscriber, *kinds: type[Event]) -> None:
        """Have `subscriber` called with each event of these kinds; the caller holds a lock."""
        if self._ended is not None:
            if Ended in kinds:
                notify(subscriber, self._ended)
            return
        for kind in kinds:
            self._by_kind[kind] = (*self._by_kind.get(kind, ()), subscriber)

    def publish(self, event: Event) -> None:
        """Call the subscribers to this kind of event; what they raise is logged."""
        for subscriber in self._by_kind.get(type(event), ()):
            notify(subscriber, event)

    def end(self, event: Ended) -> None:
        """Publish the last event."""
        self._ended, by_kind, self._by_kind = event, self._by_kind, {}
        for subscriber in by_kind.get(Ended, ()):
            notify(subscriber, event)


def notify(subscriber: Subscriber, event: Event) -> None:
    """Call a subscriber; the cluster needs none of them."""
    try:
        subscriber(event)
    except Exception:  # noqa: BLE001 (user code among them; it must not end the controller)
        name = getattr(subscriber, "__qualname__", repr(subscriber))
        _log.exception("%s failed on %s; the cluster goes on", name, type(event).__name__)


class Batches(threading.Thread):
    """A subscriber that takes events now and then, all that have come meanwhile, in a thread.

    Args:
        what: it makes, in words for the log.
    """

    end_s: ClassVar[float] = 1.0
    """How long the cluster's end may wait for the last ones to be taken."""

    def __init__(self, what: str, name: str, wait_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self._what, self._wait_s = what, wait_s
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._ends = threading.Event()

    def put(self, event: Event) -> None:
        """Take an event; on any thread. With the last one, wait for a limited time."""
        self._events.append(event)
        if isinstance(event, Ended):
            self.close()

    def close(self) -> None:
        """Have all that waits be taken, for a limited time, and end the thread."""
        self._ends.set()
        if self.is_alive():
            self.join(self.end_s)

    def run(self) -> None:
        """Take events until the end."""
        try:
            has_ended = False
            while not has_ended:
                has_ended = self._ends.wait(self._wait_s)
                self._take([self._events.popleft() for _ in range(len(self._events))], has_ended)
        except Exception:  # noqa: BLE001 (whatever it is, the training does not need this)
            _log.exception("%s ends here, and the cluster goes on", self._what)
        finally:
            self._events = deque(maxlen=0)
            self._finish()

    def _take(self, events: Sequence[Event], is_last: bool) -> None:
        """Take the events that have come since the last time, in their order."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Let go of what is open: nothing more will be taken."""
