"""The feeds of a cluster: who may be fed, one call at a time for each feed, none beside a stream.

Runs in: driver
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from sparkdl.core.errors import ConfigError, FeedClosedError
from sparkdl.core.spec import InputMode
from sparkdl.core.world import World
from sparkdl.driver.controller import Controller
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.feeds.bringing import Bringer, fed_members
from sparkdl.driver.feeds.calls import Asked
from sparkdl.driver.feeds.feeding import FeedCall, feed_targets
from sparkdl.driver.feeds.reading import listed
from sparkdl.driver.feeds.renewal import EVERY, Renewal
from sparkdl.driver.feeds.report import FeedReport
from sparkdl.driver.feeds.streaming import IsOver, StreamFeed
from sparkdl.driver.outcome import failure_of
from sparkdl.driver.policy import MAX_BACKOFF_S
from sparkdl.feed.coverage import UNKNOWN, CallShape
from sparkdl.feed.order import FeedOrder
from sparkdl.feed.parquet import ParquetSource

_log = logging.getLogger(__name__)


class Feeds:
    """What `Cluster` feeds by; its methods may be called from any thread.

    Args:
        world: returns the nodes as they are now.

    Attributes:
        books: what was fed, and what a checkpoint covers.
    """

    def __init__(
        self, controller: Controller, executor: Executor, token: str, world: Callable[[], World]
    ) -> None:
        spec = controller.spec
        self._spec = spec
        self._controller = controller
        self._token = token
        self._world = world
        self.books = controller.checkpoints.books
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._streams: dict[str, StreamFeed] = {}
        self._fed_batches: dict[str, dict[str, int]] = {}
        """The last micro-batch that the nodes had whole, by feed and query."""
        self._is_closed = False
        self._bringer = Bringer(controller, executor, self.books, self.order)
        self._renewal: Renewal | None = None
        if spec.input_mode is InputMode.SPARK:
            self._renewal = Renewal(controller, self._fed, self._renew, executor.thread)

    def order(self, name: str, timeout_s: float | None, to: str | None = None) -> FeedOrder:
        """Return what feeders are told; `Cluster.feed` says what is raised."""
        if self._renewal is None:
            raise ConfigError(
                "this cluster reads its own data; launch it with input_mode='spark' to feed it"
            )
        if self._is_closed:
            raise FeedClosedError("the cluster has been shut down")
        if failure := self._controller.look(lambda view: failure_of(view.state)):
            raise failure
        self._renewal.raise_problem()
        settings = self._spec.settings
        timeout = settings.feed_timeout_s if timeout_s is None else timeout_s
        if timeout <= 0:
            raise ConfigError(f"timeout_s={timeout} must be above zero seconds")
        world = self._world()
        order = FeedOrder(
            name,
            0,
            "",
            feed_targets(fed_members(world, to)),
            self._token,
            timeout,
            world.generation,
        )
        if not settings.max_restarts:
            return order
        return replace(order, patience_s=settings.elastic_timeout_s + 2 * MAX_BACKOFF_S)

    def feed(self, name: str, asked: Asked, show: bool | None) -> FeedReport:
        """Feed data, see `Cluster.feed`.

        Args:
            show: a progress bar; `None` where somebody looks.
        """
        self.order(name, asked.timeout_s, asked.to)  # raises what is wrong
        if asked.epochs < 1:
            raise ConfigError(f"epochs={asked.epochs} must be at least 1")
        if asked.epochs > 1 and isinstance(asked.data, Iterator):
            kind = type(asked.data).__name__
            raise ConfigError(f"a {kind} can be read once, and epochs={asked.epochs}; give a list")
        self._check_no_stream(name)
        data = listed(asked.data, self._spec)
        shape = CallShape(1, {0: data.num_rows}) if isinstance(data, ParquetSource) else UNKNOWN
        with self._turn(name):
            call = self.books.book(name).add(replace(asked, data=data, shape=shape))
            return self._bringer.bring(name, call, show)

    def open_stream(self, name: str, timeout_s: float | None, to: str | None) -> StreamFeed:
        """Return what feeds a stream, see `Cluster.open_stream`."""
        self._check_no_stream(name)
        brought: dict[int, Counter[str]] = {}
        """Rows by node name, by generation."""

        @contextmanager
        def open_call(is_over: IsOver, is_taken: bool) -> Iterator[FeedCall]:
            with self._turn(name):
                order = self.order(name, timeout_s, to)
                book = self.books.book(name)
                self._bringer.begin(name, order.generation)
                order = replace(order, epoch=book.open_epochs(None, [0] if is_taken else []))
                yield replace(self._bringer.call_in(self._world(), order, to), is_over=is_over)

        def feed(data: Any, is_over: IsOver) -> FeedReport:
            asked = Asked(data, 1, timeout_s, to, is_micro_batch=True)
            with self._turn(name):
                self.order(name, timeout_s, to)
                call = self.books.book(name).add(asked)
                return self._bringer.bring(name, call, False, is_over, brought)

        def forget() -> None:
            self._streams.pop(name, None)

        fed_batches = self._fed_batches.setdefault(name, {})
        stream = StreamFeed(name, self._controller, open_call, feed, fed_batches, forget)
        self._streams[name] = stream
        return stream

    def stop_streams(self, name: str | None = None) -> None:
        """Stop the stream of one feed, or all streams, and their queries."""
        for stream in list(self._streams.values()):
            if name in (None, stream.name):
                try:
                    stream.stop()
                except Exception:  # noqa: BLE001 (of Spark, which may be gone)
                    _log.warning("The query of feed %r did not stop", stream.name, exc_info=True)

    def end(self, name: str | None = None, timeout_s: float | None = None) -> None:
        """Stop streams, and tell the nodes that a feed, or all, have ended; see `Renewal.end`."""
        self.stop_streams(name)
        if self._renewal is not None:
            self._renewal.end(name or EVERY, timeout_s)

    def raise_problem(self) -> None:
        """Raise what feeding rows again has ended with, in the background."""
        if self._renewal is not None:
            self._renewal.raise_problem()

    def close(self) -> None:
        """Stop all streams, and give no more orders."""
        self._is_closed = True
        self.stop_streams()
        if self._renewal is not None:
            self._renewal.close()

    def _check_no_stream(self, name: str) -> None:
        if name in self._streams:
            raise ConfigError(
                f"feed {name!r} belongs to a stream until that has ended; stop its query first, or "
                "use a feed of another name"
            )

    @contextmanager
    def _turn(
        self, name: str, while_waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Iterator[None]:
        """Wait for other calls of the feed to end."""
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        if not lock.acquire(blocking=False):
            with while_waiting():
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _fed(self) -> tuple[str, ...]:
        return tuple(self.books.by_feed)

    def _renew(self, name: str, while_waiting: Callable[[], AbstractContextManager[Any]]) -> None:
        """Feed what a new generation is still to have."""
        with self._turn(name, while_waiting):
            self._bringer.bring(name, None, False)
