"""A query of Structured Streaming whose micro-batches feed a cluster, each as an epoch.

Runs in: driver
"""

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


class _Batches:
    """The function of `foreachBatch`, called in the query's own thread of the JVM.

    Args:
        session: the user's. A micro-batch has a copy of it, which `createDataFrame` would make the
            active session of the whole program.
        feed: feeds a DataFrame; returns when the nodes have read it.
        is_wanted: whether the nodes read on.
        nodes: returns how many there are.
    """

    def __init__(
        self,
        session: SparkSession,
        feed: Callable[[Any], object],
        is_wanted: Callable[[], bool],
        nodes: Callable[[], int],
    ) -> None:
        self._session = session
        self._feed, self._is_wanted, self._nodes = feed, is_wanted, nodes
        self._waiting: list[Any] = []
        self.query: Future[StreamingQuery] = Future()

    def __call__(self, data: DataFrame, batch_id: int) -> None:
        query = self.query.result(_STARTED_S)
        try:
            if self._is_used(data):
                return
        except Exception:
            if query.isActive:
                raise
        # A return would commit rows that no node has used. `stop` is on its way from `watch`.
        stopped = Deadline.after(_STARTED_S)
        while query.isActive and not stopped.has_passed:
            threading.Event().wait(_LOOK_S)
        raise QueryStoppedError(_INTERRUPTED)

    def _is_used(self, data: DataFrame) -> bool:
        """Feed the rows, or have them wait if some node would get none; return whether it was so.

        A step of nodes that train in step takes a row of each.
        """
        nodes = self._nodes()
        if self._waiting:
            data = data.union(self._session.createDataFrame(self._waiting, data.schema))
        first = data.take(nodes)
        if len(first) < nodes:
            self._waiting = first
            return True
        self._feed(data)
        if not self._is_wanted():
            return False
        self._waiting = []
        return True

    def watch(self) -> None:
        """Stop the query when no more is wanted, also while it is idle."""
        query = self.query.result()
        with suppress(Exception):  # of Spark, which is gone
            while query.isActive and self._is_wanted():
                threading.Event().wait(_LOOK_S)
            query.stop()


def start_query(
    data: Any,
    thread: Thread,
    *target: Any,
    checkpoint_location: str | None,
    trigger: str | Mapping[str, Any] | None,
    query_name: str | None,
) -> StreamingQuery:
    """Start a query of a classic session that feeds `target`, see `Executor.stream`.

    Raises:
        ConfigError: if `data` is no streaming DataFrame.
    """
    if not (isinstance(data, DataFrame) and data.isStreaming):
        raise ConfigError(
            f"train_stream takes a streaming DataFrame, of spark.readStream, not this "
            f"{type(data).__name__}; cluster.feed takes others"
        )
    batches = _Batches(data.sparkSession, *target)
    writer: Any = data.writeStream.foreachBatch(batches)
    if checkpoint_location is not None:
        writer = writer.option("checkpointLocation", checkpoint_location)
    if query_name is not None:
        writer = writer.queryName(query_name)
    if trigger is not None:
        given = {"processingTime": trigger} if isinstance(trigger, str) else trigger
        writer = writer.trigger(**given)
    query: StreamingQuery = writer.start()
    batches.query.set_result(query)
    thread(batches.watch, f"sparkdl-stream-{query.id}").start()
    return query
