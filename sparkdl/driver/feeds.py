"""The feeds of a cluster: who may be fed, one call at a time for each feed, none beside a stream.

Runs in: driver
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sparkdl.core.errors import ConfigError, FeedClosedError
from sparkdl.core.spec import InputMode
from sparkdl.core.world import World
from sparkdl.driver.controller import Controller
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.feeding import FeedCall, feed_targets
from sparkdl.driver.outcome import failure_of
from sparkdl.driver.progress import FeedBar
from sparkdl.driver.reading import listed
from sparkdl.driver.report import FeedReport
from sparkdl.driver.streaming import IsOver, StreamFeed
from sparkdl.feed.order import FeedOrder

_log = logging.getLogger(__name__)


class Feeds:
    """What `Cluster` feeds by; its methods may be called from any thread.

    Args:
        world: returns the nodes as they are now.
    """

    def __init__(
        self, controller: Controller, executor: Executor, token: str, world: Callable[[], World]
    ) -> None:
        self._spec = controller.spec
        self._controller = controller
        self._executor = executor
        self._token = token
        self._world = world
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._epochs: dict[tuple[str, int], int] = {}
        """The next epoch, by feed and generation."""
        self._streams: dict[str, StreamFeed] = {}
        self._fed_batches: dict[str, dict[str, int]] = {}
        """The last micro-batch that the nodes had whole, by feed and query."""
        self._is_closed = False

    def order(self, name: str, timeout_s: float | None, to: str | None = None) -> FeedOrder:
        """Return what feeders are told; `Cluster.feed` says what is raised."""
        if self._spec.input_mode is not InputMode.SPARK:
            raise ConfigError(
                "this cluster reads its own data; launch it with input_mode='spark' to feed it"
            )
        if self._is_closed:
            raise FeedClosedError("the cluster has been shut down")
        if failure := self._controller.look(lambda view: failure_of(view.state)):
            raise failure
        timeout = self._spec.settings.feed_timeout_s if timeout_s is None else timeout_s
        if timeout <= 0:
            raise ConfigError(f"timeout_s={timeout} must be above zero seconds")
        world = self._world()
        members = world.fed
        if to is not None:
            members = tuple(m for m in world.members if m.role.name == to and m.data_address)
        if not members:
            roles = sorted({m.role.name for m in world.members if m.data_address})
            raise ConfigError(f"to={to!r}: no such node can be fed; choose one of {roles}")
        targets = feed_targets(members)
        return FeedOrder(name, 0, "", targets, self._token, timeout, world.generation)

    def feed(self, data: Any, epochs: int, order: FeedOrder, show: bool | None) -> FeedReport:
        """Feed `data`, see `Cluster.feed`.

        Args:
            show: a progress bar; `None` where somebody looks.
        """
        if epochs < 1:
            raise ConfigError(f"epochs={epochs} must be at least 1")
        self._check_no_stream(order.feed)
        data = listed(data, self._spec)
        with self._call(order, FeedBar(order.feed, epochs, show)) as call:
            return call.run(data, epochs)

    def open_stream(self, name: str, timeout_s: float | None, to: str | None) -> StreamFeed:
        """Return what feeds a stream, see `Cluster.open_stream`."""
        self._check_no_stream(name)

        @contextmanager
        def open_call(is_over: IsOver, rows: Mapping[str, int]) -> Iterator[FeedCall]:
            order, bar = self.order(name, timeout_s, to), FeedBar(name, 1, False)
            brought = {target.node_id: rows.get(target.name, 0) for target in order.targets}
            least = min(brought.values())
            order = replace(order, ahead={n: count - least for n, count in brought.items()})
            with self._call(order, bar) as call:
                yield replace(call, is_over=is_over, brought=brought)

        def forget() -> None:
            self._streams.pop(name, None)

        fed_batches = self._fed_batches.setdefault(name, {})
        stream = StreamFeed(name, self._controller, open_call, fed_batches, forget)
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

    def close(self) -> None:
        """Stop all streams, and give no more orders."""
        self._is_closed = True
        self.stop_streams()

    def _check_no_stream(self, name: str) -> None:
        if name in self._streams:
            raise ConfigError(
                f"feed {name!r} belongs to a stream until that has ended; stop its query first, or "
                "use a feed of another name"
            )

    @contextmanager
    def _call(self, order: FeedOrder, bar: FeedBar) -> Iterator[FeedCall]:
        """Wait for other calls of the feed to end, and prepare one."""
        name = order.feed
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            order = replace(order, epoch=self._epochs.get((name, order.generation), 0))

            def reserve(generation: int, next_epoch: int) -> None:
                self._epochs[name, generation] = next_epoch

            ids = {target.node_id for target in order.targets}
            members = tuple(m for m in self._world().members if m.node.node_id in ids)
            yield FeedCall(self._controller, self._executor, members, order, bar, reserve)
