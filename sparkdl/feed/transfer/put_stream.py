"""A feeder's stream to one agent: pieces of a partition go out, acknowledgements come back.

Runs in: feeder

    put ──▶ waiting ──▶ unacknowledged, at most WINDOW ──▶ stored
               ▲                      │
               └───── given back ─────┘ by a full agent, after a second; the lowest row goes first
"""

from __future__ import annotations

import os
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
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


class PutStream:
    """The stream of one partition, with a thread that reads acknowledgements.

    One thread puts pieces; others may call `cancel` and ask how the stream is.

    Attributes:
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
        self._writing = threading.Lock()  # Arrow's writers are not made for two threads
        self._client: flight.FlightClient | None = None
        self._schema: pa.Schema | None = None
        self._writer: flight.FlightStreamWriter | None = None
        self._reader: threading.Thread | None = None
        self._fd_sender: FdSender | None = None

    @property
    def is_closed(self) -> bool:
        """Whether no more rows of this epoch are wanted."""
        return self._phase is Phase.CLOSED

    @property
    def rows_left(self) -> int:
        """Rows that were put and are not stored."""
        return sum(int(p.batch.num_rows) for p in (*self._waiting, *self._unacknowledged))

    def silence_s(self) -> float:
        """Return for how long the agent has owed an answer."""
        is_owed = self._unacknowledged or self._phase is Phase.OPENING
        return time.monotonic() - self._heard_s if is_owed else 0.0

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
        """Have the thread that puts pieces fail as soon as it waits for the agent."""
        self._break("it was cancelled")

    def close(self) -> None:
        """End the connection, whatever is under way."""
        self._end_call()
        if self._reader is not None:
            self._reader.join(_END_S)  # descriptors under way are lost once their sender closes
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
                    if not self._unacknowledged:
                        self._heard_s = time.monotonic()
                    self._unacknowledged.append(self._waiting.pop(0))
            if is_open:
                self._send(piece)
            else:
                self._begin_call(piece.batch.schema)

    def _may_send(self) -> bool:
        """Whether the first piece that waits may go, or a call for its schema begin."""
        is_pausing = time.monotonic() < self._resume_s
        if not self._waiting or self._phase is not Phase.READY or is_pausing:
            return False
        is_open = self._waiting[0].batch.schema == self._schema
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
        with self._changed:
            self._phase, self._heard_s, self._schema = Phase.OPENING, time.monotonic(), schema
        self._client = self._client or self._spec.connect(self.target.uri)
        try:
            self._writer, acks = self._client.do_put(self._header, schema, self._spec.options())
        except (pa.ArrowException, OSError) as error:
            self._fail(error)
            return
        name, args = f"sparkdl-acks-{self.target.name}", (self._writer, acks)
        self._reader = threading.Thread(target=self._read_acks, args=args, name=name, daemon=True)
        self._reader.start()

    def _end_call(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._writing, suppress(pa.ArrowException, OSError):
                writer.done_writing()  # `_read_acks` closes it once the agent has ended the call

    def _send(self, piece: Piece) -> None:
        """Send one piece; blocks only while the socket's buffers are full."""
        assert self._writer is not None
        try:
            key = self._send_fd(piece.batch)
            batch = piece.batch.slice(0, 0) if key else piece.batch
            what = PutPiece(piece.ranges, piece.batch.num_rows, key)
            with self._writing:
                self._writer.write_with_metadata(batch, msgspec.json.encode(what))
        except (pa.ArrowException, OSError) as error:
            self._fail(error)

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
        except OSError:  # the stream needs no descriptor, and reports what has happened
            self._fd_sender.close()
            self._fd_sender = None
            return ""

    def _read_acks(
        self, writer: flight.FlightStreamWriter, acks: flight.FlightMetadataReader
    ) -> None:
        try:
            while (buffer := acks.read()) is not None:
                self._on_ack(buffer.to_pybytes())
        except (pa.ArrowException, OSError) as error:
            self._fail(error)
        try:
            with self._writing:
                writer.close()  # which alone raises why the agent has ended the call
        except (pa.ArrowException, OSError) as error:
            self._fail(error)
        if self._writer is writer:
            self._break(f"{self.target.name} ended the stream")

    def _on_ack(self, data: bytes) -> None:
        try:
            ack = msgspec.json.decode(data, type=PutAck)
        except msgspec.MsgspecError as error:
            self._fail(error)
            return
        with self._changed:
            if (
                self._writer is None or self._phase is Phase.BROKEN
            ):  # `close` or `cancel` came first
                return
            self._heard_s, self._shortage = time.monotonic(), ack.shortage
            if self._phase is Phase.OPENING:
                self._phase = Phase.READY
                if self._fd_sender is None:
                    self._fd_sender = FdSender.connect(ack.fd_socket, self._spec.token)
            else:
                piece = self._unacknowledged.popleft()
                if ack.accepted:
                    self.rows_stored += piece.batch.num_rows
                    self._deadline = Deadline.after(self._spec.timeout_s)
                else:
                    insort(self._waiting, piece, key=lambda each: each.ranges)
                    self._resume_s = self._heard_s + _PAUSE_S
            if ack.closed:
                self._phase = Phase.CLOSED
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        is_unreachable = isinstance(error, (flight.FlightUnavailableError, OSError))
        is_new = self._phase is Phase.OPENING and not self.rows_stored
        hint = _UNREACHABLE if is_unreachable and is_new else ""
        self._break(f"{self.target.name}: {flight_reason(error)}{hint}", is_unreachable)

    def _break(self, problem: str, is_unreachable: bool = False) -> None:
        """Note why the stream cannot go on, unless it need not; the first reason counts."""
        with self._changed:
            if self.is_closed and not self._unacknowledged:
                return
            self.is_unreachable |= is_unreachable
            if self._phase is not Phase.BROKEN:
                self._phase, self._problem = Phase.BROKEN, problem
            self._changed.notify_all()
