"""One partition on its way to the nodes: every batch is split so that the nodes' totals stay level.

Runs in: feeder

    partition ── batch ──▶ level() ──▶ lane to node 0 ── DoPut ──▶ agent 0
                             ▲    └──▶ lane to node 1 ── DoPut ──▶ agent 1
                             └──────── acknowledgements: rows at the node, room, closed

A lane holds one unacknowledged piece: the node is reading then, so that sending never waits for
room at the node. A node that is full acknowledges late, so its rows go to others; a node that has
closed refuses, and what it refused goes to others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.auth import bearer
from sparkdl.core.errors import FeedTimeoutError, SparkdlError
from sparkdl.feed.plan import level, merge_ranges, uncovered
from sparkdl.feed.receiver import ExchangeHeader, PutAck, PutHeader

PATIENCE_S = 0.5
"""How long the next batch waits for a node that has not acknowledged, before it goes to others."""


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
    `generation` is the world's that is to be fed; nodes of a later one refuse the rows.
    """

    feed: str
    epoch: int
    run: str
    targets: tuple[Target, ...]
    token: str = field(repr=False)
    timeout_s: float = 600.0
    generation: int = 0

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
        self.is_late = False
        self.error = ""
        self.rows_accepted = 0
        self.covered: tuple[tuple[int, int], ...] = ()
        self.refused: list[_Piece] = []
        self.unacknowledged: deque[_Piece] = deque()
        self._greeted = False
        self._has_covered = False
        self._has_ended = False
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
        self._greeted = self._has_ended = False
        try:
            writer, metadata = self._client.do_put(self._header, schema, self._order.options())
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
        """Wait for the first acknowledgement, which tells the node's total."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._greeted or self.problem(), self._order.timeout_s
            ):
                self.error = f"{self.target.name} did not answer for {self._order.timeout_s:g} s"

    def send(self, piece: _Piece) -> None:
        """Send one piece; blocks only while the socket's buffers are full."""
        if piece.batch.schema != self._schema:
            self.open(piece.batch.schema)
        with self._changed:
            self.unacknowledged.append(piece)
        if self._writer is None:
            return
        try:
            self._writer.write_with_metadata(piece.batch, piece.start_row.to_bytes(8, "big"))
        except (pa.ArrowException, OSError) as error:
            self._fail(error)

    def close(self) -> None:
        """End the stream in order, then the connection."""
        self._finish_stream()
        self._client.close()

    def abort(self) -> None:
        """End the stream without waiting for what is in flight."""
        if self._writer is not None:
            with suppress(pa.ArrowException, OSError):
                self._writer.done_writing()
        self._client.close()

    def problem(self) -> str:
        """Return why this lane cannot go on, or nothing."""
        if not self.error and self._has_ended and self._writer is not None:
            try:
                self._writer.close()
                self.error = f"{self.target.name} ended the stream"
            except (pa.ArrowException, OSError) as error:
                self._fail(error)
        return self.error

    def expected_total(self) -> int:
        """Rows at the node once everything in flight has arrived."""
        return self.total + sum(piece.batch.num_rows for piece in self.unacknowledged)

    def has_room(self) -> bool:
        """Whether another piece may be sent."""
        return not self.is_closed and not self.unacknowledged

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
            self._fail(error)

    def _read_acks(self, metadata: flight.FlightMetadataReader) -> None:
        try:
            while (buffer := metadata.read()) is not None:
                ack = msgspec.json.decode(buffer.to_pybytes(), type=PutAck)
                with self._changed:
                    self._take(ack)
                    self._changed.notify_all()
        except (pa.ArrowException, OSError) as error:
            self._fail(error)
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.error = self.error or f"{self.target.name}: {_reason(error)}"

    def _take(self, ack: PutAck) -> None:
        self.total = ack.rows_received
        self.is_closed = ack.closed
        self.is_late = False
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
    """Feeds one partition. Use once.

    Args:
        attempt: grows from one attempt at the partition to the next.
    """

    def __init__(self, order: FeedOrder, partition: int, attempt: int = 0) -> None:
        self._order = order
        self._partition = partition
        self._header = PutHeader(
            order.feed,
            order.epoch,
            order.run,
            partition,
            attempt,
            order.generation,
            order.timeout_s,
        )
        self._changed = threading.Condition()
        self._lanes: list[_Lane] = []
        self._done: list[tuple[int, int]] = []
        self._is_cancelled = False

    def cancel(self) -> None:
        """Have `feed`, in another thread, fail as soon as it waits for a node."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()

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
            self._wait_for_room()
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

    def _wait_for_room(self) -> None:
        """Wait for every node that answers in time, then for any, or until all have closed.

        The rows stay level if no node is left out because it was a little slower than others.
        """
        busy = [lane for lane in self._lanes if not lane.is_late]
        self._changed.wait_for(
            lambda: all(lane.has_room() or lane.is_closed or lane.problem() for lane in busy),
            PATIENCE_S,
        )
        for lane in busy:
            lane.is_late = bool(lane.unacknowledged)
        self._wait(lambda: any(lane.has_room() for lane in self._lanes) or self._all_closed())

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
        with self._changed:
            errors = [problem for lane in self._lanes if (problem := lane.problem())]
            errors += ["it was cancelled"] * self._is_cancelled
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
    command = msgspec.json.encode(ExchangeHeader(order.feed, name, order.timeout_s))
    with flight.connect(target.uri) as client:
        try:
            writer, reader = client.do_exchange(
                flight.FlightDescriptor.for_command(command), order.options()
            )
        except (pa.ArrowException, OSError) as error:
            raise FeederError(f"inference at {target.name} failed: {_reason(error)}") from None
        problems: list[BaseException] = []

        def pump() -> None:
            try:
                writer.begin(first.schema)
                writer.write_batch(first)
                for batch in batches:
                    writer.write_batch(batch)
                writer.done_writing()
            except BaseException as error:  # noqa: BLE001 (raised by the other thread)
                problems.append(error)
                reader.cancel()

        thread = threading.Thread(target=pump, name="sparkdl-exchange", daemon=True)
        thread.start()
        try:
            for chunk in reader:
                yield chunk.data.column(0)[0].as_py()
            thread.join(order.timeout_s)
            writer.close()
        except (pa.ArrowException, OSError) as error:
            is_ours = problems and isinstance(error, flight.FlightCancelledError)
            cause = problems[0] if is_ours else error
            if not isinstance(cause, (pa.ArrowException, OSError)):
                raise cause from None
            raise FeederError(f"inference at {target.name} failed: {_reason(cause)}") from None
        finally:
            reader.cancel()  # whoever stops asking does not leave the node waiting


def _reason(error: BaseException) -> str:
    """Return what Flight says, without what it adds for its own developers."""
    text = str(error).partition(". gRPC client debug context:")[0]
    return text.partition(". Detail:")[0]
