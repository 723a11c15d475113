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
from collections.abc import Callable, Iterator

import pyarrow as pa

from sparkdl.core.errors import FeedTimeoutError
from sparkdl.feed.lane import Lane, Piece
from sparkdl.feed.order import FedPartition, FeederError, FeedOrder
from sparkdl.feed.plan import level, merge_ranges, uncovered
from sparkdl.feed.receiver import PutHeader

PATIENCE_S = 0.5
"""How long the next batch waits for a node that has not acknowledged, before it goes to others."""


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
        self._lanes: list[Lane] = []
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
                    piece = Piece(batch.slice(start - row, stop - start), start)
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
            self._lanes.append(Lane(target, self._header, self._order, self._changed))
        for lane in self._lanes:
            lane.open(schema)
        for lane in self._lanes:
            lane.wait_open()
        self._raise_errors()
        self._done = merge_ranges(part for lane in self._lanes for part in lane.covered)

    def _place(self, piece: Piece) -> int:
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
                lane.send(Piece(piece.batch.slice(start, share), piece.start_row + start))
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
