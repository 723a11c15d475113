"""A query of Structured Streaming whose micro-batches feed a cluster, each as an epoch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, SparkdlError
from sparkdl.driver.threads import Thread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_STARTED_S = 60.0
_LOOK_S = 0.5
_INTERRUPTED = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling z:java.lang.Thread.sleep: "
    "java.lang.InterruptedException"
)
"""By this text Spark distinguishes a stop from a failure: `StreamExecution.PROXY_ERROR`."""


class QueryStoppedError(SparkdlError):
    """The micro-batch was not used as a whole, since its query was stopped."""


def start_query(
    data: Any,
    thread: Thread,
    feed: Callable[[Any], object],
    is_wanted: Callable[[], bool],
    nodes: Callable[[], int],
    *,
    checkpoint_location: str | None,
    trigger: str | Mapping[str, Any] | None,
    query_name: str | None,
) -> StreamingQuery:
    """Start a query of a classic session whose micro-batches are fed, see `Executor.stream`.

    Raises:
        ConfigError: if `data` is no streaming DataFrame.
    """
    if not (isinstance(data, DataFrame) and data.isStreaming):
        raise ConfigError(
            f"train_stream takes a streaming DataFrame, of spark.readStream, not this "
            f"{type(data).__name__}; cluster.feed takes others"
        )
    started: Future[StreamingQuery] = Future()

    def watch() -> None:
        with suppress(Exception):  # of Spark, which is gone
            while query.isActive and is_wanted():
                threading.Event().wait(_LOOK_S)
            query.stop()

    take = _batch_function(data.sparkSession, started, feed, is_wanted, nodes)
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


def _batch_function(
    session: SparkSession,
    started: Future[StreamingQuery],
    feed: Callable[[Any], object],
    is_wanted: Callable[[], bool],
    nodes: Callable[[], int],
) -> Callable[[DataFrame, int], None]:
    """Return what `foreachBatch` calls in the query's own thread of the JVM.

    Args:
        session: the user's. `createDataFrame` would make a micro-batch's copy the active one.
    """
    waiting: list[Any] = []

    def is_used(batch: DataFrame) -> bool:
        # A step of nodes that train in step takes a row of each: fewer rows wait for more.
        if waiting:
            batch = batch.union(session.createDataFrame(waiting, batch.schema))
        count = nodes()
        first = batch.take(count)
        if len(first) >= count:
            feed(batch)
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
        stopped = Deadline.after(_STARTED_S)
        while query.isActive and not stopped.has_passed:
            threading.Event().wait(_LOOK_S)
        raise QueryStoppedError(_INTERRUPTED)

    return take
