"""A feeder's connection to one node.

Runs in: feeder
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.descriptors import FdSender
from sparkdl.feed.store.segment import write_segment
from sparkdl.feed.transfer.groups import ask
from sparkdl.feed.transfer.messages import (
    FeederError,
    FeedSpec,
    PlanRequest,
    PutAck,
    PutHeader,
    PutPiece,
    Target,
    flight_reason,
)

WINDOW = 2
"""Pieces on their way to one node: one is being stored while the next one travels."""
FULL_PAUSE_S = 1.0
"""How long a node that gave a piece back for want of room is left alone."""
_UNREACHABLE = (
    ". If that node is up, set SPARKDL_NODE_HOST on its executor to an address at which the hosts "
    "of the other executors reach it"
)


@dataclass(frozen=True)
class Piece:
    """Rows of a partition, from `start_row` on, on their way to one node."""

    batch: pa.RecordBatch
    start_row: int


class PutStream:
    """The connection to one node for one partition, with a thread that reads acknowledgements.

    Fields are guarded by `changed`, which all streams of a feeder share.
    """

    def __init__(
        self, target: Target, header: PutHeader, spec: FeedSpec, changed: threading.Condition
    ):
        self.target = target
        self.is_closed = False
        self.is_late = False
        self.error = ""
        self.is_unreachable = False
        self.was_full = False
        self.shortage = ""
        self.full_until_s = 0.0
        self.rows_accepted = 0
        self.covered: tuple[tuple[int, int], ...] = ()
        self.refused: list[Piece] = []
        self.unacknowledged: deque[Piece] = deque()
        self._heard_s = time.monotonic()
        self._calls = 0
        """Beside the stream itself, that the node has not answered."""
        self._is_answered = False
        self._has_covered = False
        self._has_ended = False
        self._header = flight.FlightDescriptor.for_command(msgspec.json.encode(header))
        self._spec = spec
        self._changed = changed
        self._client = spec.connect(target)
        self._schema: pa.Schema | None = None
        self._fd_sender: FdSender | None = None
        self._writer: flight.FlightStreamWriter | None = None
        self._given_up: flight.FlightStreamWriter | None = None
        self._reader: threading.Thread | None = None

    def open(self, schema: pa.Schema) -> None:
        """Begin a stream of batches of `schema`; the first acknowledgement comes at once."""
        self._finish_stream()
        self._schema = schema
        self._heard_s = time.monotonic()
        self._is_answered = self._has_ended = False
        try:
            writer, metadata = self._client.do_put(self._header, schema, self._spec.options())
        except (pa.ArrowException, OSError) as error:
            self._fail(error)
            return
        self._writer = writer
        self._reader = threading.Thread(
            target=self._read_acks,
            args=(metadata,),
            name=f"sparkdl-acks-{self.target.name}",
            daemon=True,
        )
        self._reader.start()

    def wait_open(self) -> None:
        """Wait for the first acknowledgement: it says what the node has of the partition."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._is_answered or self.problem(), self._spec.timeout_s
            ):
                self.error = f"{self.target.name} did not answer for {self._spec.timeout_s:g} s"

    def send(self, piece: Piece) -> None:
        """Send one piece; blocks only while the socket's buffers are full."""
        if piece.batch.schema != self._schema:
            self.open(piece.batch.schema)
        with self._changed:
            if not self.unacknowledged:
                self._heard_s = time.monotonic()
            self.unacknowledged.append(piece)
        if self._writer is None:
            return
        try:
            key = self._send_fd(piece.batch)
            batch = piece.batch.slice(0, 0) if key else piece.batch
            what = PutPiece(piece.start_row, piece.batch.num_rows, key)
            self._writer.write_with_metadata(batch, msgspec.json.encode(what))
        except (pa.ArrowException, OSError) as error:
            self._fail(error)

    def plan(self, request: PlanRequest) -> list[int]:
        """Ask this node how to share rows out over its group."""
        try:
            with self._calling():
                answer = ask(self._client, self._spec, request)
            return msgspec.json.decode(answer, type=list[int])
        except (pa.ArrowException, OSError) as error:
            self._fail(error)
            raise FeederError(self.error) from None

    def close(self) -> None:
        """End the stream in order, then the connection."""
        self._finish_stream()
        self._disconnect()

    def abort(self) -> None:
        """End the stream without waiting for what is in flight."""
        if self._writer is not None:
            with suppress(pa.ArrowException, OSError):
                self._writer.done_writing()
            with self._changed:
                self._given_up = self._writer  # `_read_acks` lets go of it, unless it has ended
                has_ended = self._has_ended
            if has_ended:
                _let_go(self._writer)
        self._disconnect()

    def problem(self) -> str:
        """Return why this stream cannot continue, or an empty text."""
        if not self.error and self._has_ended and self._writer is not None:
            try:
                self._writer.close()  # which alone raises why the node has ended the stream
                self.error = f"{self.target.name} ended the stream"
            except (pa.ArrowException, OSError) as error:
                self._fail(error)
        return self.error

    def silence_s(self) -> float:
        """Return for how long the node has owed an answer."""
        is_owed = self.unacknowledged or self._calls or not self._is_answered
        return time.monotonic() - self._heard_s if is_owed else 0.0

    def has_room(self) -> bool:
        """Whether another piece may be sent."""
        return self.may_send() and time.monotonic() >= self.full_until_s

    def may_send(self) -> bool:
        """Whether another piece may be sent, but for the pause of a full node."""
        return not self.is_closed and len(self.unacknowledged) < WINDOW

    @contextmanager
    def _calling(self) -> Iterator[None]:
        self._heard_s = time.monotonic()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def _send_fd(self, batch: pa.RecordBatch) -> str:
        """Send the batch to a node on this machine; return its key, empty for another machine."""
        if self._fd_sender is None:
            return ""
        try:
            fd, _nbytes = write_segment(batch)
        except OSError:  # no descriptor or no memory for it; the stream needs neither
            return ""
        try:
            return self._fd_sender.send(fd)
        except OSError:  # the stream will report what has happened
            self._fd_sender.close()
            self._fd_sender = None
            return ""
        finally:
            os.close(fd)

    def _disconnect(self) -> None:
        if self._fd_sender is not None:
            self._fd_sender.close()
        self._client.close()

    def _finish_stream(self) -> None:
        if self._writer is None or self._reader is None:
            return
        writer, reader = self._writer, self._reader
        self._writer = self._reader = None
        try:
            with self._calling():
                writer.done_writing()
                reader.join(self._spec.timeout_s)
                writer.close()
        except (pa.ArrowException, OSError) as error:
            self._fail(error)

    def _read_acks(self, metadata: flight.FlightMetadataReader) -> None:
        try:
            while (buffer := metadata.read()) is not None:
                ack = msgspec.json.decode(buffer.to_pybytes(), type=PutAck)
                with self._changed:
                    self._on_ack(ack)
                    self._changed.notify_all()
        except (pa.ArrowException, OSError, msgspec.MsgspecError) as error:
            self._fail(error)
        finally:
            with self._changed:
                self._has_ended = True
                given_up = self._given_up
                self._changed.notify_all()
            if given_up is not None:
                _let_go(given_up)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.is_unreachable |= isinstance(error, (flight.FlightUnavailableError, OSError))
            hint = _UNREACHABLE if self.is_unreachable and not self._has_covered else ""
            self.error = self.error or f"{self.target.name}: {flight_reason(error)}{hint}"

    def _on_ack(self, ack: PutAck) -> None:
        self.is_closed, self.shortage = ack.closed, ack.shortage
        self.is_late = False
        self._heard_s = time.monotonic()
        if not self._is_answered:
            self._is_answered = True
            if not self._has_covered:
                self.covered, self._has_covered = ack.covered, True
                self._fd_sender = FdSender.connect(ack.fd_socket, self._spec.token)
            return
        piece = self.unacknowledged.popleft()
        self.was_full = not (ack.accepted or ack.closed)
        if ack.accepted:
            self.rows_accepted += piece.batch.num_rows
            return
        self.refused.append(piece)
        if self.was_full:
            self.full_until_s = time.monotonic() + FULL_PAUSE_S


def _let_go(writer: flight.FlightStreamWriter) -> None:
    """Close a writer whose stream has ended, or Arrow says on stderr how, when it is collected."""
    with suppress(pa.ArrowException, OSError):
        writer.close()
