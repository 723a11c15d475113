"""The feeds of a cluster, as its handle uses them: calls, streams, and their ends.

Runs in: driver
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from sparkdl.control.coverage import UNKNOWN, CallShape
from sparkdl.core.errors import ConfigError, FeedClosedError
from sparkdl.core.paths import absolute_url
from sparkdl.core.spec import ClusterSpec, InputMode
from sparkdl.core.world import World
from sparkdl.driver.controller import Controller
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.feeds.calls import FeedRequest
from sparkdl.driver.feeds.report import FeedReport
from sparkdl.driver.feeds.runner import EVERY, FeedRunner, JobThread
from sparkdl.driver.feeds.state import FeedAsked
from sparkdl.driver.feeds.streaming import StreamFeed
from sparkdl.driver.feeds.transitions import fed_members, feed_targets
from sparkdl.driver.lifecycle.outcome import failure_of
from sparkdl.driver.lifecycle.policy import MAX_BACKOFF_S
from sparkdl.driver.show.progress import FeedBar
from sparkdl.driver.threads import run_aside
from sparkdl.feed.parquet.paths import parquet_paths
from sparkdl.feed.parquet.source import ParquetSource, list_files
from sparkdl.feed.transfer.request import FeedSpec

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
        self._spec = controller.spec
        self._controller = controller
        self._executor = executor
        self._world = world
        self.books = controller.checkpoints.books
        self._streams: dict[str, StreamFeed] = {}
        self._fed_batches: dict[str, dict[str, int]] = {}
        """The last micro-batch that the nodes had whole, by feed and query."""
        self._is_closed = False
        settings = self._spec.settings
        coordinator = controller.address.url if controller.address else ""
        self._order = FeedSpec(
            "", 0, "", (), token, settings.feed_timeout_s, coordinator=coordinator
        )
        if settings.max_restarts:
            patience_s = settings.elastic_timeout_s + 2 * MAX_BACKOFF_S
            self._order = replace(self._order, patience_s=patience_s)
        self._runner: FeedRunner | None = None
        if self._spec.input_mode is InputMode.SPARK:
            self._runner = FeedRunner(controller, executor, self.books, self._order)

    def order(self, name: str, timeout_s: float | None, to: str | None = None) -> FeedSpec:
        """Return what feeders are told; `Cluster.feed` says what is raised."""
        self._open_runner().raise_problem()
        timeout = self._spec.settings.feed_timeout_s if timeout_s is None else timeout_s
        if timeout <= 0:
            raise ConfigError(f"timeout_s={timeout} must be above zero seconds")
        world = self._world()
        return replace(
            self._order,
            feed=name,
            targets=feed_targets(fed_members(world, to)),
            timeout_s=timeout,
            generation=world.generation,
        )

    def feed(self, name: str, asked: FeedRequest, show: bool | None) -> FeedReport:
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
        return self._call(name, replace(asked, data=data, shape=shape), show)

    def open_stream(self, name: str, timeout_s: float | None, to: str | None) -> StreamFeed:
        """Return what feeds a stream, see `Cluster.open_stream`."""
        self._check_no_stream(name)
        self.order(name, timeout_s, to)  # raises what is wrong

        def feed(data: Any) -> FeedReport:
            self.order(name, timeout_s, to)
            return self._call(name, FeedRequest(data, 1, timeout_s, to, is_micro_batch=True), False)

        fed_batches = self._fed_batches.setdefault(name, {})

        def forget() -> None:
            self._streams.pop(name, None)

        runner = self._open_runner()
        stream = StreamFeed(name, to, self._controller, runner, feed, fed_batches, forget)
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
        """Stop streams, and tell the nodes that a feed, or all, have ended: `FeedRunner.end`."""
        self.stop_streams(name)
        if self._runner is not None:
            self._runner.end(name or EVERY, timeout_s)

    def raise_problem(self) -> None:
        """Raise what feeding rows again has ended with, in the background."""
        if self._runner is not None:
            self._runner.raise_problem()

    def close(self) -> None:
        """Stop all streams, and give no more orders."""
        self._is_closed = True
        self.stop_streams()
        if self._runner is not None:
            self._runner.close()

    def _open_runner(self) -> FeedRunner:
        """Return what feeds.

        Raises:
            ConfigError: if the cluster is not to be fed.
            FeedClosedError: if it was shut down.
            SparkdlError: if it has failed.
        """
        if self._runner is None:
            raise ConfigError(
                "this cluster reads its own data; launch it with input_mode='spark' to feed it"
            )
        if self._is_closed:
            raise FeedClosedError("the cluster has been shut down")
        if failure := self._controller.look(lambda view: failure_of(view.state)):
            raise failure
        return self._runner

    def _call(self, name: str, asked: FeedRequest, show: bool | None) -> FeedReport:
        """Have a call fed, in a thread that no interrupt reaches; return its report."""

        def call() -> FeedReport:
            carrier = JobThread(f"sparkdl-job-{name}", self._executor.thread)
            try:
                rows, hide_others = partial(runner.rows_to_read, name), self._executor.hide_progress
                with FeedBar(name, asked.epochs, show, rows, hide_others) as bar:
                    show_rows = partial(self._show_rows, name, bar)
                    ask = partial(FeedAsked, asked=asked)
                    report: FeedReport = runner.ask(name, ask, carrier, show_rows)
                    show_rows(is_last=True)
                    return report
            finally:
                carrier.close()
                carrier.join(partial(self._executor.cancel_feeds, name))

        runner = self._open_runner()
        return run_aside(call, f"sparkdl-feed-{name}", self._executor.thread)

    def _show_rows(self, name: str, bar: FeedBar, is_last: bool = False) -> None:
        first = self._world().members[0].node.node_id
        counts, now = self._controller.look(
            lambda view: (dict(view.feeds), view.activity.get(first))
        )
        rows = sum(each.rows_consumed for (_, feed), each in counts.items() if feed == name)
        bar.update(rows, now.metrics if now else {}, is_last)

    def _check_no_stream(self, name: str) -> None:
        if name in self._streams:
            raise ConfigError(
                f"feed {name!r} belongs to a stream until that has ended; stop its query first, or "
                "use a feed of another name"
            )


def listed(data: Any, spec: ClusterSpec) -> Any:
    """Return the `ParquetSource` that `data` names, if it names files; else `data` itself.

    Raises:
        ConfigError: if there are no such files, or they cannot be read, see `list_files`.
    """
    asked = parquet_paths(data)
    if asked is None:
        return data
    paths = [absolute_url(path, spec.default_fs, spec.working_dir) for path in asked.paths]
    return list_files(paths, asked.columns, asked.options)
