"""The Arrow Flight server of an agent: rows come in, results go out.

`DoPut` appends to a spool. The descriptor's command is a `PutHeader`; each batch comes with a
`PutPiece`; the server answers once at the start and then once per batch with a `PutAck`, when the
batch has found room. `DoGet` sends the rows of a `FetchTicket` to another agent, their assignee.
`DoAction` frees them once they have arrived there; on one machine it lends their files instead. The
driver gets files by `FilePiece`s (`DoGet`).
`DoExchange` is one inference partition: batches in, and for each one or more one-column batches
(`ipc`: binary) back, whose value is an Arrow IPC stream of encoded result rows. Every call carries
the cluster's token (`authorization: Bearer …`), checked before the call reaches any of these.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.auth import is_authorized
from sparkdl.control.descriptors import FdReceiver, FdSender
from sparkdl.control.tls import Tls
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedClosedError, InferenceError, ProtocolError, SparkdlError
from sparkdl.core.failure import FailureKind
from sparkdl.core.row_ranges import count_rows
from sparkdl.core.world import host_port
from sparkdl.feed.store.buffer import AppendRequest
from sparkdl.feed.store.session import Exchange
from sparkdl.feed.store.spool import Spool
from sparkdl.feed.store.store import NodeStore
from sparkdl.feed.transfer.files import FilePiece, read_piece
from sparkdl.feed.transfer.messages import (
    LEND,
    RESULT_SCHEMA,
    ExchangeHeader,
    FetchTicket,
    Lent,
    PutAck,
    PutHeader,
    PutPiece,
    result_batch,
)
from sparkdl.values.batches import join

_FD_WAIT_S = 10.0
"""How long to wait for a descriptor, which was sent before its segment was announced."""
_CALLS_END_S = 1.0
"""How long calls may end in order at the shutdown, before their connections are shut down."""
_MAX_REASON_NBYTES = 7000
"""Of an error's text, which travels in gRPC's headers of 8 KiB twice: once percent-encoded."""


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        values = headers.get("authorization") or headers.get("Authorization") or []
        if not is_authorized(values[0] if values else None, self._token):
            raise flight.FlightUnauthenticatedError("wrong or missing token")


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves one store on `host`, at a port of the system's choice (`port`).

    Args:
        on_lacking: called on Flight's threads with a generation, the kind of the failure, and which
            of its rows are not here that another agent wants.
    """

    def __init__(
        self,
        host: str,
        token: str,
        store: NodeStore,
        tls: Tls | None = None,
        on_lacking: Callable[[int, FailureKind, str], None] = lambda *_: None,
        folder: Path = Path("/dev/null"),
    ) -> None:
        scheme = "grpc+tls" if tls else "grpc"
        super().__init__(
            f"{scheme}://{host_port(host, 0)}",
            middleware={"token": _TokenCheck(token)},
            **(tls.flight_options() if tls else {}),
        )
        self._store = store
        self._on_lacking = on_lacking
        self._folder = folder
        self._token = token
        self.fd_receiver = FdReceiver(token)
        self._fd_senders: dict[str, FdSender] = {}
        self._lending = threading.Lock()
        self.uri = f"{scheme}://{host_port(host, self.port)}"

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        header = _decode(descriptor.command, PutHeader)
        spool = self._store.spool(header.feed, header.generation)
        # Answered before any batch: the feeder learns where to send descriptors, if any.
        first = PutAck(not spool.takes(header.epoch), self.fd_receiver.name)
        writer.write(msgspec.json.encode(first))
        for chunk in reader:
            piece = _decode(chunk.app_metadata or b"", PutPiece)
            spans = tuple((header.partition, *rows) for rows in piece.ranges)
            request = AppendRequest(
                header.epoch,
                keep=header.keep,
                spans=spans,
                run=header.run,
                digest=piece.digest,
                in_order=header.in_order,
            )
            if piece.end is None:
                is_stored = self._spool(spool, chunk, piece, request)
            else:
                is_stored = spool.note_end(header.epoch, header.partition, piece.end)
            is_closed = not is_stored or not spool.takes(header.epoch)
            writer.write(msgspec.json.encode(PutAck(is_closed)))

    def _spool(
        self, spool: Spool, chunk: flight.FlightStreamChunk, piece: PutPiece, request: AppendRequest
    ) -> bool:
        batch = None if piece.key else _rows(chunk)
        rows = piece.rows if batch is None else batch.num_rows
        # The driver knows rows by these numbers: wrong ones would lose or repeat rows.
        if not rows or any(stop <= start for start, stop in piece.ranges):
            raise ProtocolError("a piece without rows")
        if count_rows(piece.ranges) != rows:
            raise ProtocolError(f"a piece of {rows} rows whose numbers are {piece.ranges}")
        if batch is not None:
            return spool.append(batch, request)
        fd = self.fd_receiver.wait_fd(piece.key, Deadline.after(_FD_WAIT_S))
        return spool.adopt(fd, piece.rows, request)

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        """Send the rows of the first windows of a ticket; a single window is not copied.

        The rows stay here until the other agent confirms them (`do_action`), because rows already
        sent may have been lost with the connection.
        """
        wanted = _decode(ticket.ticket, FetchTicket | FilePiece)
        if isinstance(wanted, FilePiece):
            return self._piece(wanted)
        spool = self._store.spool(wanted.feed, wanted.generation)
        if spool.is_closed:  # one of the two agents has not heard yet that a generation is over
            raise flight.FlightUnavailableError("another generation of the feed runs here")
        batches, nbytes = list[pa.RecordBatch](), 0
        try:
            for batch in spool.read(wanted.windows):
                nbytes += batch.nbytes
                is_same = not batches or batch.schema.equals(batches[0].schema, True)
                if batches and (nbytes > wanted.nbytes or not is_same):
                    break
                batches.append(batch)
        except FeedClosedError as error:
            if not batches:  # those before it can be sent
                if not spool.is_closed:
                    self._on_lacking(wanted.generation, "exception", str(error))
                raise flight.FlightUnavailableError(_fitting(str(error))) from None
        except OSError as error:
            raise flight.FlightUnavailableError(f"the rows cannot be read: {error}") from None

        if not batches:
            raise ProtocolError("a ticket that names no rows")
        batch = join(batches)
        # A `GeneratorStream` would send no dictionaries.
        return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(batch.schema, [batch]))

    def _piece(self, wanted: FilePiece) -> flight.FlightDataStream:
        try:
            batch = read_piece(self._folder, wanted)
        except OSError as error:
            raise flight.FlightServerError(_fitting(f"it cannot be read: {error}")) from None
        return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(RESULT_SCHEMA, [batch]))

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> list[flight.Result]:
        ticket = _decode(action.body, FetchTicket)
        spool = self._store.spool(ticket.feed, ticket.generation)
        if action.type == LEND:
            return [flight.Result(msgspec.json.encode(self._lend(spool, ticket)))]
        for window in ticket.windows:
            spool.free(*window)
        return []

    def _lend(self, spool: Spool, ticket: FetchTicket) -> list[Lent]:
        """Send the windows' files to an agent on this machine: none, if it is on another one."""
        name, lent = ticket.fd_socket, list[Lent]()
        with self._lending:
            sender = self._fd_senders.get(name) or FdSender.connect(name, self._token)
            if sender is None:
                return lent
            self._fd_senders[name] = sender
            try:
                for window in ticket.windows:
                    fd, start = spool.lend(*window)
                    try:
                        lent.append(Lent(sender.send(fd), start))
                    finally:
                        os.close(fd)
            except (FeedClosedError, OSError):  # the other agent asks for the rows, and is told why
                self._fd_senders.pop(name).close()
        return lent

    def shutdown(self) -> None:
        """Let calls end; disconnect those still running after a second.

        gRPC itself waits for them for ever. A feeder that waits for another node says nothing.
        """
        self.fd_receiver.close()
        with self._lending:
            for sender in self._fd_senders.values():
                sender.close()
            self._fd_senders.clear()
        hanging_up = threading.Timer(_CALLS_END_S, _hang_up, [self.port])
        hanging_up.daemon = True
        hanging_up.start()
        super().shutdown()
        hanging_up.cancel()
        hanging_up.join()

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        header = _decode(descriptor.command, ExchangeHeader)
        try:
            exchange = self._store.open_exchange(header.exchange)
        except FeedClosedError as error:
            raise flight.FlightServerError(_fitting(str(error))) from None
        # Two threads, because `map_fun` may read any number of rows before it answers the first.
        is_answered = threading.Event()  # `Thread.join` would leave a note of gRPC's thread behind

        def answer() -> None:
            try:
                self._answer(header, exchange, writer)
            finally:
                is_answered.set()

        threading.Thread(target=answer, name="sparkdl-answers", daemon=True).start()
        try:
            self._take_in(header, exchange, reader)
        except (SparkdlError, pa.ArrowException, OSError) as error:
            exchange.fail(f"receiving the partition failed: {error}")
        except BaseException:
            exchange.fail("receiving the partition failed")  # or `answer` would wait for ever
            raise
        finally:
            is_answered.wait()  # neither thread may use a stream whose call has ended
            self._store.close_exchange(header.exchange)
        if exchange.failure:
            raise flight.FlightServerError(_fitting(exchange.failure))

    def _answer(
        self, header: ExchangeHeader, exchange: Exchange, writer: flight.MetadataRecordBatchWriter
    ) -> None:
        try:
            writer.begin(RESULT_SCHEMA)
            for data in exchange.results(header.timeout_s or self._store.timeout_s):
                writer.write_batch(result_batch(data))
        except InferenceError:
            return  # the other thread reports it to the client
        except (pa.ArrowException, OSError) as error:
            exchange.fail(f"sending results failed: {error}")

    def _take_in(
        self, header: ExchangeHeader, exchange: Exchange, reader: flight.MetadataRecordBatchReader
    ) -> None:
        log, last = self._store.log(header.feed), None
        for chunk in reader:
            if exchange.failure:
                return
            last = _rows(chunk)
            exchange.expect(last.num_rows)
            if not last.num_rows:
                continue
            # Without room it waits until an answer is too late, see `Exchange.results`.
            if not log.append(last, AppendRequest(exchange=exchange)):
                exchange.fail("the node takes no more rows")
                return
        # An empty segment ends the partition for `next_batch`, which would wait for more.
        if last is not None:
            log.append(last.slice(0, 0), AppendRequest(exchange=exchange, is_last=True))
        exchange.finish_input()


def _decode(data: Any, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ProtocolError(f"not a {getattr(kind, '__name__', kind)}: {error}") from None


def _rows(chunk: flight.FlightStreamChunk) -> pa.RecordBatch:
    if chunk.data is None:
        raise ProtocolError("a message of the stream has no rows")
    try:
        chunk.data.validate()
    except pa.ArrowException as error:
        raise ProtocolError(f"a broken record batch: {error}") from None
    return chunk.data


def _fitting(reason: str) -> str:
    """Return as much of a reason as can travel: its beginning, and the end of its traceback."""
    text, chars = reason, len(reason)
    while len(quote(text)) + len(text.encode()) > _MAX_REASON_NBYTES:
        chars = chars * 3 // 4
        text = f"{reason[: chars // 3]}\n…\n{reason[-(chars * 2 // 3) :]}"
    return text


def _hang_up(port: int) -> None:
    """End all connections to a port of this process; do nothing where there is no `/proc`."""
    for path in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile; or a socket that listens
            if not path.is_socket():
                continue
            # By a copy, which stays this connection if gRPC closes its own.
            with socket.socket(fileno=os.dup(int(path.name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    copy.getpeername()
                    if copy.getsockname()[1] == port:
                        copy.shutdown(socket.SHUT_RDWR)
