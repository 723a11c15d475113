"""The feeds of a cluster, as its handle uses them: calls, streams, and their ends.

Runs in: driver

A stream feeds one micro-batch after the other, which the nodes read as one iteration:

    driver   feed(batch) ────── feed(batch) ────── idle ────────── feed(batch) ────── end
    nodes    epoch, continues │ epoch, continues │ wait for more │ epoch, continues │ no rows

At the end of each micro-batch all nodes know its number of steps, so no node waits within a step
for another one while the stream is idle.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from sparkdl.control.rows import CallShape
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FeedClosedError, SparkdlError
from sparkdl.core.paths import absolute_url
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.spelling import did_you_mean
from sparkdl.core.world import World
from sparkdl.driver.controller import Controller
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.feeds.coverage import READERS, SHUFFLES, FeedRequest
from sparkdl.driver.feeds.report import FeedReport, no_rows, not_fed
from sparkdl.driver.feeds.runner import EVERY, FeedRunner, JobThread, LongWait
from sparkdl.driver.feeds.state import FeedAsked, StreamAsked, StreamEndAsked
from sparkdl.driver.feeds.transitions import fed_members, feed_targets
from sparkdl.driver.lifecycle.policy import MAX_BACKOFF_S
from sparkdl.driver.lifecycle.state import failure_of, generation_of, has_ended
from sparkdl.driver.show import FeedBar
from sparkdl.driver.threads import begin
from sparkdl.driver.view import View
from sparkdl.feed.transfer.messages import FeedSpec
from sparkdl.storage.parquet.paths import parquet_paths
from sparkdl.storage.parquet.source import ParquetSource, list_files

_log = logging.getLogger(__name__)

_TURN_S = 0.5
"""How often a query is asked whether it is still active."""
_JOIN_S = 5.0
_SILENT_S = 10.0
"""How long a look at files is not worth a line of the log."""

T = TypeVar("T")


class Query(Protocol):
    """The part of pyspark's `StreamingQuery` used here. A query that has ended is not active."""

    @property
    def isActive(self) -> bool: ...  # noqa: D102, N802

    def stop(self) -> None: ...  # noqa: D102


class StreamFeed:
    """Feeds one stream; made by `Cluster.open_stream`. Methods may be called from any thread.

    Attributes:
        name: of the feed.
        error: the error that feeding ended with, if any.
    """

    def __init__(
        self, feeds: Feeds, runner: FeedRunner, name: str, timeout_s: float | None, to: str | None
    ) -> None:
        self.name = name
        self.error: Exception | None = None
        self._feeds = feeds
        self._controller = feeds.controller
        self._runner = runner
        self._timeout_s = timeout_s
        self._to = to
        self._stopped = threading.Event()
        self._end_lock = threading.Lock()
        self._has_ended = False
        self._query: Query | None = None
        self._thread: threading.Thread | None = None
        runner.ask(name, partial(StreamAsked, to=to))

    def feed(self, data: Any) -> bool:
        """Feed one micro-batch; blocks until the nodes have read it.

        Returns:
            Whether they have. If not, the stream is over: stopped, or no node wants more.

        Raises:
            SparkdlError: what `Cluster.feed` raises; then the stream is over as well.
        """
        if not self.is_wanted():
            return False
        try:
            request = FeedRequest(data, 1, self._timeout_s, self._to, is_micro_batch=True)
            report = self._feeds.feed_micro_batch(self.name, request)
        except Exception as error:
            self.error = error
            self._stopped.set()
            raise
        if self._is_over():
            # Cut short, so it does not count as read: Spark must not commit it.
            return False
        _log.info("Feed %r: a micro-batch of %d rows was read", self.name, report.rows_fed)
        return True

    def feed_batch(self, data: Any, query_id: str, batch_id: int) -> bool:
        """Feed a micro-batch as `feed` does, unless this cluster has had it already.

        Spark repeats the last micro-batch of a query that ended before it was committed.
        """
        fed_batches = self._feeds.fed_batches.setdefault(self.name, {})
        if batch_id <= fed_batches.get(query_id, -1):
            _log.info("Feed %r: skipped micro-batch %d, which was read before", self.name, batch_id)
            return True
        if not self.feed(data):
            return False
        # Only now: a micro-batch that was interrupted must be fed when Spark repeats it.
        fed_batches[query_id] = batch_id
        return True

    def is_wanted(self) -> bool:
        """Whether more is wanted: not stopped, no `terminate()` by a node, some node reads on."""
        return self._controller.look(self._wants)

    def failure(self) -> Exception | None:
        """Return why the stream broke: the failure of a node, or else the error of feeding."""
        return self._controller.look(lambda view: failure_of(view.state)) or self.error

    def watch(
        self, query: Query, thread: Callable[[Callable[[], None], str], threading.Thread]
    ) -> None:
        """Stop `query` when no more is wanted, and end the stream when the query has ended.

        Args:
            thread: makes a thread that may call Spark.
        """
        self._query = query
        self._thread = thread(self._watch, f"sparkdl-stream-{self.name}")
        self._thread.start()

    def stop(self) -> None:
        """Stop the query, if there is one, and end the stream.

        A micro-batch in progress is interrupted.
        """
        self._stop_feeding()
        try:
            if self._query is not None:
                self._query.stop()
        finally:
            # Also if Spark refuses: the nodes would wait for the next micro-batch for ever.
            self.end()
            # The watching thread may be the one that stops the stream, and cannot join itself.
            if self._thread not in (None, threading.current_thread()):
                self._thread.join(_JOIN_S)

    def end(self) -> None:
        """End the nodes' iteration over the stream; does nothing the second time."""
        self._stop_feeding()
        # The query's watcher, the user and the cluster's end may all end the stream at once.
        with self._end_lock:
            if self._has_ended:
                return
            self._has_ended = True
            with suppress(SparkdlError):  # of a cluster that has ended: no node reads
                ask = partial(StreamEndAsked, to=self._to)
                self._runner.ask(self.name, ask)
            self._feeds.forget_stream(self.name)

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._controller.wait_for(lambda view: not self._wants(view), Deadline.after(_TURN_S))
            if self._query is None or not _is_active(self._query):
                self.end()
            elif not self.is_wanted() and not self._stopped.is_set():
                self._query.stop()
                self.end()

    def _stop_feeding(self) -> None:
        self._stopped.set()
        self._runner.stop_stream(self.name)

    def _wants(self, view: View) -> bool:
        return not has_ended(view.state) and not self._is_over()

    def _is_over(self) -> bool:
        return self._stopped.is_set() or self._runner.is_stream_over(self.name)


def _is_active(query: Query) -> bool:
    try:
        return query.isActive
    except Exception:  # noqa: BLE001 (Spark itself is gone; which error varies)
        return False


class Feeds:
    """The feeding part of `Cluster`; its methods may be called from any thread.

    Args:
        world: returns the nodes as they are now.
    """

    def __init__(
        self, controller: Controller, executor: Executor, token: str, world: Callable[[], World]
    ) -> None:
        self._spec = controller.spec
        self.controller = controller
        self._executor = executor
        self._world = world
        self._streams: dict[str, StreamFeed] = {}
        self.fed_batches: dict[str, dict[str, int]] = {}
        """The last micro-batch that the nodes have read, by feed and query."""
        self._is_closed = False
        settings = self._spec.settings
        coordinator = controller.reached_at.url if controller.reached_at else ""
        self._feed_spec = FeedSpec(
            *("", 0, "", (), token, settings.feeding.timeout_s),
            host_timeout_s=settings.recovery.host_timeout_s,
            coordinator=coordinator,
            trust=controller.server.tls.trust if controller.server.tls else None,
        )
        if settings.max_restarts:
            # Feeders of inference wait for the next generation: its back-off, and the wait for lost
            # nodes.
            patience_s = settings.recovery.wait_s + 2 * MAX_BACKOFF_S
            self._feed_spec = replace(self._feed_spec, patience_s=patience_s)
        self._runner: FeedRunner | None = None
        if self._spec.is_fed:
            self._runner = FeedRunner(
                controller, executor, controller.checkpoints.coverage, self._feed_spec
            )

    def feed_spec(self, name: str, timeout_s: float | None, to: str | None = None) -> FeedSpec:
        """Return the instructions of feeders; raises what `Cluster.feed` does."""
        self._open_runner().raise_problem()
        timeout = self._spec.settings.feeding.timeout_s if timeout_s is None else timeout_s
        if timeout <= 0:
            raise ConfigError(f"timeout_s={timeout} must be above zero seconds")
        world = self._world()
        return replace(
            self._feed_spec,
            feed=name,
            targets=feed_targets(fed_members(world, to)),
            timeout_s=timeout,
            generation=world.generation,
        )

    def feed(self, name: str, request: FeedRequest, show: bool | None) -> FeedReport:
        """Feed data, see `Cluster.feed`.

        Args:
            show: a progress bar; `None` for one on terminals and in notebooks.
        """
        self.feed_spec(name, request.timeout_s, request.to)  # checks the arguments
        if request.epochs < 1:
            raise ConfigError(f"epochs={request.epochs} must be at least 1")
        if request.epochs > 1 and isinstance(request.data, Iterator):
            kind = type(request.data).__name__
            raise ConfigError(
                f"a {kind} can be read once, and epochs={request.epochs}; give a list"
            )
        if request.reader not in READERS:
            near = did_you_mean(request.reader, READERS)
            raise ConfigError(f"reader={request.reader!r} must be one of {READERS}{near}")
        if request.shuffle not in SHUFFLES:
            raise ConfigError(
                f"shuffle={request.shuffle!r} must be 'global' or None. To shuffle the rows that "
                "each node has, give shuffle= to ctx.batches"
            )
        self._check_no_stream(name)
        request = self._with_files(name, request)
        if isinstance(request.data, ParquetSource) and not request.data.num_rows:
            raise no_rows(name)
        return self._call(name, request, show)

    def open_stream(self, name: str, timeout_s: float | None, to: str | None) -> StreamFeed:
        """Open a stream, see `Cluster.open_stream`."""
        self._check_no_stream(name)
        self.feed_spec(name, timeout_s, to)  # checks the arguments
        stream = StreamFeed(self, self._open_runner(), name, timeout_s, to)
        self._streams[name] = stream
        return stream

    def feed_micro_batch(self, name: str, request: FeedRequest) -> FeedReport:
        """Feed one micro-batch of a stream."""
        self.feed_spec(name, request.timeout_s, request.to)  # checks the arguments
        return self._call(name, request, False)

    def forget_stream(self, name: str) -> None:
        """Note that a feed's stream has ended: the feed can be used for other calls."""
        self._streams.pop(name, None)

    def stop_streams(self, name: str | None = None) -> None:
        """Stop the stream of one feed, or all streams, and their queries."""
        for stream in list(self._streams.values()):
            if name in (None, stream.name):
                try:
                    stream.stop()
                except Exception:  # noqa: BLE001 (of Spark, which may be gone)
                    _log.warning(
                        "Stopping the query of feed %r failed. Stop it in Spark: query.stop()",
                        stream.name,
                        exc_info=True,
                    )

    def end(self, name: str | None = None, timeout_s: float | None = None) -> None:
        """Stop streams, and announce the end of a feed, or of all, see `FeedRunner.end`."""
        self.stop_streams(name)
        if self._runner is not None:
            self._runner.end(name or EVERY, timeout_s)

    def raise_problem(self) -> None:
        """Raise the error of feeding rows again in the background, if there is one."""
        if self._runner is not None:
            self._runner.raise_problem()

    def close(self) -> None:
        """Stop all streams, and feed nothing more."""
        self._is_closed = True
        self.stop_streams()
        if self._runner is not None:
            self._runner.close()

    def _open_runner(self) -> FeedRunner:
        """Return the runner of the feeds.

        Raises:
            ConfigError: if the cluster is not to be fed.
            FeedClosedError: if it was shut down.
            SparkdlError: if it has failed.
        """
        if self._runner is None:
            raise ConfigError(
                "this cluster reads its own data; launch it without Feeding(fed=False) to feed it"
            )
        if self._is_closed:
            raise FeedClosedError("the cluster has been shut down")
        if failure := self.controller.look(lambda view: failure_of(view.state)):
            raise failure
        return self._runner

    def _call(self, name: str, request: FeedRequest, show: bool | None) -> FeedReport:
        """Feed a call, in a thread that no interrupt reaches; return its report."""

        def call() -> FeedReport:
            carrier = JobThread(f"sparkdl-job-{name}", self._executor.thread)
            try:
                rows = partial(runner.rows_to_read, name)
                with FeedBar(name, request.epochs, show, rows) as bar:
                    in_vain = LongWait(self.controller, partial(self._not_fed, name, request.to))

                    def meanwhile() -> None:
                        self._show_rows(runner, name, bar)
                        in_vain.look()

                    ask = partial(FeedAsked, request=request)
                    report: FeedReport = runner.ask(name, ask, carrier, meanwhile)
                    self._show_rows(runner, name, bar, report)
                    return report
            finally:
                carrier.close()
                # After an error no job may be left behind that feeds rows of this call.
                carrier.join(partial(self._executor.cancel_feeds, name))

        runner = self._open_runner()
        # The user's thread only waits: an interrupt in the middle of drawing a bar, or of a call of
        # py4j, would leave locks taken.
        return begin(call, f"sparkdl-feed-{name}", self._executor.thread).result()

    def _with_files(self, name: str, request: FeedRequest) -> FeedRequest:
        """Return the request with Parquet files in place of the data, if the nodes read them.

        Raises:
            ConfigError: if files cannot be read, see `list_files`, or not by `reader`.
        """
        files, frame = request.data, None
        if parquet_paths(files) is not None:
            files = self._looked_up(name, partial(listed, files, self._spec))
        if isinstance(files, ParquetSource):
            if request.reader == "spark":
                raise ConfigError(
                    "reader='spark' is for DataFrames: give spark.read.parquet(…), or leave it out"
                )
        else:
            found = self._scanned(name, request)
            if found is None:
                return request
            files, frame = found, request.data if request.reader == "auto" else None
        shape = CallShape(1, {0: files.num_rows}, files.numbering)
        return replace(request, data=files, shape=shape, frame=frame)

    def _scanned(self, name: str, request: FeedRequest) -> ParquetSource | None:
        """Return the files behind a DataFrame; `None` if Spark must read it."""
        is_asked = request.reader == "nodes"
        # Only a DataFrame has a plan to follow. The error of other data is for `nodes` alone.
        if request.reader == "spark" or not (is_asked or hasattr(request.data, "mapInArrow")):
            return None
        look = partial(self._executor.scanned_files, request.data, not is_asked)
        try:
            found = self._looked_up(name, look)
        except ConfigError as error:
            if is_asked:
                raise ConfigError(
                    f"reader='nodes', but nodes cannot read these data themselves: {error}. Leave "
                    "it at 'auto', or give a DataFrame of spark.read.parquet(…), filtered and "
                    "selected at most"
                ) from None
            _log.info("Feed %r is read through Spark: %s", name, error)
            return None
        _log.info(
            "Feed %r is read by the nodes from the DataFrame's %d Parquet files, %d rows",
            *(name, len(found.files), found.num_rows),
        )
        return found

    def _looked_up(self, name: str, look: Callable[[Callable[[], bool]], T]) -> T:
        """Return what a look at files finds. The look ends with the call of `feed`.

        Args:
            look: is given a function that says whether its result is still wanted.
        """
        is_over = threading.Event()
        # In a thread, so that Ctrl-C ends the wait: a storage may not answer for long.
        outcome = begin(
            lambda: look(lambda: not is_over.is_set()),
            f"sparkdl-files-{name}",
            self._executor.thread,
        )
        try:
            if not outcome.wait(_SILENT_S):
                _log.warning(
                    "Feed %r: the driver is still reading the footers of the Parquet files. Fewer "
                    "and larger files need less time",
                    name,
                )
            return outcome.result()
        finally:
            is_over.set()

    def _show_rows(
        self, runner: FeedRunner, name: str, bar: FeedBar, report: FeedReport | None = None
    ) -> None:
        rows = report.rows_used if report else runner.rows_read(name)
        if rows is None:
            return
        first = self._world().members[0].node.node_id
        now = self.controller.look(lambda view: view.activity.get(first))
        bar.update(rows, now.numbers if now else {}, report is not None)

    def _not_fed(self, name: str, to: str | None, view: View) -> str:
        """Return the unfed nodes that wait for a feed, in words; empty after a restart."""
        world = getattr(view.state, "world", None)
        if world is None or generation_of(view.state):
            return ""
        fed = {member.node.node_id for member in fed_members(world, to)}
        return not_fed(self._spec, name, fed, view.feeds)

    def _check_no_stream(self, name: str) -> None:
        if name in self._streams:
            raise ConfigError(
                f"feed {name!r} belongs to a stream until that has ended; stop its query first, or "
                "use a feed of another name"
            )


def listed(data: Any, spec: ClusterSpec, is_wanted: Callable[[], bool] = lambda: True) -> Any:
    """Return the `ParquetSource` that `data` names, if it names files; else `data` itself.

    Raises:
        ConfigError: if there are no such files, or they cannot be read, see `list_files`.
    """
    named = parquet_paths(data)
    if named is None:
        return data
    paths = [absolute_url(path, spec.default_fs, spec.working_dir) for path in named.paths]
    return list_files(paths, named.columns, named.options, is_wanted)
