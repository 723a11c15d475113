"""Fetches this node's assigned rows from the agents that hold them.

Runs in: agent
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, islice, takewhile
from typing import TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.messages import Assign, Grant
from sparkdl.core.errors import ReadError
from sparkdl.feed.store.held import AppendRequest
from sparkdl.feed.store.log import Log
from sparkdl.feed.transfer.link_watch import LATE_S, LinkWatch
from sparkdl.feed.transfer.messages import (
    TAKEN,
    FeedSpec,
    FetchTicket,
    Target,
    flight_reason,
)

_CALL_S = 10.0
"""How long a call may take at first. It gets twice as long after each time that it was too short:
a slow network is no reason to begin again for ever."""
_PAUSE_S = 0.5
_BROKEN = (
    flight.FlightUnavailableError,
    flight.FlightTimedOutError,
    flight.FlightCancelledError,
    OSError,
)
"""Errors of the connection: the rows are still at the other agent."""


T = TypeVar("T")
Call = Callable[[flight.FlightClient, bytes, flight.FlightCallOptions], T]
_WINDOWS, _CALL_NBYTES = 64, 8 * 1024 * 1024
"""The most windows and bytes that one call asks for."""


@dataclass(frozen=True)
class Peers:
    """This node among the others, and how it reaches them.

    Attributes:
        names: of all nodes, by id.
        spec: what holds for all feeds: the token, whom to ask and to trust.
    """

    node_id: int
    names: tuple[str, ...]
    spec: FeedSpec


Fetch = tuple[Grant, Assign]
"""Rows at another agent, and the message that assigned them."""


class Fetcher(threading.Thread):
    """Fetches rows of one feed and generation in order, each into the log, until it is stopped.

    While the log has no room the next rows wait at their holder, except for one segment.

    Args:
        memory_nbytes: of all feeds of the node; what one call brings is a fraction.
        on_fetched: called on this thread with how many more have come, whether or not the log took
            their rows.
        on_problem: called on this thread with why rows cannot be fetched; then it has ended.
    """

    def __init__(
        self,
        peers: Peers,
        log: Log,
        generation: int,
        memory_nbytes: int,
        on_fetched: Callable[[int], None],
        on_problem: Callable[[str], None],
    ) -> None:
        super().__init__(name=f"sparkdl-fetching-{log.feed}", daemon=True)
        self._peers = peers
        self._log = log
        self._generation = generation
        # Until the log has room, the rows of one call are in memory beside the budget.
        self._call_nbytes = min(_CALL_NBYTES, memory_nbytes // 16)
        self._on_fetched = on_fetched
        self._on_problem = on_problem
        self._changed = threading.Condition()
        self._waiting: deque[Fetch] = deque()
        self._awaited: tuple[Target, float] | None = None
        self._reader: flight.FlightStreamReader | None = None
        self._is_stopped = False
        self._clients: dict[str, flight.FlightClient] = {}

    def add(self, fetches: Iterable[Fetch]) -> None:
        """Append fetches to the queue."""
        with self._changed:
            self._waiting.extend(fetches)
            self._changed.notify_all()

    def stop(self) -> None:
        """End without what waits, and hang up on the agent that is fetched from."""
        with self._changed:
            self._is_stopped = True
            reader = self._reader
            self._changed.notify_all()
        if reader is not None:
            reader.cancel()

    def run(self) -> None:
        """Fetch until `stop`."""
        spec = replace(self._peers.spec, feed=self._log.feed, generation=self._generation)
        try:
            with LinkWatch(spec, self._owing):
                while fetches := self._next():
                    if (problem := self._perform(fetches)) is not None:
                        self._on_problem(problem)
                        return
        finally:
            for client in self._clients.values():
                client.close()

    def _owing(self) -> list[Target]:
        awaited = self._awaited
        is_late = awaited is not None and time.monotonic() - awaited[1] >= LATE_S
        return [awaited[0]] if awaited is not None and is_late else []

    def _next(self) -> list[Fetch]:
        """Wait for what to fetch next: rows of one epoch, of one holder; none once stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._waiting)
            if self._is_stopped:
                return []
            # One call goes to one holder and becomes one segment of the log, which has one epoch.
            first = self._waiting[0]
            same = takewhile(lambda each: each[1].epoch == first[1].epoch, self._waiting)
            of_holder = (each for each in same if each[0].holder == first[0].holder)
            return list(islice(of_holder, _WINDOWS))

    def _perform(self, fetches: list[Fetch]) -> str | None:
        """Fetch the first of these into the log; return why that is not possible, if so."""
        (first, order), names = fetches[0], self._peers.names
        try:
            batch = self._call(fetches, self._get)
            if batch is None:  # it was stopped
                return None
            up_to = [*accumulate(grant.rows for grant, _ in fetches)]
            # The holder sends whole windows, as many as it likes. Part of one would shift the
            # numbers of the rows.
            if batch.num_rows not in up_to:
                raise ReadError(f"it sent {batch.num_rows} rows, and windows end at {up_to}")
            here = fetches[: up_to.index(batch.num_rows) + 1]
            spans = tuple(span for grant, _ in here for span in grant.spans)
            request = AppendRequest(order.epoch, keep=order.keep, spans=spans, run=order.run)
            # Whether the log still wants the rows or not, the holder may free them.
            self._log.append_in_time(batch, request)
            # Only now, because rows that were merely sent are lost if the connection breaks.
            self._call(here, _confirm)
        except (pa.ArrowException, ReadError, OSError) as error:
            return (
                f"{names[self._peers.node_id]} cannot fetch rows from {names[first.holder]}: "
                f"{flight_reason(error)}"
            )
        with self._changed:
            done = set(map(id, here))
            self._waiting = deque(each for each in self._waiting if id(each) not in done)
        self._on_fetched(len(here))
        return None

    def _call(self, fetches: list[Fetch], call: Call[T]) -> T | None:
        """Return what the holder answers, however often the connection breaks; `None` once stopped.

        Raises:
            pyarrow.ArrowException: if the holder refuses.
        """
        holder, timeout_s = fetches[0][0].holder, _CALL_S
        uri = fetches[0][1].uris[holder]
        windows = tuple((grant.number, grant.skip, grant.rows) for grant, _ in fetches)
        what = FetchTicket(self._log.feed, self._generation, self._call_nbytes, windows)
        ticket = msgspec.json.encode(what)
        self._awaited = Target(holder, self._peers.names[holder], uri), time.monotonic()
        try:
            while True:
                try:
                    client = self._clients.get(uri)
                    if client is None:
                        client = self._clients[uri] = self._peers.spec.connect(uri)
                    return call(client, ticket, self._peers.spec.options(timeout_s))
                except _BROKEN as error:
                    if isinstance(error, flight.FlightTimedOutError):
                        timeout_s *= 2
                    if broken := self._clients.pop(uri, None):
                        broken.close()
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_stopped, _PAUSE_S):
                        return None
        finally:
            self._awaited = None

    def _get(
        self, client: flight.FlightClient, ticket: bytes, options: flight.FlightCallOptions
    ) -> pa.RecordBatch:
        reader = client.do_get(flight.Ticket(ticket), options)
        with self._changed:
            # `stop` cancels it, and so ends a read that would wait for a silent holder.
            self._reader = reader
        try:
            return reader.read_chunk().data
        except StopIteration:
            raise ReadError("it sent no rows") from None
        finally:
            with self._changed:
                self._reader = None


def _confirm(client: flight.FlightClient, ticket: bytes, options: flight.FlightCallOptions) -> None:
    """Confirm to the holder that the rows are here, so that it frees them."""
    list(client.do_action(flight.Action(TAKEN, ticket), options))
