"""One partition on its way to the nodes: every batch is split so that the nodes' totals stay level.

Runs in: feeder

    partition ── batch ──▶ level() ──▶ lane to node 0 ── DoPut ──▶ agent 0
                             ▲    └──▶ lane to node 1 ── DoPut ──▶ agent 1
                             └──────── acknowledgements: rows at the node, room, closed

A lane holds at most `WINDOW` unacknowledged pieces. A node that is full acknowledges late, so its rows go to others;
a node that has closed refuses, and what it refused goes to others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.auth import bearer
from sparkdl.core.errors import FeedTimeoutError, SparkdlError
from sparkdl.feed.plan import level, merge_ranges, uncovered
from sparkdl.feed.receiver import ExchangeHeader, PutAck, PutHeader

WINDOW = 2
"""Pieces in flight per node: one on the wire while the node stores the other."""


class FeederError(SparkdlError):
    """A feeder lost its connection to a node; Spark tries the partition again."""


@dataclass(frozen=True)
class Target:
    """A node that can be fed."""

    node_id: int
    name: str
    uri: str


@dataclass(frozen=True)
class FeedOrder:
    """Which feed, which epoch, to whom. Goes to Spark inside the task.

    `run` is unique to one Spark job, so that attempts at its partitions recognise each other.
    """

    feed: str
    epoch: int
    run: str
    targets: tuple[Target, ...]
    token: str = field(repr=False)
    timeout_s: float = 600.0

    def options(self) -> flight.FlightCallOptions:
        """Return the call options that carry the token."""
        return flight.FlightCallOptions(headers=[(b"authorization", bearer(self.token).encode())])


@dataclass(frozen=True)
class FedPartition:
    """What became of one partition: rows by node id, and rows that no node wanted any more."""

    partition: int
    rows: dict[int, int]
    rows_refused: int


@dataclass(frozen=True)
class _Piece:
    batch: pa.RecordBatch
    start_row: int


class _Lane:
    """The connection to one node for one partition, with a thread that reads acknowledgements.

    Fields are guarded by `changed`, which all lanes of a feeder share.
    """

    def __init__(
        self, target: Target, header: PutHeader, order: FeedOrder, changed: threading.Condition
    ):
        self.target = target
        self.total = 0
        self.is_closed = False
        self.error = ""
        self.rows_accepted = 0
        self.covered: tuple[tuple[int, int], ...] = ()
        self.refused: list[_Piece] = []
        self.unacknowledged: deque[_Piece] = deque()
        self._greeted = False
        self._has_covered = False
        self._header = flight.FlightDescriptor.for_command(msgspec.json.encode(header))
        self._order = order
        self._changed = changed
        self._client = flight.connect(target.uri)
        self._schema: pa.Schema | None = None
        self._writer: flight.FlightStreamWriter | None = None
        self._reader: threading.Thread | None = None

    def open(self, schema: pa.Schema) -> None:
        """Begin a stream of batches of `schema`; the first acknowledgement comes at once."""
        self._finish_stream()
        self._schema = schema
        self._writer, metadata = self._client.do_put(self._header, schema, self._order.options())
        self._reader = threading.Thread(
            target=self._read_acks,
            args=(metadata,),
            name=f"sparkdl-acks-{self.target.name}",
            daemon=True,
        )
        with self._changed:
            self._greeted = False
        self._reader.start()

    def wait_open(self) -> None:
        """Wait for the first acknowledgement, which tells the node's total."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._greeted or self.error, self._order.timeout_s
            ):
                self.error = f"{self.target.name} did not answer for {self._order.timeout_s:g} s"

    def send(self, piece: _Piece) -> None:
        """Send one piece; blocks only while the socket's buffers are full."""
        if piece.batch.schema != self._schema:
            self.open(piece.batch.schema)
        with self._changed:
            self.unacknowledged.append(piece)
        assert self._writer is not None
        try:
            self._writer.write_with_metadata(piece.batch, piece.start_row.to_bytes(8, "big"))
        except (pa.ArrowException, OSError) as error:
            with self._changed:
                self.error = self.error or f"sending to {self.target.name} failed: {error}"

    def close(self) -> None:
        """End the stream in order, then the connection."""
        self._finish_stream()
        self._client.close()

    def abort(self) -> None:
        """Drop the connection and what is in flight."""
        self._client.close()

    def expected_total(self) -> int:
        """Rows at the node once everything in flight has arrived."""
        return self.total + sum(piece.batch.num_rows for piece in self.unacknowledged)

    def has_room(self) -> bool:
        """Whether another piece may be sent."""
        return not self.is_closed and len(self.unacknowledged) < WINDOW

    def _finish_stream(self) -> None:
        if self._writer is None or self._reader is None:
            return
        writer, reader = self._writer, self._reader
        self._writer = self._reader = None
        try:
            writer.done_writing()
            reader.join(self._order.timeout_s)
            writer.close()
        except (pa.ArrowException, OSError) as error:
            with self._changed:
                self.error = self.error or f"{self.target.name}: {error}"

    def _read_acks(self, metadata: flight.FlightMetadataReader) -> None:
        try:
            while (buffer := metadata.read()) is not None:
                ack = msgspec.json.decode(buffer.to_pybytes(), type=PutAck)
                with self._changed:
                    self._take(ack)
                    self._changed.notify_all()
        except (pa.ArrowException, OSError) as error:
            with self._changed:
                self.error = self.error or f"{self.target.name}: {error}"
                self._changed.notify_all()

    def _take(self, ack: PutAck) -> None:
        self.total = ack.rows_received
        self.is_closed = ack.closed
        if not self._greeted:
            self._greeted = True
            if not self._has_covered:
                self.covered, self._has_covered = ack.covered, True
            return
        piece = self.unacknowledged.popleft()
        if ack.accepted:
            self.rows_accepted += piece.batch.num_rows
        else:
            self.refused.append(piece)


class Feeder:
    """Feeds one partition. Use once."""

    def __init__(self, order: FeedOrder, partition: int) -> None:
        self._order = order
        self._partition = partition
        self._header = PutHeader(order.feed, order.epoch, order.run, partition)
        self._changed = threading.Condition()
        self._lanes: list[_Lane] = []
        self._done: list[tuple[int, int]] = []

    def feed(self, batches: Iterator[pa.RecordBatch]) -> FedPartition:
        """Send all rows; returns when each is stored at a node, or refused by all.

        Raises:
            FeederError: if a connection broke.
            FeedTimeoutError: if no node stored anything for the feed timeout.
        """
        refused = 0
        try:
            row = 0
            for batch in batches:
                if not batch.num_rows:
                    continue
                self._connect(batch.schema)
                for start, stop in uncovered(row, row + batch.num_rows, self._done):
                    piece = _Piece(batch.slice(start - row, stop - start), start)
                    refused += self._place(piece)
                row += batch.num_rows
                if all(lane.is_closed for lane in self._lanes):
                    break
            refused += self._settle()
        except BaseException:
            for lane in self._lanes:
                lane.abort()
            raise
        for lane in self._lanes:
            lane.close()
        self._raise_errors()
        return FedPartition(self._partition, self._rows(), refused)

    def _rows(self) -> dict[int, int]:
        return {
            lane.target.node_id: lane.rows_accepted
            + sum(stop - start for start, stop in lane.covered)
            for lane in self._lanes
        }

    def _connect(self, schema: pa.Schema) -> None:
        if self._lanes:
            return
        for target in self._order.targets:
            self._lanes.append(_Lane(target, self._header, self._order, self._changed))
        for lane in self._lanes:
            lane.open(schema)
        for lane in self._lanes:
            lane.wait_open()
        self._raise_errors()
        self._done = merge_ranges(part for lane in self._lanes for part in lane.covered)

    def _place(self, piece: _Piece) -> int:
        """Send a piece, split over the nodes; return the rows that no node wants."""
        with self._changed:
            self._wait(lambda: any(lane.has_room() for lane in self._lanes) or self._all_closed())
            if self._all_closed():
                return int(piece.batch.num_rows)
            totals = [lane.expected_total() for lane in self._lanes]
            shares = level(piece.batch.num_rows, totals, [lane.has_room() for lane in self._lanes])
        start = 0
        for lane, share in zip(self._lanes, shares, strict=True):
            if share:
                lane.send(_Piece(piece.batch.slice(start, share), piece.start_row + start))
                start += share
        return self._resend_refused()

    def _resend_refused(self) -> int:
        with self._changed:
            pieces = [piece for lane in self._lanes for piece in lane.refused]
            for lane in self._lanes:
                lane.refused.clear()
        return sum(self._place(piece) for piece in pieces)

    def _settle(self) -> int:
        """Wait until everything sent is acknowledged; return the rows that no node wants."""
        refused = 0
        while True:
            with self._changed:
                self._wait(lambda: not any(lane.unacknowledged for lane in self._lanes))
                if not any(lane.refused for lane in self._lanes):
                    return refused
            refused += self._resend_refused()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for `is_done` as long as some acknowledgement comes within the feed timeout."""
        while not is_done():
            self._raise_errors()
            if not self._changed.wait(self._order.timeout_s):
                names = ", ".join(lane.target.name for lane in self._lanes if lane.unacknowledged)
                raise FeedTimeoutError(
                    f"{names} stored no row of feed {self._order.feed!r} for "
                    f"{self._order.timeout_s:g} s"
                )
        self._raise_errors()

    def _all_closed(self) -> bool:
        return all(lane.is_closed for lane in self._lanes)

    def _raise_errors(self) -> None:
        errors = [lane.error for lane in self._lanes if lane.error]
        if errors:
            raise FeederError("; ".join(errors))


def exchange(
    order: FeedOrder, name: str, target: Target, batches: Iterator[pa.RecordBatch]
) -> Iterator[bytes]:
    """Send one inference partition to `target`; yield Arrow IPC streams of encoded result rows.

    Raises:
        FeederError: if the node failed or answered wrongly; the message is the node's.
    """
    first = next(batches, None)
    if first is None:
        return
    command = msgspec.json.encode(ExchangeHeader(order.feed, name))
    with flight.connect(target.uri) as client:
        writer, reader = client.do_exchange(
            flight.FlightDescriptor.for_command(command), order.options()
        )
        problems: list[str] = []

        def pump() -> None:
            try:
                writer.begin(first.schema)
                writer.write_batch(first)
                for batch in batches:
                    writer.write_batch(batch)
                writer.done_writing()
            except (pa.ArrowException, OSError) as error:
                problems.append(str(error))

        thread = threading.Thread(target=pump, name="sparkdl-exchange", daemon=True)
        thread.start()
        try:
            for chunk in reader:
                yield chunk.data.column(0)[0].as_py()
            thread.join(order.timeout_s)
            writer.close()
        except (pa.ArrowException, OSError) as error:
            raise FeederError(f"inference at {target.name} failed: {error}") from None
        if problems:
            raise FeederError(f"inference at {target.name} failed: {problems[0]}")
