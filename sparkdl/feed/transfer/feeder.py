"""One partition on its way to the nodes: every batch is split so that the nodes' totals stay level.

Runs in: feeder

    partition ── batch ──▶ shares ──▶ lane to node 0 ── DoPut ──▶ agent 0
                             ▲   └──▶ lane to node 1 ── DoPut ──▶ agent 1
                             └─────── acknowledgements: room, closed

How a batch is shared out is asked of the first node: it knows what all feeders have sent to whom.

A lane holds few unacknowledged pieces. A node that is full gives a piece back after a moment, and
so does one that has closed: what comes back goes to whoever has room. So no row waits at a node
that is full while another node waits for rows.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

import pyarrow as pa

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedTimeoutError
from sparkdl.core.row_ranges import merge_ranges, uncovered
from sparkdl.feed.transfer.put_stream import Piece, PutStream
from sparkdl.feed.transfer.request import FedPartition, FeederError, FeedSpec
from sparkdl.feed.transfer.server import PlanRequest, PutHeader

PATIENCE_S = 1.5
"""How long the next batch waits for a node that has not acknowledged, before it goes to others."""
MIN_PIECE_NBYTES = 4 * 1024 * 1024
MAX_PIECE_NBYTES = 8 * 1024 * 1024
"""What one node gets at once, where the batches allow."""
MAX_COUNT_S = 30.0
"""How long rows are counted that no node wants, for whoever fed them to know."""
MAX_JOINED_NBYTES = 32 * 1024 * 1024
MAX_JOINED_S = 0.1
"""What small batches are joined to at most, and for how long, however many nodes there are."""


class Feeder:
    """Feeds one partition. Use once.

    Args:
        attempt: grows from one attempt at the partition to the next.
    """

    def __init__(self, order: FeedSpec, partition: int, attempt: int = 0) -> None:
        self._order = order
        self._partition = partition
        self._header = PutHeader(
            order.feed,
            order.epoch,
            order.run,
            partition,
            attempt,
            order.generation,
            order.last_epoch,
            order.keep,
        )
        self._changed = threading.Condition()
        self._lanes: list[PutStream] = []
        self._done: list[tuple[int, int]] = []
        self._waiting: deque[Piece] = deque()
        self._back: Counter[int] = Counter()
        self._stored = 0
        self._deadline = Deadline.after(order.timeout_s)
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
        refused, num_rows = 0, -1
        if self._partition in self._order.skipped:
            return FedPartition(self._partition, {}, 0)
        num_nodes = len(self._order.targets)
        least = min(MIN_PIECE_NBYTES * num_nodes, MAX_JOINED_NBYTES)
        try:
            row = 0
            pieces = sized(batches, least, MAX_PIECE_NBYTES * num_nodes)
            for batch in pieces:
                self._connect(batch.schema)
                self._deadline = Deadline.after(self._order.timeout_s)  # however slow the source is
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
            for lane in self._lanes:
                lane.abort()
            raise
        for lane in self._lanes:
            lane.close()
        self._raise_errors()
        return FedPartition(self._partition, self._rows(), refused, num_rows)

    def _count(self, batches: Iterator[pa.RecordBatch], row: int) -> int:
        """Return how many rows are behind `row`, which no node wants: not for ever."""
        rows, deadline = 0, Deadline.after(MAX_COUNT_S)
        for batch in batches:
            rows += sum(b - a for a, b in uncovered(row, row + batch.num_rows, self._done))
            row += batch.num_rows
            if deadline.has_passed or self._is_cancelled:
                break
        return rows

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
            self._lanes.append(PutStream(target, self._header, self._order, self._changed))
        for lane in self._lanes:
            lane.open(schema)
        for lane in self._lanes:
            lane.wait_open()
        self._raise_errors()
        here = [part for lane in self._lanes for part in lane.covered]
        self._done = merge_ranges([*self._order.done.get(self._partition, ()), *here])

    def _send_waiting(self) -> None:
        """Send every piece that waits, and those that came back, unless all nodes have closed."""
        while True:
            with self._changed:
                self._take_back()
                if not self._waiting or self._all_closed():
                    return
                self._wait_for_room()
                if self._all_closed():
                    return
                piece = self._waiting.popleft()
                lanes = [lane for lane in self._lanes if lane.has_room()]
            start = 0
            for lane, share in zip(lanes, self._shares(piece, lanes), strict=True):
                if share:
                    lane.send(Piece(piece.batch.slice(start, share), piece.start_row + start))
                    start += share

    def _take_back(self) -> None:
        for lane in self._lanes:
            self._waiting.extendleft(reversed(lane.refused))
            self._back[lane.target.node_id] += sum(p.batch.num_rows for p in lane.refused)
            lane.refused.clear()

    def _shares(self, piece: Piece, lanes: list[PutStream]) -> list[int]:
        """Return how many of the rows go to each lane. The first node knows what all nodes get."""
        order = self._order
        back, self._back = self._back, Counter()
        request = PlanRequest(
            order.feed,
            order.generation,
            order.epoch,
            piece.batch.num_rows,
            tuple(lane.target.node_id for lane in lanes),
            dict(back),
            dict(order.ahead),
        )
        return self._lanes[0].plan(request)

    def _wait_for_room(self) -> None:
        """Wait for every node that answers in time, then for any, or until all have closed.

        The rows stay level if no node is left out because it was a little slower than others. A
        node that was full when it was asked last is not waited for.
        """
        busy = [lane for lane in self._lanes if not (lane.is_late or lane.was_full)]
        self._changed.wait_for(
            lambda: (
                all(not lane.unacknowledged or lane.has_room() for lane in busy)
                or any(lane.problem() for lane in busy)
            ),
            PATIENCE_S,
        )
        for lane in busy:
            lane.is_late = not lane.may_send()
        self._wait(lambda: any(lane.has_room() for lane in self._lanes) or self._all_closed())

    def _settle(self) -> int:
        """Wait until everything sent is acknowledged; return the rows that no node wants."""
        while True:
            self._send_waiting()
            with self._changed:
                self._wait(lambda: not any(lane.unacknowledged for lane in self._lanes))
                self._take_back()
                if not self._waiting or self._all_closed():
                    return sum(int(piece.batch.num_rows) for piece in self._waiting)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for `is_done` as long as some node stores rows within the feed timeout."""
        while not is_done():
            self._raise_errors()
            stored = sum(lane.rows_accepted for lane in self._lanes)
            if stored != self._stored:
                self._stored, self._deadline = stored, Deadline.after(self._order.timeout_s)
            if self._deadline.has_passed:
                names = ", ".join(lane.target.name for lane in self._lanes if not lane.is_closed)
                raise FeedTimeoutError(
                    f"{names} stored no row of feed {self._order.feed!r} for "
                    f"{self._order.timeout_s:g} s: its feed memory is full, and user code reads no "
                    "rows. Raise feed_timeout if a step may take that long"
                )
            now_s = time.monotonic()
            pauses = [
                lane.full_until_s - now_s for lane in self._lanes if lane.full_until_s > now_s
            ]
            self._changed.wait(min([self._deadline.remaining_s, *pauses]))
        self._raise_errors()

    def _all_closed(self) -> bool:
        return bool(self._lanes) and all(lane.is_closed for lane in self._lanes)

    def _raise_errors(self) -> None:
        with self._changed:
            errors = [problem for lane in self._lanes if (problem := lane.problem())]
            errors += ["it was cancelled"] * self._is_cancelled
        if errors:
            raise FeederError("; ".join(errors))


def sized(
    batches: Iterator[pa.RecordBatch], min_nbytes: int, max_nbytes: int
) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of about `min_nbytes` to `max_nbytes`, where schemas allow.

    Rows that come slowly are not held back for others.
    """
    small: list[pa.RecordBatch] = []
    small_nbytes, is_late = 0, Deadline.after(None)
    for batch in batches:
        if not batch.num_rows:
            continue
        nbytes = batch.nbytes
        if small and (nbytes >= min_nbytes or not batch.schema.equals(small[0].schema, True)):
            yield _joined(small)
            small, small_nbytes = [], 0
        if nbytes >= min_nbytes:
            step = max(1, batch.num_rows * max_nbytes // max(1, nbytes))
            for start in range(0, batch.num_rows, step):
                yield batch.slice(start, step)
            continue
        if not small:
            is_late = Deadline.after(MAX_JOINED_S)
        small.append(batch)
        small_nbytes += nbytes
        if small_nbytes >= min_nbytes or is_late.has_passed:
            yield _joined(small)
            small, small_nbytes = [], 0
    if small:
        yield _joined(small)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
