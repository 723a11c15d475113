"""A query of Structured Streaming over Spark Connect whose micro-batches feed a cluster.

Runs in: driver

With Spark Connect, `foreachBatch` runs in a process of the server. That process shares each
micro-batch with the driver as a view of their common session, and the driver feeds the view.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql.connect.streaming.query import StreamingQuery

from sparkdl.core.deadline import Deadline
from sparkdl.driver.executors import server_task
from sparkdl.driver.executors.executor import StreamOptions
from sparkdl.driver.executors.sessions import by_value
from sparkdl.driver.executors.stream_query import FeedQuery, set_up
from sparkdl.driver.feeds.feeds import StreamFeed
from sparkdl.driver.threads import Thread, begin

_BEAT_S = 1.0


class ServedQuery(FeedQuery, StreamingQuery):
    """The query of a session of Spark Connect."""

    def __init__(self, query: StreamingQuery, stream: StreamFeed, thread: Thread) -> None:
        StreamingQuery.__init__(self, query._session, query.id, query.runId, query.name)
        self._stream = stream
        self._thread = thread

    def exception(self) -> Exception | None:  # type: ignore[override]
        """Return why the query failed; a stop in order is no failure, whatever Spark says."""
        found = super().exception()
        return None if server_task.STOPPED in str(found) else found

    def _waited(self, wait: Callable[[], bool | None]) -> bool | None:
        try:
            return super()._waited(wait)
        except StreamingQueryException as error:
            if server_task.STOPPED not in str(error):
                raise
            return True

    def serve(self, name: str) -> None:
        """Feed the micro-batches that the server shows, until the query has ended."""
        fed, beat, next_s = "-1", 0, Deadline.after(0.0)
        conf: Any = self._session.conf
        at_work: Future[bool] | None = None
        with suppress(PySparkException):  # the server or the session is gone, and the query with it
            while True:
                ready = conf.get(f"{name}.ready", "-1")
                if at_work is None and fed not in (ready, "stop"):
                    at_work = self._feed(f"{name}_{ready}", int(ready))
                has_fed = at_work is not None and at_work.done()
                if has_fed or next_s.has_passed:
                    if at_work is not None and has_fed:
                        is_whole = at_work.exception() is None and at_work.result()
                        fed, at_work = ready if is_whole else "stop", None
                    # The number shows the server that this client lives, see `HandOver`.
                    conf.set(f"{name}.said", f"{fed} {(beat := beat + 1)}")
                    next_s = Deadline.after(_BEAT_S)
                    # Not at each look: the question is a request to the server.
                    if not self.isActive:
                        break
                threading.Event().wait(server_task.LOOK_S)

    def _feed(self, view: str, batch_id: int) -> Future[bool]:
        data = self._session.table(f"global_temp.{view}")
        work = partial(self._stream.feed_batch, data, self.id, batch_id)
        return begin(work, f"sparkdl-feed-{view}", self._thread)


def start_served(
    options: StreamOptions, thread: Thread, data: Any, stream: StreamFeed
) -> ServedQuery:
    """Start a query of a session of Spark Connect; see `stream_query.start_classic`."""
    name = f"sparkdl_{secrets.token_hex(6)}"
    with by_value(server_task):
        writer = data.writeStream.foreachBatch(server_task.HandOver(data.sparkSession, name))
    started = set_up(writer, options).start()
    query = ServedQuery(started, stream, thread)
    thread(partial(query.serve, name), f"sparkdl-{name}").start()
    # `query.stop()` only asks the stream to end, so the stream must be given the real query.
    stream.watch(started, thread)
    return query
