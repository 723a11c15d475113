"""The feeds of a cluster, as its handle uses them: calls, streams, and their ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from sparkdl.control.rows import CallShape
from sparkdl.core.errors import ConfigError, FeedClosedError
from sparkdl.core.files import absolute_url
from sparkdl.core.texts import did_you_mean
from sparkdl.core.world import World
from sparkdl.driver.controller import Controller
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.feeds.coverage import READERS, SHUFFLES, FeedRequest
from sparkdl.driver.feeds.report import FeedReport, no_rows
from sparkdl.driver.feeds.runner import ALL_FEEDS, FeedRunner, JobThread, StallWarning, nodes_now
from sparkdl.driver.feeds.transitions import fed_members, feed_targets
from sparkdl.driver.lifecycle.state import failure_of
from sparkdl.driver.show import FeedBar
from sparkdl.driver.threads import Outcome, begin
from sparkdl.driver.view import ClusterView
from sparkdl.feed.transfer.messages import FeedSpec
from sparkdl.storage.parquet.paths import parquet_paths
from sparkdl.storage.parquet.source import ParquetSource, list_files

_log = logging.getLogger(__name__)
_JOIN_S = 10.0
"""How long a call that has ended waits for the end of its Spark job, which is cancelled."""

_START_S = 60.0


class Feeds:
    """The feeding part of `Cluster`; its methods may be called from any thread."""

    def __init__(
        self, controller: Controller, executor: Executor, token: str, world: Callable[[], World]
    ) -> None:
        self._spec = controller.spec
        self.controller = controller
        self._executor = executor
        self._world = world
        self._queries: dict[Any, str] = {}
        """Spark's queries that feed, and the names of their feeds."""
        self._is_closed = False
        settings = self._spec.settings
        coordinator = controller.advertised_address.url if controller.advertised_address else ""
        self._feed_spec = FeedSpec(
            *("", 0, "", (), token, settings.feeding.timeout_s),
            host_timeout_s=settings.recovery.host_timeout_s,
            coordinator=coordinator,
            trust=controller.server.tls.trust if controller.server.tls else None,
            global_batch_size=settings.feeding.global_batch_size,
        )
        if settings.can_restart:
            # Feeders of inference wait for the next generation: for lost nodes, and its start.
            patience_s = settings.recovery.wait_s + _START_S
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
        nodes = len(self.feed_spec(name, request.timeout_s, request.to).targets)
        if request.epochs < 1:
            raise ConfigError(f"epochs={request.epochs} must be at least 1")
        if request.epochs > 1 and isinstance(request.data, Iterator):
            kind = type(request.data).__name__
            raise ConfigError(
                f"a {kind} can be read only once, but epochs={request.epochs}; give a list"
            )
        if request.reader not in READERS:
            near = did_you_mean(request.reader, READERS)
            raise ConfigError(f"reader={request.reader!r} must be one of {READERS}{near}")
        if request.shuffle not in SHUFFLES:
            raise ConfigError(
                f"shuffle={request.shuffle!r} must be 'global' or None. To shuffle the rows that "
                "each node has, give shuffle= to ctx.batches"
            )
        if request.seed and not (request.shuffle and self._feed_spec.global_batch_size):
            raise ConfigError(
                f"seed={request.seed} is of shuffle='global' in a fixed order: launch with "
                "Feeding(global_batch_size=…), or leave it out"
            )
        request = self._with_files(name, request, nodes)
        if isinstance(request.data, ParquetSource) and not request.data.num_rows:
            raise no_rows(name)
        return self._call(name, request, show)

    def train_stream(
        self, data: Any, name: str, timeout_s: float | None, to: str | None, **options: Any
    ) -> Any:
        def nodes() -> int:
            return len(self.feed_spec(name, timeout_s, to).targets)

        nodes()  # checks the arguments
        self._queries = {query: feed for query, feed in self._queries.items() if query.isActive}
        feed = partial(self.feed_micro_batch, name, timeout_s=timeout_s, to=to)
        query = self._executor.stream(data, feed, self.wants_more(name, to), nodes, **options)
        self._queries[query] = name
        return query

    def feed_micro_batch(
        self,
        name: str,
        data: Any,
        timeout_s: float | None = None,
        to: str | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Feed one micro-batch of a stream, as an epoch; its source brings it once.

        Once it is not wanted any more, the call ends with a FeedClosedError.
        """
        self.feed_spec(name, timeout_s, to)  # checks the arguments
        request = FeedRequest(data, 1, timeout_s, to, is_micro_batch=True)
        report = self._call(name, request, False, is_wanted)
        _log.info("Feed %r: a micro-batch of %d rows was read", name, report.rows_fed)

    def wants_more(self, name: str, to: str | None = None) -> Callable[[], bool]:
        """Return a function that says whether the nodes read on.

        They do not once the cluster has ended, a node has called `terminate()` since, or all left.
        """
        began = self.controller.look(partial(nodes_now, feed=name))

        def wants(view: ClusterView) -> bool:
            now = nodes_now(view, name)
            if now.problem is not None or now.world is None:
                return now.problem is None
            before = began.counts if now.generation == began.generation else {}
            ids = [member.node.node_id for member in fed_members(now.world, to)]
            is_terminated = any(
                count.closed_to > (before[n].closed_to if n in before else -1)
                for n, count in now.counts.items()
            )
            return not is_terminated and len(now.inactive(ids)) < len(ids)

        return lambda: self.controller.look(wants)

    def _stop_queries(self, name: str | None = None) -> list[Outcome[None]]:
        """Stop the queries that feed `name`, or all, in threads: a call of py4j may take long."""
        found = [query for query, feed in self._queries.items() if name in (None, feed)]
        for query in found:
            del self._queries[query]
        return [begin(query.stop, "sparkdl-stop-stream", self._executor.thread) for query in found]

    def end(self, name: str | None = None, timeout_s: float | None = None) -> None:
        """Stop streams, and announce the end of a feed, or of all, see `FeedRunner.end`."""
        for stop in self._stop_queries(name):
            try:
                stop.result(timeout_s)
            except Exception:  # noqa: BLE001 (of Spark, which may be gone)
                _log.warning("Stopping a query failed. Stop it in Spark", exc_info=True)
        if self._runner is not None:
            self._runner.end(name or ALL_FEEDS, timeout_s)

    def raise_problem(self) -> None:
        if self._runner is not None:
            self._runner.raise_problem()

    def close(self) -> None:
        self._is_closed = True
        self._stop_queries()
        if self._runner is not None:
            self._runner.close()

    def _open_runner(self) -> FeedRunner:
        if self._runner is None:
            raise ConfigError(
                "this cluster reads its own data; launch it without Feeding(fed=False) to feed it"
            )
        if self._is_closed:
            raise FeedClosedError("the cluster has been shut down")
        if failure := self.controller.look(lambda view: failure_of(view.state)):
            raise failure
        return self._runner

    def _call(
        self,
        name: str,
        request: FeedRequest,
        show: bool | None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> FeedReport:
        """Feed a call, in a thread that no interrupt reaches; return its report."""

        def call() -> FeedReport:
            job_thread = JobThread(f"sparkdl-job-{name}", self._executor.thread)
            try:
                rows = partial(runner.rows_to_read, name)
                with FeedBar(name, request.epochs, show, rows) as bar:
                    stall = StallWarning(self.controller)

                    def on_poll() -> bool:
                        self._show_rows(runner, name, bar)
                        stall.look()
                        return is_wanted()

                    report = runner.ask(name, request, job_thread, on_poll)
                    self._show_rows(runner, name, bar, report)
                    return report
            finally:
                # After an error no job should be left behind that feeds rows of this call.
                job_thread.close(_JOIN_S)

        runner = self._open_runner()
        # The user's thread only waits: an interrupt in the middle of drawing a bar, or of a call of
        # py4j, would leave locks taken.
        return begin(call, f"sparkdl-feed-{name}", self._executor.thread).result()

    def _with_files(self, name: str, request: FeedRequest, nodes: int) -> FeedRequest:
        """Return the request with Parquet files in place of the data, if the nodes read them."""
        files = request.data
        if (named := parquet_paths(files)) is not None:
            base = self._spec.default_fs, self._spec.working_dir
            paths = [absolute_url(path, *base) for path in named.paths]
            look = partial(list_files, paths, named.columns, named.options)
            files = self._looked_up(name, look, nodes)
        if isinstance(files, ParquetSource):
            if request.reader == "spark":
                raise ConfigError(
                    "reader='spark' is for DataFrames: give spark.read.parquet(…), or leave it out"
                )
        elif (files := self._scanned(name, request, nodes)) is None:
            return request
        shape = CallShape(1, {0: files.num_rows}, files.numbering)
        return replace(request, data=files, shape=shape)

    def _scanned(self, name: str, request: FeedRequest, nodes: int) -> ParquetSource | None:
        is_asked = request.reader == "nodes"
        # Only a DataFrame has a plan to follow. The error of other data is for `nodes` alone.
        if request.reader == "spark" or not (is_asked or hasattr(request.data, "mapInArrow")):
            return None
        look = partial(self._executor.scanned_files, request.data, not is_asked)
        try:
            found = self._looked_up(name, look, nodes)
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

    def _looked_up(self, name: str, look: Callable[[], ParquetSource], nodes: int) -> ParquetSource:
        # In a thread, so that Ctrl-C ends the wait: a storage may not answer for long.
        found = begin(look, f"sparkdl-files-{name}", self._executor.thread).result()
        found.check_fits(nodes)
        return found

    def _show_rows(
        self, runner: FeedRunner, name: str, bar: FeedBar, report: FeedReport | None = None
    ) -> None:
        rows = report.rows_used if report else runner.rows_read(name)
        if rows is None:
            return
        first = self._world().members[0].node.node_id
        now = self.controller.look(lambda view: view.activity.get(first))
        bar.update(rows, now.numbers if now else {}, report is not None)
