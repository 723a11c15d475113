"""The parameters and results of feeders, and the messages between them and agents.

Runs in: driver, feeder, agent

They are not in the server's module: feeders in Spark workers must not import the server.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from threading import TIMEOUT_MAX
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.auth import bearer
from sparkdl.control.rows import Digest
from sparkdl.control.tls import Trust
from sparkdl.core.errors import ConfigError, SparkdlError
from sparkdl.core.failure import Code
from sparkdl.core.row_ranges import Range

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=TIMEOUT_MAX)]
SHUT_DOWN = (
    "the cluster has been shut down, and no node answers any more: results of inference are lazy, "
    "so run the action on them before the shutdown"
)
WHAT_TO_DO = (
    "The remaining rows cannot be determined: feed the same data, in the same partitions (cache a "
    "DataFrame whose partitions vary, or write it to Parquet), or take another checkpoint_dir"
)

CONFIRM_RECEIVED, LEND = "received", "lend"
BROKEN = (
    flight.FlightUnavailableError,
    flight.FlightTimedOutError,
    flight.FlightCancelledError,
    OSError,
)
"""Errors of the connection: the rows, or the file, are still at the agent."""
RESULT_SCHEMA = pa.schema([("ipc", pa.binary())])
_LISTENING_S = 1.0
"""How long a host may take to accept or refuse a connection; its kernel does so."""


class FeederError(SparkdlError):
    """A feeder lost its connection to a node; Spark tries the partition again."""

    def __str__(self) -> str:
        return f"{Code.FEED_LOST} {super().__str__()}"


@dataclass(frozen=True)
class Target:
    node_id: int
    name: str
    uri: str

    @cached_property
    def host(self) -> str:
        return urlsplit(self.uri).hostname or ""


@dataclass(frozen=True)
class FeedSpec:
    """The feed, the epoch and the nodes to feed. It travels inside Spark's task.

    Attributes:
        run: unique to one Spark job: identifies its rows after a restart.
        generation: the world's that is to be fed; nodes of a later one refuse the rows.
        last_epoch: the last one of the same `feed` call.
        done: rows by partition that a checkpoint covers; they are not fed.
        skipped: partitions without rows beyond `done`; they are read for a moment at most.
        partitions: how many there were when rows were fed before; 0 where that is not known.
        digests: of rows that were fed before, by partition; `None` where none will be fed again.
        patience_s: how long inference waits for nodes that are between two generations.
        host_timeout_s: after so much silence the driver gives a node's host up.
        coordinator: its URL, to ask why no node answers.
        trust: what nodes and coordinator have to show; `None` where they are not encrypted.
        global_batch_size: of rows in a fixed order; then agents are told where partitions end.
    """

    feed: str
    epoch: int
    run: str
    targets: tuple[Target, ...]
    token: str = field(repr=False)
    timeout_s: float = 600.0
    generation: int = 0
    last_epoch: int = 0
    keep: bool = False
    done: Mapping[int, tuple[Range, ...]] = field(default_factory=dict)
    skipped: frozenset[int] = frozenset()
    partitions: int = 0
    digests: Mapping[int, Digest] | None = None
    patience_s: float = 10.0
    min_piece_nbytes: int = 4 * 1024 * 1024
    host_timeout_s: float = 0.0
    coordinator: str = ""
    trust: Trust | None = None
    global_batch_size: int | None = None

    @property
    def in_order(self) -> bool:
        return self.global_batch_size is not None

    def check_partitions(self, partitions: int) -> None:
        named = max(self.done, default=-1) + 1
        # Rows are known by partition and number, so other partitions would mean other rows.
        if self.partitions not in (0, partitions) or named > partitions:
            raise other_data(self.feed, self.partitions or named, partitions)

    def connect(self, uri: str) -> flight.FlightClient:
        return flight.connect(uri, **(self.trust.flight_options() if self.trust else {}))

    def options(self, timeout_s: float | None = None) -> flight.FlightCallOptions:
        headers = [(b"authorization", bearer(self.token).encode())]
        return flight.FlightCallOptions(timeout=timeout_s, headers=headers)


def is_there(target: Target) -> bool:
    """Whether a node's host takes a connection for it: for a process that stands still as well."""
    url = urlsplit(target.uri)
    with suppress(OSError), socket.create_connection((url.hostname, url.port or 0), _LISTENING_S):
        return True
    return False


def other_data(feed: str, before: int, now: int) -> ConfigError:
    return ConfigError(
        f"feed {feed!r}: the data have {now} partitions, and {before} when rows of them were fed "
        f"before. {WHAT_TO_DO}"
    )


def other_rows(feed: str, partition: int, rows: int) -> ConfigError:
    return ConfigError(
        f"feed {feed!r}: Spark has computed partition {partition} again, and its first {rows} rows "
        f"are not those that were fed before. {WHAT_TO_DO}"
    )


@dataclass(frozen=True)
class FedPartition:
    """The outcome of feeding one partition.

    Attributes:
        num_rows: of the partition, those `done` as well; -1 if some were not wanted any more.
    """

    partition: int
    num_rows: int = -1


def flight_reason(error: BaseException) -> str:
    """Return Flight's message, without the details for its own developers."""
    # Flight appends gRPC's own report of the call to the server's message.
    text = str(error).partition(". gRPC client debug context:")[0]
    return text.rpartition(". Detail:")[0] or text


class PutHeader(msgspec.Struct, frozen=True):
    """The feed, epoch and partition of a stream of batches.

    Attributes:
        in_order: the rows may wait for those of other partitions, so all that come are taken.
    """

    feed: str
    epoch: Count
    run: str
    partition: Count
    generation: Count = 0
    keep: bool = False
    in_order: bool = False


class PutAck(msgspec.Struct, frozen=True):
    """The answer to a batch.

    Attributes:
        closed: whether no more rows of this epoch are wanted, perhaps not even these.
        fd_socket: in the first answer, where feeders on the same machine send descriptors to.
    """

    closed: bool
    fd_socket: str = ""


class PutPiece(msgspec.Struct, frozen=True):
    """The metadata of a batch.

    Attributes:
        ranges: the numbers of its rows in the partition.
        rows, key: of a segment that was sent as a descriptor; the batch itself is empty then.
        digest: of the partition's rows so far, if rows may be fed again.
        end: how many rows the partition has: this piece has none, and none follows.
    """

    ranges: tuple[tuple[Count, Count], ...]
    rows: Count = 0
    key: str = ""
    digest: Digest | None = None
    end: Count | None = None


class FetchTicket(msgspec.Struct, frozen=True, tag="rows"):
    """Rows of the spool to be fetched by another agent.

    It is the ticket of `DoGet`. The holder answers with one batch: rows of the first windows, as
    many as it likes. It is also the body of `CONFIRM_RECEIVED`: the holder then frees them; and of
    `LEND`, answered with a `Lent` for each window if both agents are on one machine.

    Attributes:
        fd_socket: where this machine's agents send descriptors to.
        nbytes: how much to send at most; one window may be larger.
        windows: rows [`skip`, `skip` + `rows`) of segments: number, `skip`, `rows`.
    """

    feed: str
    generation: Count
    nbytes: Count
    windows: tuple[tuple[Count, Count, Count], ...]
    fd_socket: str = ""


class Lent(msgspec.Struct, frozen=True):
    """A segment whose descriptor was sent under `key`; its rows begin at `start` of the file."""

    key: str
    start: Count


class ExchangeHeader(msgspec.Struct, frozen=True):
    """One attempt at one inference partition; `exchange` is unique to the attempt."""

    feed: str
    exchange: Annotated[str, msgspec.Meta(min_length=1)]
    timeout_s: Seconds | None = None


def result_batch(data: bytes) -> pa.RecordBatch:
    """Return a batch of `RESULT_SCHEMA` with one Arrow IPC stream of encoded result rows."""
    # `pa.array` imports pandas first: a second in a new Spark worker, and 50 MB in an agent.
    ends = pa.py_buffer(struct.pack("=ii", 0, len(data)))
    column = pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([column], schema=RESULT_SCHEMA)
