"""Each new generation is fed what no checkpoint covers, then told which feeds have ended.

Runs in: driver

Where a `feed` call is under way it does the former itself; see `Feeds`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from sparkdl.control.messages import FeedEnd
from sparkdl.core.deadline import Deadline
from sparkdl.driver.controller import Controller, View
from sparkdl.driver.outcome import failure_of, has_ended
from sparkdl.driver.state import Running
from sparkdl.driver.threads import begin

_log = logging.getLogger(__name__)

EVERY = ""
"""In place of a feed: all of them, those that nobody has used yet too."""


class Renewal:
    """Watches for new generations, in a thread of its own that ends with the cluster.

    Args:
        feeds: returns the feeds that have been fed.
        bring: feeds one of them what the generation is still to have; it waits for calls under way,
            and enters the context while it does not.
        thread: makes a thread that may call Spark.
    """

    def __init__(
        self,
        controller: Controller,
        feeds: Callable[[], Iterable[str]],
        bring: Callable[[str, Callable[[], AbstractContextManager[Any]]], None],
        thread: Callable[[Callable[[], None], str], threading.Thread],
    ) -> None:
        self._controller = controller
        self._feeds = feeds
        self._bring = bring
        self._thread = thread
        self._generation = -1
        """The last one that has been seen to."""
        self._active: set[str] = set()
        self._ended: set[str] = set()
        self._problem: Exception | None = None
        self._is_closed = False
        begin(self._watch, f"sparkdl-renewal-{controller.spec.cluster_id}", thread)

    def end(self, feed: str, timeout_s: float | None) -> None:
        """Tell all nodes that a feed has ended, once rows that are fed again have been read.

        Later generations are told as well.

        Args:
            feed: `EVERY` for all.
            timeout_s: how long to wait for that; the nodes are told then, if it comes to that.
        """
        with self._controller.changed:
            self._ended.add(feed)
        is_settled = self._controller.wait_for(
            lambda view: self._is_settled(view, feed), Deadline.after(timeout_s)
        )
        if is_settled:
            self._tell((feed,) if feed else (), self._generation)

    def close(self) -> None:
        """See to nothing any more."""
        with self._controller.changed:
            self._is_closed = True
            self._controller.changed.notify_all()

    def raise_problem(self) -> None:
        """Raise what feeding rows again has ended with, if that has not been raised before."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _is_settled(self, view: View, feed: str) -> bool:
        if self._is_over(view):
            return True
        is_seen = isinstance(view.state, Running) and _generation(view) <= self._generation
        return is_seen and (not self._active if feed == EVERY else feed not in self._active)

    def _is_over(self, view: View) -> bool:
        return self._is_closed or has_ended(view.state)

    def _watch(self) -> None:
        while True:
            self._controller.wait_for(
                lambda view: self._is_over(view) or _generation(view) > self._generation,
                Deadline.after(None),
            )
            with self._controller.changed:
                if self._is_over(self._controller.view):
                    return
                generation = _generation(self._controller.view)
                feeds = tuple(self._feeds())
                self._active = set(feeds)
                self._generation = generation
                self._controller.changed.notify_all()
            for feed in feeds:
                name = f"sparkdl-renewal-{feed}"
                begin(partial(self._renew, feed, generation), name, self._thread)
            if not feeds:
                self._tell_ends((), generation)

    def _renew(self, feed: str, generation: int) -> None:
        try:
            self._bring(feed, lambda: self._idle(feed))
        except Exception as error:  # noqa: BLE001 (raised where somebody waits)
            if self._controller.look(lambda view: failure_of(view.state)) is None:
                _log.error("Feed %r could not be fed again: %s", feed, error)
                self._problem = self._problem or error
        finally:
            self._set_active(feed, False)
        self._tell_ends((feed,), generation)

    @contextmanager
    def _idle(self, feed: str) -> Iterator[None]:
        """Not be waited for: a call is under way, which does what is to be done."""
        self._set_active(feed, False)
        try:
            yield
        finally:
            self._set_active(feed, True)

    def _set_active(self, feed: str, is_active: bool) -> None:
        with self._controller.changed:
            (self._active.add if is_active else self._active.discard)(feed)
            self._controller.changed.notify_all()

    def _tell_ends(self, feeds: tuple[str, ...], generation: int) -> None:
        """Tell a generation that these have ended, and all if none is being fed any more."""
        with self._controller.changed:
            over = tuple(feed for feed in feeds if self._ended & {feed, EVERY})
            is_all = EVERY in self._ended and not self._active
            if generation != self._generation:
                return
        if over:
            self._tell(over, generation)
        if is_all:
            self._tell((), generation)

    def _tell(self, feeds: tuple[str, ...], generation: int) -> None:
        everyone = {node.node_id for node in self._controller.spec.nodes}
        self._controller.broadcast(FeedEnd(feeds), everyone, generation)


def _generation(view: View) -> int:
    """Return the number of the world that is running, -1 while none is."""
    return view.state.world.generation if isinstance(view.state, Running) else -1
