"""A stream that feeds a cluster: one micro-batch after the other, which the nodes read as one.

Runs in: driver

    who feeds    feed(batch) ───── feed(batch) ───────── idle ──────── feed(batch) ───── end
    nodes        epoch, goes on │  epoch, goes on │  wait for more  │  epoch, goes on │  epoch of
                                                                                        no rows

At the end of each micro-batch all nodes know how many steps it has for everybody, so that none
waits in a step for another one while the stream is idle.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, SparkdlError
from sparkdl.driver.feeds.report import FeedReport
from sparkdl.driver.feeds.state import StreamAsked, StreamEndAsked
from sparkdl.driver.lifecycle.outcome import failure_of, has_ended

if TYPE_CHECKING:
    from sparkdl.driver.controller import Controller, View
    from sparkdl.driver.feeds.runner import FeedRunner

_log = logging.getLogger(__name__)

_TURN_S = 0.5
"""How often a query is asked whether it is still active."""
_JOIN_S = 5.0
_TRIGGERS = ("processingTime", "once", "availableNow")


class Query(Protocol):
    """What is asked of pyspark's `StreamingQuery`. A query that has ended is not active."""

    @property
    def isActive(self) -> bool: ...  # noqa: D102, N802

    def stop(self) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class StreamOptions:
    """How a query runs; see `Cluster.train_stream`.

    Attributes:
        trigger: the argument of `DataStreamWriter.trigger`; none for Spark's default.
    """

    checkpoint_location: str | None
    query_name: str | None
    trigger: dict[str, Any]


def trigger_options(trigger: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the argument of `DataStreamWriter.trigger`; a string is a processing time.

    Raises:
        ConfigError: for a trigger that has no micro-batches, or that there is not.
    """
    if trigger is None:
        return {}
    if isinstance(trigger, str):
        return {"processingTime": trigger}
    if len(trigger) != 1 or not trigger.keys() <= set(_TRIGGERS):
        raise ConfigError(
            f"trigger={trigger!r}: give a time like '10 seconds', or a dict with one of "
            f"{', '.join(_TRIGGERS)}; other triggers have no micro-batches, which are what is fed"
        )
    return dict(trigger)


class StreamFeed:
    """Feeds one stream. `Cluster.open_stream` makes it; methods may be called from any thread.

    Attributes:
        name: of the feed.
        error: what feeding ended with, if it was an error.
    """

    def __init__(
        self,
        name: str,
        to: str | None,
        controller: Controller,
        runner: FeedRunner,
        feed: Callable[[Any], FeedReport],
        fed_batches: dict[str, int],
        on_end: Callable[[], None],
    ) -> None:
        self.name = name
        self.error: Exception | None = None
        self._controller = controller
        self._to = to
        self._runner = runner
        self._feed = feed
        self._fed_batches = fed_batches
        self._on_end = on_end
        self._stopped = threading.Event()
        self._end_lock = threading.Lock()
        self._has_ended = False
        self._query: Query | None = None
        self._thread: threading.Thread | None = None
        runner.ask(name, partial(StreamAsked, to=to))

    def feed(self, data: Any) -> bool:
        """Feed one micro-batch; blocks until the nodes have read it.

        Returns:
            Whether they have. If not, the stream is over: stopped, or nobody wants more.

        Raises:
            SparkdlError: what `Cluster.feed` raises; then the stream is over as well.
        """
        if not self.is_wanted():
            return False
        try:
            report = self._feed(data)
        except Exception as error:
            self.error = error
            self._stopped.set()
            raise
        if self._is_over():
            return False
        _log.info("Feed %r: a micro-batch of %d rows", self.name, report.rows_fed)
        return True

    def feed_batch(self, data: Any, query_id: str, batch_id: int) -> bool:
        """Feed a micro-batch as `feed` does, but none that this cluster has had already.

        Spark repeats the last one of a query that ended before it was committed.
        """
        if batch_id <= self._fed_batches.get(query_id, -1):
            _log.info("Feed %r has had micro-batch %d already", self.name, batch_id)
            return True
        if not self.feed(data):
            return False
        self._fed_batches[query_id] = batch_id
        return True

    def is_wanted(self) -> bool:
        """Whether to go on: it was not stopped, nobody has called `terminate()`, some read on."""
        return self._controller.look(self._wants)

    def failure(self) -> Exception | None:
        """Return why the stream broke: what a node died of, or else what feeding ended with."""
        return self._controller.look(lambda view: failure_of(view.state)) or self.error

    def watch(
        self, query: Query, thread: Callable[[Callable[[], None], str], threading.Thread]
    ) -> None:
        """End `query` when nobody wants more, and the stream when the query has ended.

        Args:
            thread: makes a thread that may call Spark.
        """
        self._query = query
        self._thread = thread(self._watch, f"sparkdl-stream-{self.name}")
        self._thread.start()

    def stop(self) -> None:
        """Stop the query, if there is one, and end the stream.

        A micro-batch that is being fed is cut short.
        """
        self._stop_feeding()
        try:
            if self._query is not None:
                self._query.stop()
        finally:
            self.end()
            if self._thread not in (None, threading.current_thread()):
                self._thread.join(_JOIN_S)

    def end(self) -> None:
        """End the iteration in which the nodes have read the stream. Does nothing twice."""
        self._stop_feeding()
        with self._end_lock:
            if self._has_ended:
                return
            self._has_ended = True
            with suppress(SparkdlError):  # of a cluster that has ended: nobody reads
                ask = partial(StreamEndAsked, to=self._to)
                self._runner.ask(self.name, ask)
            self._on_end()

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
