"""`TFCluster.train` of a DStream: each RDD is fed as it comes, until somebody wants no more.

Runs in: driver
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from sparkdl.driver.handle import Cluster
from sparkdl.tfos.reservation import Server

_log = logging.getLogger(__name__)
_TURN_S = 1.0


class DStreamFeed:
    """Feeds the RDDs of DStreams to one queue.

    Attributes:
        stream: which the nodes read as one.
        has_ended: no more RDDs are fed.
        error: why, if feeding failed.
    """

    def __init__(self, cluster: Cluster, qname: str, feed_timeout: float) -> None:
        self.stream = cluster.open_stream(qname, feed_timeout)
        self.has_ended = threading.Event()
        self.error: Exception | None = None

    def attach(self, dstream: Any) -> None:
        """Have the stream's context feed each RDD, one after the other."""
        dstream.foreachRDD(lambda rdd: self.feed(rdd))  # pyspark counts a function's arguments

    def feed(self, rdd: Any) -> None:
        """Feed one RDD, unless nobody wants it; an error is kept for `shutdown(ssc)`."""
        if self.has_ended.is_set() or rdd.isEmpty():
            return
        try:
            self.stream.feed(rdd)
        except Exception as error:  # noqa: BLE001 (of a thread of pyspark; `shutdown` raises it)
            _log.exception("Feeding %r from a stream failed", self.stream.name)
            self.error = error
            self.has_ended.set()

    def is_wanted(self) -> bool:
        """Whether the nodes want more of it."""
        return not self.has_ended.is_set() and self.stream.is_wanted()


def await_end(ssc: Any, server: Server | None, feeds: list[DStreamFeed]) -> None:
    """Wait until the streaming has ended; end it when nobody wants more rows.

    That is when a node has called `terminate()`, all nodes have returned or one has failed, or a
    client has asked `server` to stop. The SparkContext goes on.

    Raises:
        SparkdlError: if feeding failed.
    """
    while not ssc.awaitTerminationOrTimeout(_TURN_S):
        if (server is not None and server.done) or not all(feed.is_wanted() for feed in feeds):
            for feed in feeds:
                feed.has_ended.set()
            ssc.stop(stopSparkContext=False, stopGraceFully=True)
            break
    for feed in feeds:
        feed.stream.end()
    for feed in feeds:
        if feed.error is not None:
            raise feed.error
