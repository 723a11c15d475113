"""`TFCluster.train` of a DStream: each RDD is fed as it comes, until somebody wants no more.

Runs in: driver
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from sparkdl.driver.handle import Cluster
from sparkdl.tfos.reservation import Server
from sparkdl.tfos.reservation_client import TOKEN_VARIABLE, Address

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


def tell_how_to_end(address: Address) -> None:
    """Log where a client asks for the end: whoever operates the program needs it.

    It is a warning because such are seen where no logging is set up.
    """
    _log.warning(
        "The stream goes on until a node wants no more, or a client asks the server at %s:%d for "
        "the end: python -m sparkdl.tfos.reservation_client %s %d. In other programs than this one "
        "it needs the token, so start both with one in %s",
        *address,
        *address,
        TOKEN_VARIABLE,
    )


def await_end(ssc: Any, server: Server, feeds: list[DStreamFeed]) -> None:
    """Wait until the streaming has ended; end it when nobody wants more rows.

    That is when a node has called `terminate()`, all nodes have returned or one has failed, or a
    client has asked `server` to stop. The SparkContext goes on.

    Raises:
        SparkdlError: if feeding failed.
    """
    while not ssc.awaitTerminationOrTimeout(_TURN_S):
        if server.done or not all(feed.is_wanted() for feed in feeds):
            for feed in feeds:
                feed.has_ended.set()
            ssc.stop(stopSparkContext=False, stopGraceFully=True)
            break
    for feed in feeds:
        feed.stream.end()
    for feed in feeds:
        if feed.error is not None:
            raise feed.error
