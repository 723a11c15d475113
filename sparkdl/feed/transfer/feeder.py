"""The Spark tasks that feed: each sends its partition to the spool of one agent.

Runs in: feeder

    partition ── batch ──▶ pieces of 4 to 8 MB ──▶ PutStream ── DoPut ──▶ agent: spool

The driver, to which the agents report their rows, assigns them to nodes: a feeder need not know
where they are used. When Spark repeats a task, the new attempt resends all rows that no checkpoint
covers, perhaps to another agent; the driver drops the duplicates.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.auth import fetch_cause
from sparkdl.control.descriptors import FdSender
from sparkdl.control.rows import Digest
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FeedTimeoutError, SparkdlError
from sparkdl.core.failure import Code
from sparkdl.core.row_ranges import Range, merge_ranges, uncovered
from sparkdl.feed.store.segment import write_segment
from sparkdl.feed.transfer.messages import (
    FedPartition,
    FeederError,
    FeedSpec,
    PutAck,
    PutHeader,
    PutPiece,
    Target,
    flight_reason,
    is_there,
    other_rows,
)
from sparkdl.values.batches import halve, join, join_small
from sparkdl.values.digest import RowDigest
from sparkdl.values.rows import encode_rows

_log = logging.getLogger(__name__)

MAX_PIECE_NBYTES = 8 * 1024 * 1024
"""The most bytes sent to an agent at once, where the batches allow."""
BATCH_NBYTES = MAX_PIECE_NBYTES * 15 // 16
"""Where Spark shall end a batch: a piece as it is. The JVM makes the next one meanwhile."""
MAX_JOINED_S = 0.1
"""How long small batches wait for others to be joined to."""
_DRAIN_S = 0.5
"""How long to read unwanted rows: Spark ends a Python worker that leaves input unread, and the next
one has to import as long."""
_LOOK_S = 1.0
_SILENT_S = 2.0
"""How long the driver may take to hear from a node why it cannot be reached: it may have failed."""
FED_SCHEMA = "partition long, num_rows long"
"""Spark schema of what `FeedDataFrame` returns: one `FedPartition` a partition."""
WINDOW = 2
"""Pieces that are not acknowledged: the agent stores one while the next one travels."""
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
    """Rows of a partition, which have the numbers of `ranges` there; see `PutPiece`."""

    batch: pa.RecordBatch
    ranges: tuple[Range, ...]
    digest: Digest | None = None
    end: int | None = None


@dataclass(eq=False)
class _Call:
    """One `DoPut`: batches of one schema."""

    pieces: queue.SimpleQueue[Piece | None] = field(default_factory=queue.SimpleQueue)
    is_written: threading.Event = field(default_factory=threading.Event)
    writer: threading.Thread = field(init=False)


class PutStream:
    """The stream of one partition to one agent.

    Of each call one thread writes, another reads acknowledgements. The caller of `put` never writes
    to the socket itself. While a socket takes no bytes (a frozen agent, a cut link), gRPC ends a
    write neither when its call is cancelled nor when its connection closes. The writing thread may
    thus stay stuck; the caller still fails in time.

    One thread puts pieces; others may call `cancel` and ask how the stream is.
    """

    def __init__(self, target: Target, header: PutHeader, spec: FeedSpec) -> None:
        self.target = target
        self.is_unreachable = False
        self._header = flight.FlightDescriptor.for_command(msgspec.json.encode(header))
        self._spec = spec
        self._changed = threading.Condition()
        self._phase = Phase.READY
        self._problem = ""
        self._unacknowledged = 0
        self._deadline = Deadline.after(spec.timeout_s)
        self._client: flight.FlightClient | None = None
        self._schema: pa.Schema | None = None
        self._call: _Call | None = None
        self._fd_sender: FdSender | None = None
        self._has_stored = False

    @property
    def is_closed(self) -> bool:
        """Whether no more rows of this epoch are wanted."""
        return self._phase is Phase.CLOSED

    def put(self, piece: Piece) -> None:
        """Send a piece; returns once it is under way, or the stream is closed."""
        self._deadline = Deadline.after(self._spec.timeout_s)  # however slow the source is
        schema = piece.batch.schema
        # Another schema needs another call, and that begins once the last call has no piece left.
        if schema != self._schema and self._has_room(0):
            self._begin_call(schema)
        if self._has_room(WINDOW - 1):
            with self._changed:
                self._unacknowledged += 1
            assert self._call is not None
            self._call.pieces.put(piece)

    def _has_room(self, most: int) -> bool:
        """Wait until at most so many pieces are unacknowledged; false once the stream is closed."""
        with self._changed:
            while self._phase is not Phase.READY or self._unacknowledged > most:
                if self.is_closed:
                    return False
                self._wait()
        return True

    def flush(self) -> None:
        with self._changed:
            while self._unacknowledged and not self.is_closed:
                self._wait()

    def cancel(self) -> None:
        """Interrupt the thread that puts pieces at its next wait for the agent."""
        self._break("it was cancelled")

    def close(self) -> None:
        if (call := self._end_call()) is not None:
            call.writer.join(_END_S)  # descriptors under way are lost once their sender closes
        with self._changed:
            if self._fd_sender is not None:
                self._fd_sender.close()
        if self._client is not None:
            self._client.close()

    def _wait(self) -> None:
        """Wait for something to change, while the agent stores rows in time."""
        name, timeout_s = self.target.name, self._spec.timeout_s
        if self._phase is Phase.BROKEN:
            raise FeederError(self._problem)
        if self._deadline.has_passed:
            if self._phase is Phase.OPENING:
                raise FeederError(f"{name} did not answer for {timeout_s:g} s")
            raise FeedTimeoutError(
                f"{name} stored no row of feed {self._spec.feed!r} for {timeout_s:g} s: {_FULL}"
            )
        self._changed.wait(self._deadline.remaining_s)

    def _begin_call(self, schema: pa.Schema) -> None:
        """Begin a call for batches of a schema; the first acknowledgement comes at once."""
        self._end_call()
        self._client = self._client or self._spec.connect(self.target.uri)
        with self._changed:
            self._phase, self._schema = Phase.OPENING, schema
            self._call = call = _Call()
        name = f"sparkdl-puts-{self.target.name}"
        args = (self._client, schema, call)
        # A daemon: its write may never end (see above), and must not hold the worker.
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
                    key = self._send_fd(piece.batch) if piece.batch.num_rows else ""
                    # With a key the rows are in the segment, and the batch is empty.
                    batch = piece.batch.slice(0, 0) if key else piece.batch
                    rows = piece.batch.num_rows
                    what = PutPiece(piece.ranges, rows, key, piece.digest, piece.end)
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
            if self._phase is Phase.OPENING:
                self._phase = Phase.READY
                # None where the agent is on another machine, or in another network namespace.
                if self._fd_sender is None:
                    self._fd_sender = FdSender.connect(ack.fd_socket, self._spec.token)
            else:
                self._unacknowledged -= 1
                self._has_stored = True
                self._deadline = Deadline.after(self._spec.timeout_s)
            if ack.closed:
                self._phase = Phase.CLOSED
            self._changed.notify_all()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Break the stream with the error of the connection that is raised."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (the thread that puts raises it)
            is_unreachable = isinstance(error, (flight.FlightUnavailableError, OSError))
            # An agent that answered before is reachable at its address, so the hint would mislead.
            is_new = self._phase is Phase.OPENING and not self._has_stored
            hint = _UNREACHABLE if is_unreachable and is_new else ""
            self._break(f"{self.target.name}: {flight_reason(error)}{hint}", is_unreachable)

    def _break(self, problem: str, is_unreachable: bool = False) -> None:
        """Record the first error, unless the stream has already finished."""
        with self._changed:
            # Once nothing more is wanted, an agent may end the connection as it likes.
            if self.is_closed:
                return
            self.is_unreachable |= is_unreachable
            if self._phase is not Phase.BROKEN:
                self._phase, self._problem = Phase.BROKEN, problem
            self._changed.notify_all()


class Feeder:
    """Feeds one partition. Use once."""

    def __init__(self, spec: FeedSpec, partition: int) -> None:
        self._spec = spec
        self._partition = partition
        header = PutHeader(
            *(spec.feed, spec.epoch, spec.run, partition),
            *(spec.generation, spec.keep, spec.in_order),
        )
        self._stream = PutStream(near_target(spec.targets, partition), header, spec)
        self._done = merge_ranges(spec.done.get(partition, ()))
        self._row = 0
        self._none = pa.record_batch([], pa.schema([]))
        self._digest = RowDigest() if spec.digests is not None else None
        self._before = (spec.digests or {}).get(partition)

    def cancel(self) -> None:
        self._stream.cancel()

    def feed(self, batches: Iterator[pa.RecordBatch]) -> FedPartition:
        """Send all rows; returns when each is stored, or none is wanted any more.

        Raises:
            ConfigError: if they are other rows than those that were fed before.
        """
        if self._partition in self._spec.skipped:
            _drain(batches)
            return FedPartition(self._partition)
        num_rows = -1
        joined = join_small(batches, self._spec.min_piece_nbytes, MAX_JOINED_S)
        halved = (half for batch in joined for half in halve(batch, MAX_PIECE_NBYTES))
        try:
            for batch in halved:
                if (piece := self._piece(batch)) is not None:
                    self._stream.put(piece)
                if self._stream.is_closed:
                    break
            if self._spec.in_order:
                self._stream.put(Piece(self._none, (), end=self._row))
            self._stream.flush()
            if not self._stream.is_closed:
                num_rows = self._row
                self._check_rows(is_end=True)
        except FeederError:
            # An agent that is gone because all have returned is no failure: no row is wanted.
            if not (self._stream.is_unreachable and self._has_cluster_finished()):
                raise
        finally:
            self._stream.close()
        _drain(halved)  # goes on where the loop above left it
        return FedPartition(self._partition, num_rows)

    @property
    def unreachable(self) -> Target | None:
        return self._stream.target if self._stream.is_unreachable else None

    def _piece(self, batch: pa.RecordBatch) -> Piece | None:
        """Return the rows of the next batch that no checkpoint covers, if there are any."""
        first, self._row = self._row, self._row + batch.num_rows
        self._none = batch.slice(0, 0)
        digest = self._digested(batch, first)
        left = tuple(uncovered(first, self._row, self._done))
        if not left:
            return None
        rows = join([batch.slice(start - first, stop - start) for start, stop in left])
        return Piece(rows, left, digest)

    def _digested(self, batch: pa.RecordBatch, first: int) -> Digest | None:
        if self._digest is None:
            return None
        # Rows that were fed before may end within this batch.
        middle = self._before[0] - first if self._before else 0
        if 0 < middle < batch.num_rows:
            self._digest.add(batch.slice(0, middle))
            self._check_rows()
            batch = batch.slice(middle)
        self._digest.add(batch)
        self._check_rows()
        return self._digest.rows, self._digest.value

    def _check_rows(self, is_end: bool = False) -> None:
        if self._digest is None or self._before is None:
            return
        rows, value = self._before
        has_fewer = is_end and self._digest.rows < rows
        if has_fewer or (self._digest.rows == rows and self._digest.value != value):
            raise other_rows(self._spec.feed, self._partition, rows)

    def _has_cluster_finished(self) -> bool:
        """Whether the agent is gone because every `map_fun` has returned: none reads."""
        spec = self._spec
        with suppress(OSError):  # the connection's own error says more
            if spec.coordinator:
                return fetch_cause(spec.coordinator, spec.token, spec.trust) is None
        return False


def _drain(batches: Iterator[pa.RecordBatch]) -> None:
    deadline = Deadline.after(_DRAIN_S)
    for _ in batches:
        if deadline.has_passed:
            return


def near_target(
    targets: Sequence[Target], partition: int, is_here: Callable[[str], bool] | None = None
) -> Target:
    """Return a node of this host; if there is none, one of any."""
    hosts = {target.host for target in targets}
    here = set(filter(is_here or _is_here, hosts))
    near = [target for target in targets if target.host in here]
    if not near:
        return targets[partition % len(targets)]
    # Spark often places neighbouring partitions on different hosts, one each. Dividing by the
    # number of hosts makes consecutive partitions of this host take turns on its nodes.
    return near[partition // len(hosts) % len(near)]


def _is_here(host: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound."""
    with suppress(OSError):
        # No packet is sent and no port is taken: a bind alone shows whose address it is.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
            return True
    return False


@dataclass(frozen=True)
class FeedDataFrame:
    """For `DataFrame.mapInArrow`: feeds each partition, by these names; returns one row on it."""

    spec: FeedSpec
    names: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fed = asdict(_feed(self.spec, (batch.rename_columns(self.names) for batch in batches)))
        # `pa.array` would import pandas, which takes a worker of Spark half a second.
        columns = [
            pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(np.array([value]))])
            for value in fed.values()
        ]
        yield pa.RecordBatch.from_arrays(columns, names=[*fed])


@dataclass(frozen=True)
class FeedRdd:
    """For `RDD.mapPartitions`: feeds each partition and returns one `FedPartition`."""

    spec: FeedSpec

    def __call__(self, values: Iterable[Any]) -> Iterator[FedPartition]:
        yield _feed(self.spec, encode_rows(values))


def _feed(spec: FeedSpec, batches: Iterator[pa.RecordBatch]) -> FedPartition:
    from pyspark import TaskContext

    context = TaskContext.get()
    feeder = Feeder(spec, context.partitionId() if context is not None else 0)
    try:
        return feeder.feed(batches)
    except ConfigError as error:
        raise SparkdlError(Code.RAISED.mark("ConfigError", str(error))) from None
    except FeederError as error:
        # If the cluster has failed, the driver knows the cause: it replaces this error.
        if feeder.unreachable and (cause := await_decision(spec, feeder.unreachable, error)):
            raise FeederError(cause) from None
        raise


def await_decision(spec: FeedSpec, target: Target, error: Exception) -> str:
    """Wait until a node can be reached again, or the driver has decided what follows.

    If the driver gives the node's host up, Spark cancels this task's job meanwhile. A task that
    failed at once would use up its four attempts before that.

    Returns:
        Why the cluster has failed, as far as the driver knows; empty otherwise.
    """
    never, is_logged = threading.Event(), False
    silence, deadline = Deadline.after(_SILENT_S), Deadline.after(2 * spec.host_timeout_s)
    while not deadline.has_passed and not is_there(target):
        with suppress(OSError):  # this host itself is cut off, perhaps
            if (cause := fetch_cause(spec.coordinator, spec.token, spec.trust)) != "":
                return cause or ""
        if silence.has_passed and not is_logged:
            is_logged = True
            _log.warning("%s; waiting for the driver's decision", error)
        never.wait(min(_LOOK_S, deadline.remaining_s))
    return ""
