"""A query of Structured Streaming whose micro-batches feed a cluster.

Runs in: driver
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FeedClosedError, SparkdlError
from sparkdl.driver.executors.executor import StreamOptions
from sparkdl.driver.feeds.feeds import StreamFeed
from sparkdl.driver.threads import Thread

_STARTED_S = 60.0
_STOPPED_MS = 60_000
_INTERRUPTED = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling z:java.lang.Thread.sleep: "
    "java.lang.InterruptedException"
)
"""By this text Spark distinguishes a stop from a failure: `StreamExecution.PROXY_ERROR`.

It looks for them by an expression that overflows the stack on the long trace of the real error.
"""


class QueryStoppedError(SparkdlError):
    """The micro-batch was cut short, since its query was stopped."""


if TYPE_CHECKING:
    Query = StreamingQuery
else:
    Query = object  # the class of Spark Connect's has no base with the other


class FeedQuery(Query):
    """Spark's `StreamingQuery`, linked to the cluster that it feeds.

    It raises the failure of a node in place of Spark's error. `stop()` also ends the nodes'
    iteration.
    """

    _stream: StreamFeed

    def stop(self) -> None:
        """Stop the query; returns when it has ended.

        A micro-batch that is being fed is cut short and not committed. The nodes read the rows that
        they have; then their iteration is over.
        """
        self._stream.stop()

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: N802
        """Wait until the query has ended; return whether it has, if a timeout is given.

        Raises:
            NodeFailedError: if a node failed, which has ended the query.
            StreamingQueryException: if the query failed otherwise.
        """
        return self._waited(lambda: super(FeedQuery, self).awaitTermination(timeout))  # type: ignore[arg-type]

    def processAllAvailable(self) -> None:  # noqa: N802
        """Wait until the nodes have read all that is there now; raises as `awaitTermination`."""
        self._waited(super().processAllAvailable)

    def exception(self) -> Exception | None:  # type: ignore[override]
        """Return why the query failed: the nodes' failure, or else Spark's error; or `None`."""
        return self._stream.failure() or super().exception()

    def _waited(self, wait: Callable[[], bool | None]) -> bool | None:
        try:
            answer = wait()
        except StreamingQueryException:
            # The query has ended without the stream, whose nodes must not wait for more.
            self._stream.end()
            if failure := self._stream.failure():
                raise failure from None
            raise
        if not self.isActive:
            self._stream.end()
            if failure := self._stream.failure():
                raise failure
        return answer


class ClassicQuery(FeedQuery, StreamingQuery):
    """The query of a classic session."""

    def __init__(self, query: StreamingQuery, stream: StreamFeed) -> None:
        super().__init__(query._jsq)
        self._stream = stream


class _Batches:
    """The function of `foreachBatch`, called in the query's own thread of the JVM."""

    def __init__(self, stream: StreamFeed) -> None:
        self._stream = stream
        self._has_started = threading.Event()
        self._query: StreamingQuery | None = None

    def started(self, query: StreamingQuery) -> None:
        self._query = query
        self._has_started.set()

    def __call__(self, data: DataFrame, batch_id: int) -> None:
        # The first micro-batch may come before `start` has returned the query.
        if not self._has_started.wait(Deadline.after(_STARTED_S).wait_s):
            raise FeedClosedError(f"the query did not start within {_STARTED_S:g} s")
        assert self._query is not None
        if not self._stream.feed_batch(data, self._query.id, batch_id):
            _await_stop(self._query, data)


def _await_stop(query: StreamingQuery, data: DataFrame) -> None:
    """Wait in the query's thread until `stop` interrupts it: a return would commit the batch."""
    from py4j.protocol import Py4JJavaError

    jvm: Any = data.sparkSession._jvm
    java = jvm.java.lang.Thread
    if not query.isActive:  # the interruption may have come already, and ended the Spark job
        java.currentThread().interrupt()
    try:
        java.sleep(_STOPPED_MS)
    except Py4JJavaError:
        raise QueryStoppedError(_INTERRUPTED) from None
    raise FeedClosedError(f"the query was not stopped within {_STOPPED_MS // 1000} s")


def start_query(
    data: Any,
    open_stream: Callable[[], StreamFeed],
    start: Callable[[DataFrame, StreamFeed], FeedQuery],
) -> FeedQuery:
    """Start a query that feeds.

    Args:
        start: starts it, and has it feed the stream: `start_classic` or `start_served`.

    Raises:
        ConfigError: if `data` is no streaming DataFrame.
    """
    if not (isinstance(data, DataFrame) and data.isStreaming):
        raise ConfigError(
            f"train_stream takes a streaming DataFrame, of spark.readStream, not this "
            f"{type(data).__name__}; cluster.feed takes others"
        )
    stream = open_stream()
    try:
        return start(data, stream)
    except BaseException:
        # Otherwise the feed would belong to a stream that no query fills.
        stream.stop()
        raise


def start_classic(
    options: StreamOptions, thread: Thread, data: DataFrame, stream: StreamFeed
) -> ClassicQuery:
    """Start a query of a classic session.

    Args:
        thread: makes a thread that may call Spark.
    """
    batches = _Batches(stream)
    query = set_up(data.writeStream.foreachBatch(batches), options).start()
    stream.watch(query, thread)
    batches.started(query)
    return ClassicQuery(query, stream)


def set_up(writer: Any, options: StreamOptions) -> Any:
    """Return the writer of a query with these options."""
    if options.checkpoint_location is not None:
        writer = writer.option("checkpointLocation", options.checkpoint_location)
    if options.query_name is not None:
        writer = writer.queryName(options.query_name)
    if options.trigger:
        writer = writer.trigger(**options.trigger)
    return writer
