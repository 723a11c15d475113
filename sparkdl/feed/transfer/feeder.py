"""The Spark tasks that feed: each sends its partition to the nodes, whose totals it keeps level.

Runs in: feeder

    partition ── batch ──▶ shares ──▶ stream to node 0 ── DoPut ──▶ agent 0
                             ▲   └──▶ stream to node 1 ── DoPut ──▶ agent 1
                             └─────── acknowledgements: room, closed

The first node says how a batch is shared out: it knows what all feeders have sent to each node.
Where there are many nodes, all this is true of the group that the feeder is at, see `groups.py`.

A stream holds few unacknowledged pieces. A node that is full gives a piece back after a moment, and
so does one that has closed; the piece then goes to a node that has room. So no row waits at a full
node while another node waits for rows.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sparkdl.control.cause import fetch_cause
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedTimeoutError
from sparkdl.core.row_ranges import Range, count_rows, merge_ranges, uncovered
from sparkdl.feed.store.segment import halve, join_small
from sparkdl.feed.transfer.groups import Groups
from sparkdl.feed.transfer.link_watch import LATE_S, LinkWatch, await_decision
from sparkdl.feed.transfer.messages import (
    FedPartition,
    FeederError,
    FeedSpec,
    PlanRequest,
    PutHeader,
    Target,
)
from sparkdl.feed.transfer.put_stream import Piece, PutStream
from sparkdl.feed.values.row_codec import RowEncoder

MAX_PIECE_NBYTES = 8 * 1024 * 1024
"""What one node gets at once, where the batches allow."""
MAX_COUNT_S = 30.0
"""How long rows that no node wants are counted, for the result of `cluster.feed`."""
MAX_JOINED_NBYTES = 32 * 1024 * 1024
MAX_JOINED_S = 0.1
"""What small batches are joined to at most, and for how long, however many nodes there are."""
FED_SCHEMA = "partition long, rows string, refused long, num_rows long"
"""Spark schema of what `FeedDataFrame` returns: one row a partition, `rows` as JSON."""


class Feeder:
    """Feeds one partition. Use once.

    Args:
        attempt: grows from one attempt at the partition to the next.
    """

    def __init__(self, spec: FeedSpec, partition: int, attempt: int = 0) -> None:
        self._spec = spec
        self._partition = partition
        self._header = PutHeader(
            spec.feed,
            spec.epoch,
            spec.run,
            partition,
            attempt,
            spec.generation,
            spec.last_epoch,
            spec.keep,
        )
        self._changed = threading.Condition()
        self._groups = Groups(spec, self._header)
        self._group = -1
        self._streams: list[PutStream] = []
        """To the nodes of the group."""
        self._had: dict[int, int] = {}
        """Rows of the partition by node id, but for what these streams have brought."""
        self._done = merge_ranges(spec.done.get(partition, ()))
        self._waiting: deque[Piece] = deque()
        self._back: Counter[int] = Counter()
        self._stored = self._stored_before = 0
        self._deadline = Deadline.after(spec.timeout_s)
        self._is_cancelled = False
        self._is_over = False

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
        refused, num_rows = 0, -1
        if self._partition in self._spec.skipped:
            return FedPartition(self._partition, {}, 0)
        num_nodes = max(len(group) for group in self._groups.groups)
        min_nbytes = min(self._spec.min_piece_nbytes * num_nodes, MAX_JOINED_NBYTES)
        max_nbytes = MAX_PIECE_NBYTES * num_nodes
        try:
            row = 0
            joined = join_small(batches, min_nbytes, MAX_JOINED_S)
            pieces = (piece for batch in joined for piece in halve(batch, max_nbytes))
            for batch in pieces:
                if not self._streams:
                    self._enter(self._groups.first(), batch.schema)
                self._deadline = Deadline.after(self._spec.timeout_s)  # however slow the source is
                for start, stop in uncovered(row, row + batch.num_rows, self._done):
                    self._waiting.append(Piece(batch.slice(start - row, stop - start), start))
                row += batch.num_rows
                self._send_waiting()
                if self._all_closed():
                    refused = self._count(pieces, row)
                    break
            else:
                num_rows = row
            refused += self._settle()
        except BaseException:
            for stream in self._streams:
                stream.abort()
            raise
        for stream in self._streams:
            stream.close()
        self._raise_errors()
        return FedPartition(self._partition, self._rows(), refused, num_rows)

    @property
    def awaited(self) -> list[Target]:
        """The nodes that owe an answer, or have failed to give it."""
        late = [stream.target for stream in self._streams if stream.silence_s() >= LATE_S]
        return [*late, *self._groups.asked, *self.unreachable]

    @property
    def unreachable(self) -> list[Target]:
        """The nodes that could not be reached, or not any more."""
        gone = [stream.target for stream in self._streams if stream.is_unreachable]
        return gone + self._groups.unreachable

    def _count(self, batches: Iterator[pa.RecordBatch], row: int) -> int:
        """Return how many rows from `row` on no node wants; stop counting after `MAX_COUNT_S`."""
        rows, deadline = 0, Deadline.after(MAX_COUNT_S)
        for batch in batches:
            rows += count_rows(uncovered(row, row + batch.num_rows, self._done))
            row += batch.num_rows
            if deadline.has_passed or self._is_cancelled:
                break
        return rows

    def _rows(self) -> dict[int, int]:
        brought = {stream.target.node_id: stream.rows_accepted for stream in self._streams}
        return {n: self._had.get(n, 0) + brought.get(n, 0) for n in {**self._had, **brought}}

    def _enter(self, group: int, schema: pa.Schema) -> None:
        """Open streams to a group; learn which rows its nodes have, and those of earlier ones."""
        if self._is_over:
            return
        is_first, self._group = self._group < 0, group
        try:
            if len(self._groups.groups) > 1:
                before = self._groups.visit(group)
                for target in before if is_first else ():
                    self._note_rows(target, self._groups.begin(target))
            self._open(group, schema)
        except FeederError:
            if not self._has_cluster_finished():
                raise
            for stream in self._streams:
                stream.abort()
            self._streams, self._is_over = [], True

    def _open(self, group: int, schema: pa.Schema) -> None:
        self._streams = [
            PutStream(target, self._header, self._spec, self._changed)
            for target in self._groups.groups[group]
        ]
        for stream in self._streams:
            stream.open(schema)
        for stream in self._streams:
            stream.wait_open()
        self._raise_errors()
        for stream in self._streams:
            self._note_rows(stream.target, stream.covered)

    def _note_rows(self, target: Target, rows: Sequence[Range]) -> None:
        """Note which rows of the partition a node has."""
        self._had[target.node_id] = count_rows(rows)
        self._done = merge_ranges([*self._done, *rows])

    def _leave(self) -> None:
        """Close the streams to a group; what it gave back waits for another one."""
        with self._changed:
            self._wait(lambda: not any(stream.unacknowledged for stream in self._streams))
            self._collect_refused()
        if +self._back:
            self._shares(0, [])
        for stream in self._streams:
            stream.close()
        self._raise_errors()
        self._had = self._rows()
        self._stored_before += sum(stream.rows_accepted for stream in self._streams)
        self._streams = []

    def _has_cluster_finished(self) -> bool:
        """Whether a node cannot be reached because every `map_fun` has returned: none reads."""
        if not self._spec.coordinator:
            return False
        try:
            spec = self._spec
            return fetch_cause(spec.coordinator, spec.token, spec.trust) is None
        except OSError:
            return False  # the connections' own errors say more

    def _move_on(self) -> None:
        """Go to another group if its nodes lack rows more than those of this one.

        By more than what is to be sent, unless nodes here have no room: then rows must not wait
        while nodes elsewhere, which may be in step with these, wait for some.
        """
        if len(self._groups.groups) == 1 or self._is_over:
            return
        with self._changed:
            self._collect_refused()
            if not self._waiting:
                return
            batch = self._waiting[0].batch
            self._is_group_closed()
            is_full = all(stream.is_closed or stream.was_full for stream in self._streams)
        slack = 0.0 if is_full else batch.num_rows / len(self._streams)
        group = self._groups.lower(self._group, slack)
        if group != self._group:
            self._leave()
            self._enter(group, batch.schema)

    def _send_waiting(self) -> None:
        """Send every piece that waits, and those that came back, unless all nodes have closed."""
        while True:
            self._move_on()
            with self._changed:
                self._collect_refused()
                if not self._waiting or self._all_closed():
                    return
                self._wait_for_room()
                if self._is_group_closed():
                    continue
                piece = self._waiting.popleft()
                streams = [stream for stream in self._streams if stream.has_room()]
            start = 0
            shares = self._shares(piece.batch.num_rows, streams)
            for stream, share in zip(streams, shares, strict=True):
                if share:
                    stream.send(Piece(piece.batch.slice(start, share), piece.start_row + start))
                    start += share

    def _collect_refused(self) -> None:
        for stream in self._streams:
            self._waiting.extendleft(reversed(stream.refused))
            self._back[stream.target.node_id] += sum(p.batch.num_rows for p in stream.refused)
            stream.refused.clear()

    def _shares(self, rows: int, streams: list[PutStream]) -> list[int]:
        """Ask the first node, which knows what all nodes get, how many rows each stream gets."""
        spec = self._spec
        back, self._back = self._back, Counter()
        here = {stream.target.node_id for stream in self._streams}
        request = PlanRequest(
            spec.feed,
            spec.generation,
            spec.epoch,
            rows,
            tuple(stream.target.node_id for stream in streams),
            dict(back),
            {node_id: rows for node_id, rows in spec.ahead.items() if node_id in here},
        )
        return self._streams[0].plan(request)

    def _wait_for_room(self) -> None:
        """Wait for every node that answers in time, then for any, or until all have closed.

        Why not simply send to the first node with room: rows stay level only if no node is left out
        for being a little slower than others. A node that was full last time is not waited for.
        """
        busy = [stream for stream in self._streams if not (stream.is_late or stream.was_full)]
        self._changed.wait_for(
            lambda: (
                all(not stream.unacknowledged or stream.has_room() for stream in busy)
                or any(stream.problem() for stream in busy)
            ),
            self._spec.ack_wait_s,
        )
        for stream in busy:
            stream.is_late = not stream.may_send()
        self._wait(
            lambda: any(stream.has_room() for stream in self._streams) or self._is_group_closed()
        )

    def _settle(self) -> int:
        """Wait until everything sent is acknowledged; return the rows that no node wants."""
        while True:
            self._send_waiting()
            with self._changed:
                self._wait(lambda: not any(stream.unacknowledged for stream in self._streams))
                self._collect_refused()
                if not self._waiting or self._all_closed():
                    return sum(int(piece.batch.num_rows) for piece in self._waiting)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for `is_done` as long as some node stores rows within the feed timeout."""
        while not is_done():
            self._raise_errors()
            accepted = sum(stream.rows_accepted for stream in self._streams)
            stored = self._stored_before + accepted
            if stored != self._stored:
                self._stored, self._deadline = stored, Deadline.after(self._spec.timeout_s)
            if self._deadline.has_passed:
                names = ", ".join(
                    stream.target.name for stream in self._streams if not stream.is_closed
                )
                why = "; ".join(stream.shortage for stream in self._streams if stream.shortage) or (
                    "its feed memory is full, and user code reads no rows. Raise the timeout of "
                    "the feed if a step may take that long"
                )
                raise FeedTimeoutError(
                    f"{names} stored no row of feed {self._spec.feed!r} for "
                    f"{self._spec.timeout_s:g} s: {why}"
                )
            now_s = time.monotonic()
            pauses = [
                stream.full_until_s - now_s
                for stream in self._streams
                if stream.full_until_s > now_s
            ]
            self._changed.wait(min([self._deadline.remaining_s, *pauses]))
        self._raise_errors()

    def _all_closed(self) -> bool:
        """Whether no node takes rows: none of this group, and none of the others before."""
        if self._is_over or not self._streams:
            return self._is_over
        return self._is_group_closed() and self._groups.are_closed

    def _is_group_closed(self) -> bool:
        """Whether no node of this group takes rows; then it is not gone to again."""
        is_closed = all(stream.is_closed for stream in self._streams)
        if is_closed:
            self._groups.closed.add(self._group)
        return is_closed

    def _raise_errors(self) -> None:
        with self._changed:
            errors = [problem for stream in self._streams if (problem := stream.problem())]
            errors += ["it was cancelled"] * self._is_cancelled
        if errors:
            raise FeederError("; ".join(errors))


@dataclass(frozen=True)
class FeedDataFrame:
    """For `DataFrame.mapInArrow`: feeds each partition and returns one row on it."""

    spec: FeedSpec

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Feed one partition."""
        fed = _feed(self.spec, batches)
        yield pa.RecordBatch.from_pydict(
            {
                "partition": [fed.partition],
                "rows": [json.dumps(fed.rows)],
                "refused": [fed.rows_refused],
                "num_rows": [fed.num_rows],
            }
        )


@dataclass(frozen=True)
class FeedRdd:
    """For `RDD.mapPartitions`: feeds each partition and returns one `FedPartition`."""

    spec: FeedSpec

    def __call__(self, values: Iterable[Any]) -> Iterator[FedPartition]:
        """Feed one partition."""
        yield _feed(self.spec, RowEncoder().batches(values))


def fed_partition(partition: int, rows_json: str, refused: int, num_rows: int) -> FedPartition:
    """Return the `FedPartition` that a row of `FeedDataFrame` stands for."""
    rows = {int(node_id): count for node_id, count in json.loads(rows_json).items()}
    return FedPartition(partition, rows, refused, num_rows)


def _feed(spec: FeedSpec, batches: Iterator[pa.RecordBatch]) -> FedPartition:
    feeder = Feeder(spec, _partition(), _attempt())
    with LinkWatch(spec, lambda: feeder.awaited):
        try:
            return feeder.feed(batches)
        except FeederError as error:
            if feeder.unreachable and (cause := await_decision(spec, feeder.unreachable, error)):
                raise FeederError(cause) from None
            raise


def _partition() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def _attempt() -> int:
    """Return a number that grows with every task that Spark starts."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.taskAttemptId() if context is not None else 0
