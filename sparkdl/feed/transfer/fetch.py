"""Fetches this node's assigned rows from the agents that hold them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, islice, takewhile
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.descriptors import FdReceiver
from sparkdl.control.messages import Assign, AssignedRange
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedClosedError, FeedTimeoutError, ProtocolError, ReadError
from sparkdl.core.failure import FailureKind
from sparkdl.feed.store.buffer import AppendRequest
from sparkdl.feed.store.log import Log
from sparkdl.feed.store.segment import read_segment
from sparkdl.feed.store.spool import Spool
from sparkdl.feed.transfer.messages import (
    BROKEN,
    CONFIRM_RECEIVED,
    LEND,
    FeedSpec,
    FetchTicket,
    Lent,
    flight_reason,
)
from sparkdl.values.batches import join

_PAUSE_S = 0.5
T = TypeVar("T")
Call = Callable[[flight.FlightClient, bytes, flight.FlightCallOptions], T]
_WINDOWS, _CALL_NBYTES = 64, 8 * 1024 * 1024
"""The most windows and bytes that one call asks for."""
_WINDOWS_IN_ORDER = 1024
"""Likewise, where order counts. The segments of so many windows stay mapped."""
_LARGE = 1 / 8
"""Windows of such a part of a segment are not copied, if they are on this machine."""


class _Mapped(NamedTuple):
    """A segment on this machine, from `start` of its file on; `fd` is -1 if windows are small."""

    rows: pa.RecordBatch
    start: int
    row_nbytes: int
    fd: int

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


@dataclass(frozen=True)
class NodeDirectory:
    """This node among the others, and how it reaches them."""

    node_id: int
    names: tuple[str, ...]
    spec: FeedSpec
    patience_s: float


Fetch = tuple[AssignedRange, Assign]
"""Rows at another agent, or in the own spool where order counts, and their assignment."""


class Fetcher(threading.Thread):
    """Fetches rows of one feed and generation in order, each into the log, until it is stopped.

    While the log has no room the next rows wait at their holder, except for one segment.

    Args:
        memory_nbytes: of all feeds of the node; what one call brings is a fraction.
        on_fetched: called on this thread with how many more have come, taken by the log or not.
        on_failure: called on this thread with why rows cannot be fetched; then it has ended.
    """

    def __init__(
        self,
        directory: NodeDirectory,
        fds: FdReceiver,
        log: Log,
        spool: Spool,
        generation: int,
        memory_nbytes: int,
        on_fetched: Callable[[int], None],
        on_failure: Callable[[FailureKind, str], None],
    ) -> None:
        super().__init__(name=f"sparkdl-fetching-{log.feed}", daemon=True)
        self._directory, self._fds = directory, fds
        self._log, self._spool = log, spool
        self._generation = generation
        # Until the log has room, the rows of one call are in memory beside the budget.
        self._call_nbytes = min(_CALL_NBYTES, memory_nbytes // 16)
        self._on_fetched = on_fetched
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: deque[Fetch] = deque()
        self._reader: flight.FlightStreamReader | None = None
        self._is_stopped = False
        self._clients: dict[str, flight.FlightClient] = {}
        self._early: dict[int, pa.RecordBatch] = {}
        self._holder = -1
        self._mapped: dict[tuple[int, int], _Mapped] = {}
        """By holder and number."""
        self._far: set[int] = set()

    def add(self, fetches: Iterable[Fetch]) -> None:
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
        names = self._directory.names
        try:
            while fetches := self._next():
                self._holder = fetches[0][0].holder
                self._gather(fetches)
        except (pa.ArrowException, FeedClosedError, ReadError, OSError, FeedTimeoutError) as error:
            kind: FailureKind = "exception"
            if isinstance(error, FeedTimeoutError):
                kind = "unreachable"
            why = f"cannot fetch rows from {names[self._holder]}: {flight_reason(error)}"
            if not self._spool.is_closed:  # otherwise the generation is over
                self._on_failure(kind, why)
        finally:
            for each in (*self._clients.values(), *self._mapped.values()):
                each.close()

    def _next(self) -> list[Fetch]:
        """Wait for what to fetch next: rows of one epoch, of one holder; none once stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._waiting)
            if self._is_stopped:
                return []
            # One call goes to one holder and becomes one segment of the log, which has one epoch.
            first = self._waiting[0]
            same = takewhile(lambda each: each[1].epoch == first[1].epoch, self._waiting)
            if first[1].in_order:
                return list(islice(same, _WINDOWS_IN_ORDER))
            of_holder = (each for each in same if each[0].holder == first[0].holder)
            return list(islice(of_holder, _WINDOWS))

    def _gather(self, fetches: list[Fetch]) -> None:
        """Bring the first windows into the log: small ones as one segment."""
        early = self._early
        lacking = sorted((each for each in fetches if id(each) not in early), key=_holder)
        for self._holder, group in groupby(lacking, key=_holder):
            if not self._bring([*group]):  # it was stopped
                return
        here = [*takewhile(lambda each: id(each) in early, fetches)]
        schema = early[id(here[0])].schema
        here = [*takewhile(lambda each: early[id(each)].schema.equals(schema, True), here)]
        if any(early[id(each)].num_rows != each[0].rows for each in here):
            raise ReadError("windows go beyond their segments")
        for key, group in groupby(here, key=self._segment_of_large):
            windows = [*group]
            if key is None:
                self._log.append(join([early.pop(id(each)) for each in windows]), _request(windows))
                continue
            found = self._mapped[key]
            for each in windows:
                request = replace(_request([each]), start=found.start + each[0].skip)
                nbytes = each[0].rows * found.row_nbytes
                self._log.append(early.pop(id(each)), request, found.fd, nbytes)
        self._note_fetched(here)

    def _segment_of_large(self, fetch: Fetch) -> tuple[int, int] | None:
        found = self._mapped.get(_segment(fetch))
        return None if found is None or found.fd < 0 else _segment(fetch)

    def _bring(self, fetches: list[Fetch]) -> bool:
        """Take up the first windows of one holder; false if it was stopped."""
        if self._maps(fetches):
            nbytes = 0
            for fetch in fetches:
                window, _ = fetch
                segment = self._mapped.get(_segment(fetch))
                if segment is None or nbytes >= self._call_nbytes:
                    break
                self._early[id(fetch)] = segment.rows.slice(window.skip, window.rows)
                nbytes += window.rows * segment.row_nbytes
            return True
        if (batch := self._call(fetches, self._get)) is None:
            return False
        ends = [*accumulate(each.rows for each, _ in fetches)]
        # Part of a window would shift the numbers of the rows.
        if batch.num_rows not in ends:
            raise ReadError(f"it sent {batch.num_rows} rows, and windows end at {ends}")
        for fetch, stop in zip(fetches, ends[: ends.index(batch.num_rows) + 1], strict=False):
            rows = fetch[0].rows
            self._early[id(fetch)] = batch.slice(stop - rows, rows)
        return True

    def _maps(self, fetches: list[Fetch]) -> bool:
        """Map the segments of the first windows of one holder, if it is on this machine."""
        first = self._mapped.get(_segment(fetches[0]))
        if first is not None and first.fd >= 0:  # few descriptors at a time
            return True
        lacking = dict[tuple[int, int], Fetch]()
        for fetch in fetches:
            if (key := _segment(fetch)) not in self._mapped:
                lacking[key] = max(lacking.get(key, fetch), fetch, key=lambda each: each[0].rows)
        lacking = dict(islice(lacking.items(), _WINDOWS))
        if self._holder == self._directory.node_id:
            for key, (each, _) in lacking.items():
                self._map(key, each.rows, *self._spool.lend(*_window(each)))
            return True
        if self._holder in self._far:
            return False
        lent = (self._call([*lacking.values()], _borrow) or []) if lacking else []
        with suppress(ProtocolError, OSError):  # also without descriptors its rows can be sent
            for (key, (each, _)), one in zip(lacking.items(), lent, strict=False):
                fd = self._fds.wait_fd(one.key, Deadline.after(_PAUSE_S))
                self._map(key, each.rows, fd, one.start)
        if self._mapped.keys() >= lacking.keys():
            return True
        self._far.add(self._holder)
        return False

    def _map(self, key: tuple[int, int], rows: int, fd: int, start: int) -> None:
        try:
            batch = read_segment(fd)
        except BaseException:
            os.close(fd)
            raise
        is_large = rows >= _LARGE * batch.num_rows
        row_nbytes = os.fstat(fd).st_size // max(1, batch.num_rows)
        if not is_large:
            os.close(fd)
        self._mapped[key] = _Mapped(batch.slice(start), start, row_nbytes, fd if is_large else -1)

    def _note_fetched(self, here: list[Fetch]) -> None:
        """Have the holders free rows that are here now, whether the log took them or not."""
        # Only now, because rows that were merely sent are lost if the connection breaks.
        for self._holder, group in groupby(sorted(here, key=_holder), key=_holder):
            if self._holder != self._directory.node_id:
                self._call([*group], _confirm)
                continue
            for own, _ in group:
                self._spool.free(*_window(own))
        with self._changed:
            done = set(map(id, here))
            self._waiting = deque(each for each in self._waiting if id(each) not in done)
            soon = islice(self._waiting, _WINDOWS_IN_ORDER)
            wanted = set(map(_segment, soon))
        for key in self._mapped.keys() - wanted:
            self._mapped.pop(key).close()
        self._on_fetched(len(here))

    def _call(self, fetches: list[Fetch], call: Call[T]) -> T | None:
        """Return what the holder answers, by as many connections as it takes; `None` if stopped."""
        uri = fetches[0][1].uris[fetches[0][0].holder]
        windows = tuple(_window(each) for each, _ in fetches)
        name = self._fds.name
        what = FetchTicket(self._log.feed, self._generation, self._call_nbytes, windows, name)
        ticket = msgspec.json.encode(what)
        deadline = Deadline.after(self._directory.patience_s)
        while True:
            try:
                client = self._clients.get(uri)
                if client is None:
                    client = self._clients[uri] = self._directory.spec.connect(uri)
                return call(client, ticket, self._directory.spec.options(deadline.remaining_s))
            except BROKEN as error:
                if broken := self._clients.pop(uri, None):
                    broken.close()
                reason = flight_reason(error)
            with self._changed:
                if self._changed.wait_for(lambda: self._is_stopped, _PAUSE_S):
                    return None
            if deadline.has_passed:
                host, waited_s = urlsplit(uri).hostname, self._directory.patience_s
                raise FeedTimeoutError(f"no answer from {host} within {waited_s:.0f} s: {reason}")

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


def _holder(fetch: Fetch) -> int:
    return fetch[0].holder


def _segment(fetch: Fetch) -> tuple[int, int]:
    return fetch[0].holder, fetch[0].number


def _window(of: AssignedRange) -> tuple[int, int, int]:
    return of.number, of.skip, of.rows


def _request(here: list[Fetch]) -> AppendRequest:
    order = here[0][1]
    parts = [each.parts for each, _ in here]
    spans = parts[0] if len(parts) == 1 else tuple(chain.from_iterable(parts))
    return AppendRequest(order.epoch, keep=order.keep, spans=spans, run=order.run)


def _borrow(
    client: flight.FlightClient, ticket: bytes, options: flight.FlightCallOptions
) -> list[Lent]:
    (answer,) = client.do_action(flight.Action(LEND, ticket), options)
    return msgspec.json.decode(answer.body, type=list[Lent])


def _confirm(client: flight.FlightClient, ticket: bytes, options: flight.FlightCallOptions) -> None:
    """Confirm to the holder that the rows are here, so that it frees them."""
    list(client.do_action(flight.Action(CONFIRM_RECEIVED, ticket), options))
