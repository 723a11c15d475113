"""A feeder's stream to one agent: pieces of a partition go out, acknowledgements come back.

Runs in: feeder

    put ──▶ waiting ──▶ unacknowledged, at most WINDOW ──▶ stored
               ▲                      │
               └───── given back ─────┘ by a full agent, after a second; the lowest row goes first

The caller of `put` never writes to the socket itself. While a socket takes no bytes (a frozen
agent, a cut link), gRPC ends a write neither when its call is cancelled nor when its connection
closes. The writing thread may thus stay stuck; the caller still fails in time.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.descriptors import FdSender
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedTimeoutError
from sparkdl.core.row_ranges import Range
from sparkdl.feed.store.segment import write_segment
from sparkdl.feed.transfer.messages import (
    FeederError,
    FeedSpec,
    PutAck,
    PutHeader,
    PutPiece,
    Target,
    flight_reason,
)

WINDOW = 2
"""Pieces that are not acknowledged: the agent stores one while the next one travels."""
_PAUSE_S = 0.2
"""How long a piece that was given back waits before it is sent again."""
_END_S = 1.0
_STUCK_S = 5.0
"""How long a write may take to fail once its call is over; it alone knows why."""
_UNREACHABLE = (
    ". If that node is up, set SPARKDL_NODE_HOST on its executor to an address at which the hosts "
    "of the other executors reach it"
)
_FULL = (
    "its feed memory is full, and user code reads no rows. Raise the timeout of the feed if a step "
    "may take that long"
)


class Phase(Enum):
    """Where a stream stands: READY ⇄ OPENING → CLOSED, and BROKEN unless nothing is left to do."""

    READY = "pieces may be sent, each after a call for its schema has begun"
    OPENING = "the agent has not answered the call yet"
    CLOSED = "the agent wants no more rows of this epoch"
    BROKEN = "the connection has failed"


@dataclass(frozen=True)
class Piece:
    """Rows of a partition, which have the numbers of `ranges` there."""

    batch: pa.RecordBatch
    ranges: tuple[Range, ...]


@dataclass(eq=False)
class _Call:
    """One `DoPut`: batches of one schema.

    Attributes:
        pieces: to be written; None is the last.
        is_written: whether its thread writes no more.
    """

    pieces: queue.SimpleQueue[Piece | None] = field(default_factory=queue.SimpleQueue)
    is_written: threading.Event = field(default_factory=threading.Event)
    writer: threading.Thread = field(init=False)


class PutStream:
    """The stream of one partition; of each call one thread writes, another reads acknowledgements.

    One thread puts pieces; others may call `cancel` and ask how the stream is.

    Attributes:
        target: the node whose agent gets the pieces; it may be another one until the first `put`.
        rows_stored: by the agent.
        is_unreachable: whether the agent could not be reached, or not any more.
    """

    def __init__(self, target: Target, header: PutHeader, spec: FeedSpec) -> None:
        self.target = target
        self.rows_stored = 0
        self.is_unreachable = False
        self._header = flight.FlightDescriptor.for_command(msgspec.json.encode(header))
        self._spec = spec
        self._changed = threading.Condition()
        self._phase = Phase.READY
        self._problem = ""
        self._shortage = ""
        self._waiting: list[Piece] = []
        self._unacknowledged: deque[Piece] = deque()
        self._heard_s = self._resume_s = 0.0
        self._deadline = Deadline.after(spec.timeout_s)
        self._client: flight.FlightClient | None = None
        self._schema: pa.Schema | None = None
        self._call: _Call | None = None
        self._fd_sender: FdSender | None = None

    @property
    def is_closed(self) -> bool:
        """Whether no more rows of this epoch are wanted."""
        return self._phase is Phase.CLOSED

    @property
    def rows_left(self) -> int:
        """Rows that were put and are not stored."""
        return sum(int(p.batch.num_rows) for p in (*self._waiting, *self._unacknowledged))

    def put(self, pieces: Iterable[Piece]) -> None:
        """Send pieces; returns once all are under way, or the stream is closed.

        Raises:
            FeederError: if the connection broke.
            FeedTimeoutError: if the agent stored nothing for the feed timeout.
        """
        self._deadline = Deadline.after(self._spec.timeout_s)  # however slow the source is
        with self._changed:
            self._waiting += pieces
        self._send_until(lambda: self.is_closed or not self._waiting)

    def flush(self) -> None:
        """Wait until each piece is stored or, if the stream is closed, given back.

        Raises:
            FeederError, FeedTimeoutError: as `put` does.
        """
        self._send_until(lambda: not self._unacknowledged and (self.is_closed or not self._waiting))

    def cancel(self) -> None:
        """Interrupt the thread that puts pieces at its next wait for the agent."""
        self._break("it was cancelled")

    def close(self) -> None:
        """End the connection, whatever is under way."""
        call = self._end_call()
        if call is not None:
            call.writer.join(_END_S)  # descriptors under way are lost once their sender closes
        with self._changed:
            if self._fd_sender is not None:
                self._fd_sender.close()
        if self._client is not None:
            self._client.close()

    def _send_until(self, is_done: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                while not (is_done() or self._may_send()):
                    self._wait()
                if is_done():
                    return
                piece = self._waiting[0]
                if is_open := piece.batch.schema == self._schema:
                    # The silence of an agent begins when it owes an answer: before, it had nothing
                    # to say.
                    if not self._unacknowledged:
                        self._heard_s = time.monotonic()
                    self._unacknowledged.append(self._waiting.pop(0))
            if is_open:
                assert self._call is not None
                self._call.pieces.put(piece)
            else:
                self._begin_call(piece.batch.schema)

    def _may_send(self) -> bool:
        """Whether the first piece that waits may go, or a call for its schema begin."""
        is_pausing = time.monotonic() < self._resume_s
        if not self._waiting or self._phase is not Phase.READY or is_pausing:
            return False
        is_open = self._waiting[0].batch.schema == self._schema
        # Another schema needs another call, and that begins once the last call has no piece left.
        return len(self._unacknowledged) < (WINDOW if is_open else 1)

    def _wait(self) -> None:
        """Wait for something to change, while the agent stores rows in time."""
        name, timeout_s = self.target.name, self._spec.timeout_s
        if self._phase is Phase.BROKEN:
            raise FeederError(self._problem)
        if self._deadline.has_passed:
            if self._phase is Phase.OPENING:
                raise FeederError(f"{name} did not answer for {timeout_s:g} s")
            raise FeedTimeoutError(
                f"{name} stored no row of feed {self._spec.feed!r} for {timeout_s:g} s: "
                f"{self._shortage or _FULL}"
            )
        pause_s, left_s = self._resume_s - time.monotonic(), self._deadline.remaining_s
        self._changed.wait(min(left_s, pause_s) if pause_s > 0 else left_s)

    def _begin_call(self, schema: pa.Schema) -> None:
        """Begin a call for batches of a schema; the first acknowledgement comes at once."""
        self._end_call()
        self._client = self._client or self._spec.connect(self.target.uri)
        with self._changed:
            self._phase, self._heard_s, self._schema = Phase.OPENING, time.monotonic(), schema
            self._call = call = _Call()
        name = f"sparkdl-puts-{self.target.name}"
        args = (self._client, schema, call)
        # A daemon, because its write may never end (see above) and must not hold the Spark
        # worker.
        call.writer = threading.Thread(target=self._run_call, args=args, name=name, daemon=True)
        call.writer.start()

    def _end_call(self) -> _Call | None:
        """Let the call's thread end the call once it has written all queued pieces."""
        with self._changed:
            call, self._call = self._call, None
        if call is not None:
            call.pieces.put(None)
        return call

    def _run_call(self, client: flight.FlightClient, schema: pa.Schema, call: _Call) -> None:
        with self._reporting():
            writer, acks = client.do_put(self._header, schema, self._spec.options())
            name = f"sparkdl-acks-{self.target.name}"
            reader = threading.Thread(target=self._read_acks, args=(acks, call), name=name)
            reader.daemon = True
            reader.start()
            with self._reporting():
                while (piece := call.pieces.get()) is not None:
                    key = self._send_fd(piece.batch)
                    # With a key the rows are in the segment, and the batch carries the metadata
                    # alone.
                    batch = piece.batch.slice(0, 0) if key else piece.batch
                    what = PutPiece(piece.ranges, piece.batch.num_rows, key)
                    writer.write_with_metadata(batch, msgspec.json.encode(what))
                writer.done_writing()
            call.is_written.set()
            reader.join()  # until the agent has ended the call
            writer.close()  # which alone raises why it did
        # If this is still the current call, the agent has ended it, not this end.
        if self._call is call:
            self._break(f"{self.target.name} ended the stream")

    def _read_acks(self, acks: flight.FlightMetadataReader, call: _Call) -> None:
        with self._reporting():
            while (buffer := acks.read()) is not None:
                self._on_ack(buffer.to_pybytes(), call)
        # The writer may be waiting for a next piece, although the call is over.
        call.pieces.put(None)
        if not call.is_written.wait(_STUCK_S):
            problem = f"{self.target.name}: the connection broke while rows were under way"
            self._break(problem, is_unreachable=True)

    def _send_fd(self, batch: pa.RecordBatch) -> str:
        """Send the batch to an agent on this machine; return its key, empty for another machine."""
        if self._fd_sender is None:
            return ""
        try:
            fd, _nbytes = write_segment(batch)
            try:
                return self._fd_sender.send(fd)
            finally:
                os.close(fd)
        except OSError:  # go on by the stream, which needs no descriptor
            self._fd_sender.close()
            self._fd_sender = None
            return ""

    def _on_ack(self, data: bytes, call: _Call) -> None:
        ack = msgspec.json.decode(data, type=PutAck)
        with self._changed:
            if self._call is not call or self._phase is Phase.BROKEN:  # closed or cancelled before
                return
            self._heard_s, self._shortage = time.monotonic(), ack.shortage
            if self._phase is Phase.OPENING:
                self._phase = Phase.READY
                # None where the agent is on another machine, or in another network namespace.
                if self._fd_sender is None:
                    self._fd_sender = FdSender.connect(ack.fd_socket, self._spec.token)
            else:
                piece = self._unacknowledged.popleft()
                if ack.accepted:
                    self.rows_stored += piece.batch.num_rows
                    # Only stored rows extend the time: an agent that gives pieces back makes no
                    # progress.
                    self._deadline = Deadline.after(self._spec.timeout_s)
                else:
                    # Pieces behind it may wait already. The lowest row goes first, as the
                    # partition has it.
                    insort(self._waiting, piece, key=lambda each: each.ranges)
                    self._resume_s = self._heard_s + _PAUSE_S
            if ack.closed:
                self._phase = Phase.CLOSED
            self._changed.notify_all()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Break the stream with the error of the connection that is raised."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (the thread that puts raises it)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        is_unreachable = isinstance(error, (flight.FlightUnavailableError, OSError))
        # An agent that answered before is reachable at its address, so the hint would mislead.
        is_new = self._phase is Phase.OPENING and not self.rows_stored
        hint = _UNREACHABLE if is_unreachable and is_new else ""
        self._break(f"{self.target.name}: {flight_reason(error)}{hint}", is_unreachable)

    def _break(self, problem: str, is_unreachable: bool = False) -> None:
        """Note why the stream cannot go on, unless it need not; the first reason counts."""
        with self._changed:
            # Once nothing more is wanted, an agent may end the connection as it likes.
            if self.is_closed and not self._unacknowledged:
                return
            self.is_unreachable |= is_unreachable
            if self._phase is not Phase.BROKEN:
                self._phase, self._problem = Phase.BROKEN, problem
            self._changed.notify_all()
