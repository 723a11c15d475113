"""Nodes as tasks of an ordinary Spark job, feeders as tasks of further jobs."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, SparkSession

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, LaunchError, SparkdlError
from sparkdl.core.jobs import cancel_jobs, context_of, feeding_jobs, named_jobs, tagged_jobs
from sparkdl.core.options import Placement
from sparkdl.core.spec import ClusterSpec, NodeSpec
from sparkdl.core.texts import listed
from sparkdl.driver.executors.executor import Executor, Launch
from sparkdl.driver.executors.local import LocalExecutor
from sparkdl.driver.executors.parquet_scan import scanned_files
from sparkdl.driver.executors.scored import addressed, distinct_columns, scored
from sparkdl.driver.executors.sessions import (
    default_fs,
    driver_host,
    encrypting_setting,
    inheriting_thread,
    is_rdd,
    session_of,
)
from sparkdl.driver.slots.lost_hosts import leave_host
from sparkdl.driver.slots.placement import node_profile, placement_of, read_topology
from sparkdl.driver.slots.spark_errors import explain_job_failure
from sparkdl.driver.threads import Thread
from sparkdl.feed.transfer.feeder import BATCH_NBYTES, FED_SCHEMA, FeedDataFrame, FeedRdd
from sparkdl.feed.transfer.infer_task import InferRdd
from sparkdl.feed.transfer.messages import FedPartition, FeedSpec
from sparkdl.node.task import NODE_SCHEMA, NodeTask, parse_problem
from sparkdl.spark_versions import collect_in_arrow
from sparkdl.storage.parquet.source import ParquetSource
from sparkdl.values.tables import TABLES, holds_tables

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger(__name__)
_JOIN_S = 5.0
_LOST_S = 1.0
_STARTED_S = 60.0
_LOOK_S = 0.5
_INTERRUPTED = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling z:java.lang.Thread.sleep: "
    "java.lang.InterruptedException"
)
"""By this text Spark distinguishes a stop from a failure: `StreamExecution.PROXY_ERROR`."""
_gathering = threading.Lock()


class SparkExecutor(Executor):
    """Starts nodes through `spark`; feeds in the threads that call `feed`."""

    def __init__(
        self, spark: SparkSession, cluster_id: str, profile: ResourceProfile | None
    ) -> None:
        self._spark = spark
        self._profile = profile
        self._group = f"sparkdl {cluster_id}"
        self._nodes_tag = f"sparkdl-nodes-{cluster_id}"
        self._feed_tag = f"sparkdl-feed-{cluster_id}"
        self._jobs: dict[threading.Thread, set[NodeSpec]] = {}
        self._lock = threading.Lock()
        self._relaunches: queue.SimpleQueue[Sequence[NodeSpec]] = queue.SimpleQueue()
        self._relaunch_thread: threading.Thread | None = None
        self._context = context_of(spark)
        # For parameter servers on the driver's machine, and for tables of this process.
        self._local = LocalExecutor()
        self._has_left_host = False

    def driver_host(self) -> str:
        return driver_host(self._spark)

    def encrypting_setting(self) -> str:
        return encrypting_setting(self._spark)

    def gathering(self) -> threading.Lock:
        """Return the lock of this program's launches.

        Without it, two clusters that start at once might each get a part of the slots, and both
        wait for the rest until their timeouts.
        """
        if _gathering.locked():
            _log.info("%s waits until the nodes of another launch have gathered", self._group)
        return _gathering

    def start(self, launch: Launch, on_broken: Callable[[SparkdlError], object]) -> None:
        if launch.spec.driver_nodes:
            self._local.start(launch, on_broken)
        self._submit(launch, launch.spec.nodes[launch.spec.driver_nodes :], on_broken)

        # A thread of its own submits later jobs: it has this thread's local properties, and the
        # controller's loop must not wait for py4j.
        def relaunch() -> None:
            while wanted := self._relaunches.get():
                # Spark repeats the tasks of a running job: only other nodes need another job.
                with self._lock:
                    carried = set().union(*self._jobs.values())
                if lost := [node for node in wanted if node not in carried]:
                    self._submit(launch, lost, on_broken)

        self._relaunch_thread = self.thread(relaunch, f"sparkdl-relaunch-{launch.spec.cluster_id}")
        self._relaunch_thread.start()

    def relaunch(self, nodes: Sequence[NodeSpec]) -> None:
        self._local.relaunch([node for node in nodes if self._local.has(node)])
        if elsewhere := [node for node in nodes if not self._local.has(node)]:
            self._relaunches.put(elsewhere)

    def forget_task(self, node: NodeSpec) -> None:
        with self._lock:
            for nodes in self._jobs.values():
                nodes.discard(node)

    def leave_host(self, host: str) -> None:
        """Exclude the host in a thread; Spark Connect has no interface for it."""
        sc = self._context
        if sc is None:
            return
        self._has_left_host = True

        def leave() -> None:
            try:
                leave_host(sc, host)
            except Exception:  # noqa: BLE001 (Spark is ending, perhaps; which error varies)
                _log.debug("Spark may start tasks on %s", host, exc_info=True)

        self.thread(leave, f"sparkdl-leave-{host}").start()

    def _submit(
        self, launch: Launch, nodes: Sequence[NodeSpec], on_broken: Callable[[SparkdlError], object]
    ) -> None:
        spec = launch.spec
        node_ids = tuple(node.node_id for node in nodes)
        with self._lock:
            is_again = bool(self._jobs)
        what = f"restarted nodes: {listed([node.name for node in nodes])}" if is_again else "nodes"
        common = (launch.url, launch.token, spec, launch.payload)
        task = NodeTask(*common, node_ids, launch.tls)
        carried = set(nodes)

        def run() -> None:
            try:
                with self._jobs_of(what, self._nodes_tag):
                    tasks = self._spark.range(len(nodes), numPartitions=len(nodes))
                    collect_in_arrow(tasks, task, NODE_SCHEMA, self._profile)
            except Exception as error:  # noqa: BLE001 (whatever it is, the cluster fails of it)
                _log.debug("The job of the nodes failed", exc_info=True)
                problem: SparkdlError | None = explain_job_failure(error)
            else:  # a node may have been lost meanwhile
                ended = LaunchError("the job of the nodes has ended")
                problem = ended if spec.settings.can_restart else None
            with self._lock:
                carried.clear()  # before `on_broken`, which asks whether a job brings them back
            if problem is not None:
                on_broken(problem)

        job = self.thread(run, f"sparkdl-nodes-{spec.cluster_id}")
        with self._lock:
            # Before the start: a question whether a job brings these nodes back must find it.
            self._jobs[job] = carried
        job.start()

    def feed(self, data: Any, spec: FeedSpec) -> list[FedPartition]:
        """Run one Spark job in the calling thread, with its local properties.

        Tables of this process take no job: their rows go to the nodes from here.
        """
        if holds_tables(data):
            return self._local.feed(data, spec)
        try:
            return self._fed(data, spec)
        except Exception as error:
            if problem := parse_problem(str(error)):  # of the data, which a task has found
                raise problem.at_driver() from None
            raise

    def _fed(self, data: Any, spec: FeedSpec) -> list[FedPartition]:
        first, last = spec.epoch, max(spec.epoch, spec.last_epoch)
        epochs = f"epochs {first}-{last}" if last > first else f"epoch {first}"
        what = f"feed {spec.feed!r}, {epochs}"
        # By one tag all feeds are cancelled, by the other this feed alone.
        tags = (self._feed_tag, self._tag_of(spec.feed))
        if is_rdd(data):
            spec.check_partitions(data.getNumPartitions())
            with self._jobs_of(what, *tags), feeding_jobs(self._spark, BATCH_NBYTES):
                fed: list[FedPartition] = data.mapPartitions(FeedRdd(spec)).collect()
                return fed
        if not _is_dataframe(data):
            raise ConfigError(
                f"a {type(data).__module__}.{type(data).__name__} cannot be fed; "
                f"give a DataFrame or an RDD of Spark, files by sparkdl.parquet, {TABLES}"
            )
        if data.isStreaming:
            raise ConfigError(
                "a streaming DataFrame has no end, so cluster.feed cannot feed it: call "
                "cluster.train_stream(df)"
            )
        with self._jobs_of(what, *tags), feeding_jobs(self._spark, BATCH_NBYTES):
            task = FeedDataFrame(spec, distinct_columns(data))
            rows = addressed(data)[0].mapInArrow(task, FED_SCHEMA).collect()
        return [FedPartition(**row.asDict()) for row in rows]

    def stream(self, data: Any, *target: Any, **options: Any) -> StreamingQuery:
        if self._context is None:
            raise ConfigError(
                "train_stream needs a classic session: Spark Connect calls foreachBatch in a "
                "process of its server. Run the program with spark-submit, or call cluster.feed "
                "for the rows that have arrived"
            )
        return _start_query(data, self.thread, *target, **options)

    def scanned_files(self, data: Any, is_local: bool) -> ParquetSource:
        return scanned_files(data, is_local)

    def infer(self, data: Any, spec: FeedSpec, schema: Any) -> Any:
        if _is_dataframe(data):
            return scored(data, spec, schema)
        if not is_rdd(data):
            raise ConfigError(f"inference takes a DataFrame or an RDD, not {type(data).__name__}")
        if schema is not None:
            raise ConfigError(
                f"schema={schema!r} is for a DataFrame; leave it out for an RDD, and call "
                "createDataFrame with the results"
            )
        return data.mapPartitions(InferRdd(spec))

    def thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        return inheriting_thread(self._spark, run, name)

    def cancel_feeds(self, feed: str | None = None) -> None:
        self._local.cancel_feeds(feed)
        cancel_jobs(self._spark, self._feed_tag if feed is None else self._tag_of(feed))

    @contextmanager
    def _jobs_of(self, what: str, *tags: str) -> Iterator[None]:
        with tagged_jobs(self._spark, *tags), named_jobs(self._spark, self._group, what):
            yield

    def _tag_of(self, feed: str) -> str:
        return f"{self._feed_tag}-{feed.encode().hex()}"  # a tag may not hold a comma

    def close(self, deadline: Deadline) -> None:
        """Wait for the nodes' job, which ends with its agents; cancel it if it stays."""
        self._local.close(deadline)
        if self._relaunch_thread is None:
            return
        # Ends the thread, which might otherwise submit another job.
        self._relaunches.put(())
        self._relaunch_thread.join(deadline.wait_s)
        with self._lock:
            jobs = tuple(self._jobs)
        # A task on a host that was given up does not end before its heartbeat times out.
        until = Deadline.after(_LOST_S) if self._has_left_host else deadline
        for job in jobs:
            job.join(until.wait_s)
        if any(job.is_alive() for job in jobs):
            # After a lost host this is expected, and the log has named the host.
            level = logging.DEBUG if self._has_left_host else logging.WARNING
            _log.log(level, "The job of the nodes did not end in time and is cancelled")
            cancel_jobs(self._spark, self._nodes_tag)
            for job in jobs:
                job.join(_JOIN_S)


class QueryStoppedError(SparkdlError):
    """The micro-batch was not used as a whole, since its query was stopped."""


def _start_query(  # noqa: C901 (small functions that share one query)
    data: Any,
    thread: Thread,
    feed: Callable[..., object],
    is_wanted: Callable[[], bool],
    nodes: Callable[[], int],
    *,
    checkpoint_location: str | None,
    trigger: str | Mapping[str, Any] | None,
    query_name: str | None,
) -> StreamingQuery:
    if not (isinstance(data, DataFrame) and data.isStreaming):
        raise ConfigError(
            "train_stream takes a streaming DataFrame, as spark.readStream makes it, not this "
            f"{type(data).__name__}; call cluster.feed with other data"
        )
    # With a micro-batch's copy `createDataFrame` would make that the active session.
    session, waiting = data.sparkSession, list[Any]()
    stopped = threading.Event()
    started: Future[StreamingQuery] = Future()

    def is_used(batch: DataFrame) -> bool:
        # A step of nodes that train in step takes a row of each: fewer rows wait for more.
        if waiting:
            batch = batch.union(session.createDataFrame(waiting, batch.schema))
        count = nodes()
        first = batch.take(count)
        if len(first) >= count:
            # A stop by the user has to end a call that waits for the nodes.
            feed(batch, is_wanted=lambda: not stopped.is_set())
            if not is_wanted():
                return False
            first = []
        waiting[:] = first
        return True

    def take(batch: DataFrame, _number: int) -> None:
        query = started.result(_STARTED_S)
        try:
            if is_used(batch):
                return
        except Exception:
            if query.isActive:
                raise
        # A return would commit rows that no node has used. `stop` is on its way from `watch`.
        deadline = Deadline.after(_STARTED_S)
        while query.isActive and not deadline.has_passed:
            threading.Event().wait(_LOOK_S)
        raise QueryStoppedError(_INTERRUPTED)

    def watch() -> None:
        with suppress(Exception):  # of Spark, which is gone
            while query.isActive and is_wanted():
                threading.Event().wait(_LOOK_S)
            is_over = not is_wanted()
            if not is_over:
                stopped.set()
            query.stop()
            if waiting and not is_over:
                text = "Query %s ended: %d rows too few for a step are committed and may be unused"
                _log.warning(text, query.id, len(waiting))

    writer: Any = data.writeStream.foreachBatch(take)
    if checkpoint_location is not None:
        writer = writer.option("checkpointLocation", checkpoint_location)
    if trigger is not None:
        given = {"processingTime": trigger} if isinstance(trigger, str) else trigger
        writer = writer.trigger(**given)
    query: StreamingQuery = writer.start(queryName=query_name)
    started.set_result(query)
    thread(watch, f"sparkdl-stream-{query.id}").start()
    return query


def _is_dataframe(data: Any) -> bool:
    return isinstance(data, DataFrame) or hasattr(data, "mapInArrow")


def create_executor(
    spark: SparkSession | SparkContext | None, spec: ClusterSpec
) -> tuple[SparkExecutor, ClusterSpec]:
    """Check that the cluster can hold the nodes, and choose how."""
    session = session_of(spark)
    topology = read_topology(session, spec, spec.settings.start_timeout_s)
    plan = placement_of(session, spec, topology)
    placement: Placement = "attached" if plan.is_attached else "detached"
    _log.info("Cluster %s: placement is %s: %s", spec.cluster_id, placement, plan.why)
    profile = node_profile(plan, topology.task_cpus if topology else 1)
    executor = SparkExecutor(session, spec.cluster_id, profile)
    return executor, replace(spec, default_fs=default_fs(session), placement=placement)
