"""An agent that only spools: a real Flight server that stores what feeders bring, or does not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.descriptors import FdReceiver
from sparkdl.control.tls import Tls
from sparkdl.core.deadline import Deadline
from sparkdl.core.row_ranges import Range
from sparkdl.feed.store.segment import read_segment
from sparkdl.feed.transfer.messages import PutAck, PutHeader, PutPiece, Target
from sparkdl.feed.transfer.server import _TokenCheck
from tests.doubles.feeds import SOON_S, TOKEN

Answer = Literal["store", "close", "store and close", "fail", "say nothing", "babble"]


@dataclass(frozen=True)
class Spooled:
    """A piece that was stored: rows of a partition, and how they came."""

    header: PutHeader
    ranges: tuple[Range, ...]
    batch: pa.RecordBatch
    is_descriptor: bool

    @property
    def rows(self) -> list[int]:
        """The numbers of its rows in the partition."""
        return [row for start, stop in self.ranges for row in range(start, stop)]


class SpoolServer(flight.FlightServerBase):  # type: ignore[misc]
    """The agent of one node.

    Args:
        answer: says what becomes of a piece; called with the message beside it.
        opening: what becomes of a call, as its first answer says.

    Attributes:
        spooled: what is stored.
        seen: the first row's number of each piece that came, whatever became of it.
    """

    def __init__(
        self,
        node_id: int = 0,
        answer: Callable[[PutPiece], Answer] = lambda _: "store",
        opening: Answer = "store",
        token: str = TOKEN,
        tls: Tls | None = None,
    ) -> None:
        scheme = "grpc+tls" if tls else "grpc"
        super().__init__(
            f"{scheme}://127.0.0.1:0",
            middleware={"token": _TokenCheck(token)},
            **(tls.flight_options() if tls else {}),
        )
        self.answer = answer
        self.spooled: list[Spooled] = []
        self.seen: list[int] = []
        self.target = Target(node_id, f"worker:{node_id}", f"{scheme}://127.0.0.1:{self.port}")
        self._opening = opening
        self._changed = threading.Condition()
        self._is_over = threading.Event()
        self._fds = FdReceiver(token)

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._fds.close()
        super().__exit__(*error)

    @property
    def values(self) -> list[int]:
        """Column "x" of all stored rows, in the order in which they came."""
        return [value for each in self.spooled for value in each.batch["x"].to_pylist()]

    def wait_seen(self, pieces: int) -> None:
        """Wait until so many pieces have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= pieces, SOON_S), self.seen

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        """Answer one call."""
        header = msgspec.json.decode(descriptor.command, type=PutHeader)
        self._acknowledge(writer, self._opening, self._fds.name)
        for chunk in reader:
            piece = msgspec.json.decode(chunk.app_metadata.to_pybytes(), type=PutPiece)
            with self._changed:
                self.seen.append(piece.ranges[0][0])
                self._changed.notify_all()
            answer = self.answer(piece)
            if answer in ("store", "store and close"):
                batch = self._descriptor(piece.key) if piece.key else chunk.data
                assert batch.num_rows == piece.rows
                self.spooled.append(Spooled(header, piece.ranges, batch, bool(piece.key)))
            self._acknowledge(writer, answer)

    def _acknowledge(
        self, writer: flight.FlightMetadataWriter, answer: Answer, fd_socket: str = ""
    ) -> None:
        if answer == "fail":
            raise flight.FlightServerError("the spool is on fire")
        if answer == "say nothing":
            self._is_over.wait(SOON_S)
        ack = PutAck("close" in answer, fd_socket)
        writer.write(b"babble" if answer == "babble" else msgspec.json.encode(ack))

    def _descriptor(self, key: str) -> pa.RecordBatch:
        fd = self._fds.wait_fd(key, Deadline.after(SOON_S))
        try:
            return read_segment(fd)
        finally:
            os.close(fd)
