"""Publishing a cluster's events to subscribers: see Events in docs/design.md."""

from __future__ import annotations

import logging
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sparkdl.core.spec import ClusterSpec
from sparkdl.driver.events import (
    AnyEvent,
    Changed as StateChanged,
    Checkpoint,
    Ended,
    Event,
    Launched,
    Sampled,
    Stepped,
)
from sparkdl.driver.lifecycle.state import is_empty
from sparkdl.driver.threads import Changed
from sparkdl.driver.view import ClusterView, PublishedState, sampled

_log = logging.getLogger(__name__)

PERIOD_S = 1.0
_STATE_EVENTS = {Launched, StateChanged, Checkpoint, Sampled}
Subscriber = Callable[[Any], None]


class ClusterEvents:
    """The events of one cluster, and their subscribers; see Events in docs/design.md.

    Attributes:
        begun_s: when the cluster was launched, as Unix time in seconds.
    """

    def __init__(
        self, spec: ClusterSpec, view: ClusterView, changed: Changed, loop: AbstractEventLoop
    ) -> None:
        self._spec, self._view, self._changed, self._loop = spec, view, changed, loop
        self._born_s = time.time() - time.monotonic()
        self.begun_s = self.now_s()
        self._by_kind: dict[type[Event], tuple[Subscriber, ...]] = {}
        self._ended: Ended | None = None
        self._published = PublishedState(spec.cluster_id)
        deque(self._published.changes(view.state, self.begun_s), maxlen=0)  # the present

    def now_s(self) -> float:
        """Return the Unix time in seconds; it does not jump while the cluster lives."""
        return self._born_s + time.monotonic()

    def subscribe(self, subscriber: Subscriber, *kinds: type[Event]) -> None:
        """Call `subscriber` with all events of some kinds from now on, the present ones first.

        It is called on the loop, so it must be quick. With `Ended` it is called by the thread that
        closes the cluster, and may block for a limited time. Its errors are logged.
        """
        with self._changed:
            # Under the condition: no change falls between the present and the first new event.
            for event in self.present() if _STATE_EVENTS & {*kinds} else ():
                if type(event) in kinds:
                    notify(subscriber, event)
            if self._ended is not None:
                if Ended in kinds:
                    notify(subscriber, self._ended)
                return
            # Samples look at all nodes, so none is taken before a subscriber wants them.
            is_first = Sampled in kinds and not self.wants(Sampled)
            for kind in kinds:
                # Another tuple each time: the loop may be publishing to the one before.
                self._by_kind[kind] = (*self._by_kind.get(kind, ()), subscriber)
        if is_first:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._sample_later)

    def present(self) -> list[AnyEvent]:
        """Return events that describe the cluster as it is now, for a new subscriber."""
        with self._changed:
            now_s = self.now_s()
            changes = PublishedState(self._spec.cluster_id).changes(self._view.state, now_s)
            sample = sampled(self._spec, now_s, self._view)
            spec, names = self._spec, tuple(node.name for node in self._spec.nodes)
            launched = Launched(spec.cluster_id, self.begun_s, spec.framework, names)
            return [launched, *changes, sample]

    def wants(self, kind: type[Event]) -> bool:
        return kind in self._by_kind

    def publish(self, kind: type[Event], *about: Any) -> None:
        """Send an event of now to the subscribers of its kind; must be called on the loop."""
        if self.wants(kind):
            self._publish(kind(self._spec.cluster_id, self.now_s(), *about))

    def publish_state(self) -> None:
        self.publish(Stepped)
        for event in self._published.changes(self._view.state, self.now_s()):
            self._publish(event)
            # The last sample: the timer takes none of a cluster without agents.
            if isinstance(event, StateChanged) and event.is_over:
                self._publish_sample()

    def end(self) -> None:
        self._ended = Ended(self._spec.cluster_id, self.now_s())
        by_kind, self._by_kind = self._by_kind, {}
        for subscriber in by_kind.get(Ended, ()):
            notify(subscriber, self._ended)

    def _publish(self, event: Event) -> None:
        for subscriber in self._by_kind.get(type(event), ()):
            notify(subscriber, event)

    def _publish_sample(self) -> None:
        if self.wants(Sampled):
            self._publish(sampled(self._spec, self.now_s(), self._view))

    def _sample_later(self) -> None:
        self._loop.call_later(PERIOD_S, self._sample)

    def _sample(self) -> None:
        if not is_empty(self._view.state):
            self._publish_sample()
            self._sample_later()


def notify(subscriber: Subscriber, event: Event) -> None:
    """Call a subscriber; log its errors, since the cluster needs none of them."""
    try:
        subscriber(event)
    except Exception:  # noqa: BLE001 (user code among them; it must not end the controller)
        name = getattr(subscriber, "__qualname__", repr(subscriber))
        _log.exception("%s failed on %s; the cluster continues", name, type(event).__name__)
