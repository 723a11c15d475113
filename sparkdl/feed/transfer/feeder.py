"""The Spark tasks that feed: each sends its partition to the spool of one agent.

Runs in: feeder

    partition ── batch ──▶ pieces of 4 to 8 MB ──▶ PutStream ── DoPut ──▶ agent: spool

The driver, to which the agents report their rows, assigns them to nodes: a feeder need not know
where they are used. When Spark repeats a task, the new attempt resends all rows that no checkpoint
covers, perhaps to another agent; the driver drops the duplicates.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.control.cause import fetch_cause
from sparkdl.core.deadline import Deadline
from sparkdl.core.row_ranges import merge_ranges, uncovered
from sparkdl.feed.transfer.messages import (
    FedPartition,
    FeederError,
    FeedSpec,
    PutHeader,
    Target,
    knock,
)
from sparkdl.feed.transfer.put_stream import Piece, PutStream
from sparkdl.values.batches import halve, join, join_small
from sparkdl.values.rows import encode_rows

_log = logging.getLogger(__name__)

MAX_PIECE_NBYTES = 8 * 1024 * 1024
"""The most bytes sent to an agent at once, where the batches allow."""
BATCH_NBYTES = MAX_PIECE_NBYTES * 15 // 16
"""Where Spark shall end a batch: a piece as it is. The JVM makes the next one meanwhile."""
MAX_JOINED_S = 0.1
"""How long small batches wait for others to be joined to."""
_MOST_FEEDERS = 32
"""Of one node at once, of those that heed each other."""
_COUNT_S = 0.5
"""How long to read and count unwanted rows: Spark ends a Python worker that leaves input unread,
and the next one has to import as long."""
_LOOK_S = 1.0
_SILENT_S = 2.0
"""How long the driver may take to hear from a node why it cannot be reached: it may have failed."""
FED_SCHEMA = "partition long, rows long, rows_refused long, num_rows long"
"""Spark schema of what `FeedDataFrame` returns: one `FedPartition` a partition."""


class Feeder:
    """Feeds one partition. Use once."""

    def __init__(self, spec: FeedSpec, partition: int) -> None:
        self._spec = spec
        self._partition = partition
        header = PutHeader(
            *(spec.feed, spec.epoch, spec.run, partition),
            *(spec.generation, spec.last_epoch, spec.keep),
        )
        self._targets = near_targets(spec.targets, partition)
        self._stream = PutStream(self._targets[0], header, spec)
        self._done = merge_ranges(spec.done.get(partition, ()))
        self._row = 0

    def cancel(self) -> None:
        """Interrupt `feed`, in another thread, at its next wait for the agent."""
        self._stream.cancel()

    def feed(self, batches: Iterator[pa.RecordBatch]) -> FedPartition:
        """Send all rows; returns when each is stored, or none is wanted any more.

        Raises:
            FeederError: if the connection broke.
            FeedTimeoutError: if the agent stored nothing for the feed timeout.
        """
        if self._partition in self._spec.skipped:
            self._count(batches)
            return FedPartition(self._partition, 0, 0)
        with chosen_target(self._targets, self._spec.run) as self._stream.target:
            return self._feed(batches)

    def _feed(self, batches: Iterator[pa.RecordBatch]) -> FedPartition:
        joined = join_small(batches, self._spec.min_piece_nbytes, MAX_JOINED_S)
        halved = (half for batch in joined for half in halve(batch, MAX_PIECE_NBYTES))
        try:
            for batch in halved:
                self._stream.put(self._pieces(batch))
                if self._stream.is_closed:
                    break
            self._stream.flush()
        except FeederError:
            # An agent that is gone because every `map_fun` has returned is no failure: no row is
            # wanted.
            if not (self._stream.is_unreachable and self._has_cluster_finished()):
                raise
        finally:
            self._stream.close()
        # `halved` goes on where the loop above left it.
        counted, is_whole = self._count(halved)
        refused = self._stream.rows_left + counted
        num_rows = self._row if is_whole else -1
        return FedPartition(self._partition, self._stream.rows_stored, refused, num_rows)

    @property
    def unreachable(self) -> Target | None:
        """The node whose agent could not be reached, or not any more."""
        return self._stream.target if self._stream.is_unreachable else None

    def _count(self, batches: Iterator[pa.RecordBatch]) -> tuple[int, bool]:
        """Return how many rows are left, all of them unwanted, and whether that is all."""
        rows, deadline = 0, Deadline.after(_COUNT_S)
        for batch in batches:
            rows += sum(int(piece.batch.num_rows) for piece in self._pieces(batch))
            if deadline.has_passed:
                return rows, False
        return rows, True

    def _pieces(self, batch: pa.RecordBatch) -> list[Piece]:
        """Return the rows of the next batch that no checkpoint covers."""
        first, self._row = self._row, self._row + batch.num_rows
        left = tuple(uncovered(first, self._row, self._done))
        if not left:
            return []
        rows = join([batch.slice(start - first, stop - start) for start, stop in left])
        return [Piece(rows, left)]

    def _has_cluster_finished(self) -> bool:
        """Whether the agent is gone because every `map_fun` has returned: none reads."""
        spec = self._spec
        with suppress(OSError):  # the connection's own error says more
            if spec.coordinator:
                return fetch_cause(spec.coordinator, spec.token, spec.trust) is None
        return False


def near_targets(
    targets: Sequence[Target], partition: int, is_here: Callable[[str], bool] | None = None
) -> list[Target]:
    """Return the nodes of this host, in the order of preference; if there are none, one of any.

    Args:
        is_here: whether an address is one of this host's.
    """
    hosts = {target.host for target in targets}
    here = set(filter(is_here or _is_here, hosts))
    near = [target for target in targets if target.host in here]
    if not near:
        return [targets[partition % len(targets)]]
    # Spark often places neighbouring partitions on different hosts, one each. Dividing by the
    # number of hosts makes consecutive partitions of this host take turns on its nodes.
    turn = partition // len(hosts) % len(near)
    return [*near[turn:], *near[:turn]]


@contextmanager
def chosen_target(targets: Sequence[Target], run: str) -> Iterator[Target]:
    """Give the first node that the fewest feeders of this host bring rows to at the moment.

    Why not the first alone? Executors get ahead of each other. Two feeders would then serve one
    node while another one runs short, and half of the rows would move between agents.

    A feeder tells the others by a socket of an abstract name (unix(7)): the kernel gives it to one
    process alone, and takes it back when that ends.
    """
    if len(targets) > 1:
        for number in range(_MOST_FEEDERS):
            for target in targets:
                with socket.socket(socket.AF_UNIX) as claim:
                    if _binds(claim, f"\0sparkdl-feeds-{run}-{target.node_id}-{number}"):
                        yield target
                        return
    yield targets[0]


def _binds(one: socket.socket, address: Any) -> bool:
    with suppress(OSError):
        one.bind(address)
        return True
    return False


def _is_here(host: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound."""
    with suppress(OSError):
        # No packet is sent and no port is taken: a bind alone shows whose address it is.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            return _binds(probe, (host, 0))
    return False


@dataclass(frozen=True)
class FeedDataFrame:
    """For `DataFrame.mapInArrow`: feeds each partition and returns one row on it.

    `names` are the columns' names on the nodes.
    """

    spec: FeedSpec
    names: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Feed one partition."""
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
        """Feed one partition."""
        yield _feed(self.spec, encode_rows(values))


def _feed(spec: FeedSpec, batches: Iterator[pa.RecordBatch]) -> FedPartition:
    from pyspark import TaskContext

    context = TaskContext.get()
    feeder = Feeder(spec, context.partitionId() if context is not None else 0)
    try:
        return feeder.feed(batches)
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
        Why the cluster has failed, as far as the driver knows: a node that has raised cannot be
        reached either. Empty otherwise.
    """
    never, is_logged = threading.Event(), False
    silence, deadline = Deadline.after(_SILENT_S), Deadline.after(2 * spec.host_timeout_s)
    while not deadline.has_passed and knock(target) != "accepts":
        with suppress(OSError):  # this host itself is cut off, perhaps
            if (cause := fetch_cause(spec.coordinator, spec.token, spec.trust)) != "":
                return cause or ""
        if silence.has_passed and not is_logged:
            is_logged = True
            _log.warning("%s; waiting for the driver's decision", error)
        never.wait(min(_LOOK_S, deadline.remaining_s))
    return ""
