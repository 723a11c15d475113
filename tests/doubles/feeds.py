"""The feeds of one node in this process: what its agent and its child do for them, nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.control import messages as msg
from sparkdl.control.channel import ChildPipe, Consumed, EndMark, Local, Release, Segment
from sparkdl.control.messages import Assign, EpochEnd, FeedProgress, Spooled
from sparkdl.control.tls import Tls
from sparkdl.core.errors import FeedClosedError
from sparkdl.feed.reader.batches import EpochBatches
from sparkdl.feed.reader.cursor import Item
from sparkdl.feed.reader.reader import FeedReader, FeedRegistry
from sparkdl.feed.store.buffer import Budget
from sparkdl.feed.store.segment import StoredSegment, write_segment
from sparkdl.feed.store.store import StoreLimits
from sparkdl.feed.transfer.endpoint import NodeFeeds
from sparkdl.feed.transfer.fetch import NodeDirectory
from sparkdl.feed.transfer.messages import FeedSpec, Target
from sparkdl.node.link import AgentLink
from tests.doubles.proxy import Proxy

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

TOKEN = "secret"
SPEC = FeedSpec("", 0, "", (), TOKEN)
FEED = "input"
FILE_ROWS = 2000
SOON_S = 20.0
"""Deadline of what takes a moment; a machine may be slow, so it is no measure of speed."""


def numbers(start: int, stop: int, width: int = 1) -> pa.RecordBatch:
    """Return a batch whose column "x" counts; `width` int64 to a row make it larger."""
    columns = {"x": np.arange(start, stop)}
    columns |= {f"filler{i}": np.zeros(stop - start, np.int64) for i in range(width - 1)}
    return pa.record_batch(columns)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of 0.5 MB each."""
    for file in range(2):
        start, stop = file * FILE_ROWS // 2, (file + 1) * FILE_ROWS // 2
        rows = pa.Table.from_batches([numbers(start, stop, width=64)])
        pq.write_table(rows, tmp_path / f"{file}.parquet", row_group_size=100)
    return tmp_path


def labelled(start: int, stop: int) -> pa.RecordBatch:
    """Return features "x" float32 [rows, 2], labels "y" int64 [rows], names "s"."""
    flat = np.repeat(np.arange(start, stop, dtype=np.float32), 2)
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(flat), 2)}
    names = [f"name {i}" for i in range(start, stop)]
    return pa.record_batch(columns | {"y": np.arange(start, stop), "s": names})


def vectors(start: int, stop: int, width: int, depth: int = 0) -> pa.RecordBatch:
    """Return vectors "x" of two values, the row's number among them; dense in every third row."""
    rows = range(start, stop)
    dense = [row % 3 == 2 and width < 10 for row in rows]
    values = [
        [row, *[0] * (width - 2), 1] if d else [row, 1] for row, d in zip(rows, dense, strict=True)
    ]
    parts = [
        pa.array([int(d) for d in dense], pa.int8()),
        pa.array([None if d else width for d in dense], pa.int32()),
        pa.array([[] if d else [0, width - 1] for d in dense], pa.list_(pa.int32())),
        pa.array(values, pa.list_(pa.float64())),
    ]
    names = ["type", "size", "indices", "values"]
    x = pa.StructArray.from_arrays(parts, names)
    if depth:
        x = pa.ListArray.from_arrays(pa.array(range(len(x) + 1), pa.int32()), x)
    return pa.record_batch({"x": x, "y": [*rows]})


def item(
    batch: pa.RecordBatch, number: int, epoch: int = 0, exchange: str = "", is_last: bool = False
) -> Item:
    fd, nbytes = write_segment(batch)
    return Item(Segment(FEED, number, epoch, batch.num_rows, nbytes, exchange, is_last), fd)


def noting(segments: list[StoredSegment]) -> Callable[[StoredSegment, int], None]:
    """Return what a store tells of its segments, which are noted; no child wants them."""

    def note(segment: StoredSegment, fd: int) -> None:
        os.close(fd)
        segments.append(segment)

    return note


class NoRoomError(Exception):
    """An append would have waited for room."""


def at_once(budget: Budget) -> AbstractContextManager[object]:
    """Have appends raise `NoRoomError` in place of waiting."""
    return patch.object(budget.lock, "wait", side_effect=NoRoomError)


class NoticingCondition(threading.Condition):
    """Lets a test wait until somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self._waits = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self._waits.release()
        return super().wait(timeout)

    def wait_for_waiter(self) -> None:
        """Wait until `wait` has been called once more."""
        assert self._waits.acquire(timeout=SOON_S), "nobody waits"
        with self:  # which is free once the waiter does wait
            pass


class Sent:
    """Messages of a child, which a test may wait for."""

    def __init__(self) -> None:
        self.sent: list[Local] = []
        self._changed = threading.Condition()

    def wait_sent(self, is_enough: Callable[[list[Local]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: is_enough(self.sent), SOON_S), self.sent

    def _note(self, message: Local) -> None:
        with self._changed:
            self.sent.append(message)
            self._changed.notify_all()


class Arrivals(Sent):
    """A reader without an agent: a test is the agent.

    Attributes:
        sent: what the child has told the agent.
        waits: where user code waits for the next item.
    """

    def __init__(self, timeout_s: float = SOON_S, tracks: bool = False) -> None:
        super().__init__()
        registry = FeedRegistry()
        registry._timeout_s, registry.tracks = timeout_s, tracks
        self.reader = FeedReader(FEED, self._note, registry)
        self.reader.report_period_s = 0
        self.waits = self.reader._changed = NoticingCondition()
        self._number = 0
        self._row = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.terminate()

    def rows(self, *counts: int, epoch: int = 0) -> None:
        """Let segments arrive whose column "x" goes on counting."""
        for count in counts:
            self.batch(numbers(self._row, self._row + count), epoch)
            self._row += count

    def batch(
        self, batch: pa.RecordBatch, epoch: int = 0, exchange: str = "", is_last: bool = False
    ) -> None:
        self.reader.add(item(batch, self._number, epoch, exchange, is_last))
        self._number += 1

    def end_epoch(
        self,
        epoch: int,
        rows: dict[int, int] | None = None,
        again: bool = False,
        goes_on: bool = False,
    ) -> None:
        self.reader.on_message(EpochEnd(FEED, epoch, rows or {}, again, goes_on))

    def end(self) -> None:
        self.reader.on_message(EndMark(FEED))

    @property
    def released(self) -> int:
        """How many segments the agent may free."""
        return sum(len(m.numbers) for m in self.sent if isinstance(m, Release))

    @property
    def consumed(self) -> tuple[int, int]:
        """Rows and epochs as last told."""
        told = [m for m in self.sent if isinstance(m, Consumed)]
        return (told[-1].given.rows, told[-1].given.epochs) if told else (0, 0)


class LocalNode(Sent):
    """One node's `NodeFeeds` and Flight server on a loop of its own, and the child's link to it.

    Attributes:
        link: what a child has.
        told: what the coordinator was told.
        spooled: likewise, of rows that wait for an `Assign`.
        sent: what the child was sent, without the segments.
        lacking: why rows that were assigned cannot come, behind the kind of the failure.
        driver: assigns rows that are spooled; without it they stay in the spool.
    """

    def __init__(
        self,
        node_id: int = 0,
        limit_nbytes: int = 1 << 28,
        tracks: bool = False,
        tls: Tls | None = None,
        keeps: bool = False,
        silence_s: float = SOON_S,
    ) -> None:
        super().__init__()
        self.node_id = node_id
        self._silence_s = silence_s
        self._keeps = keeps
        self._tls = tls
        self.told: list[FeedProgress] = []
        self.spooled: list[Spooled] = []
        self.driver: LevelDriver | None = LevelDriver([self])
        self.sent: list[Local] = []
        self.lacking: list[str] = []
        self._limit_nbytes, self._tracks = limit_nbytes, tracks
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="local-node")

    def __enter__(self) -> LocalNode:
        self._thread.start()
        agents, child_end = socket.socketpair()
        self._sock = agents
        self.call(self._begin)
        self.link = AgentLink(child_end)
        self.link.feeds.registry.tracks = self._tracks
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
        for reader in self.link.feeds._readers.values():
            with suppress(FeedClosedError):  # there is nobody to tell any more
                reader.terminate()
        self.call(self.feeds.shut_down)
        self.call(self.pipe.close)
        self.call(lambda: None)  # what Flight's threads have still left to the loop
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._sock.close()

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(SOON_S)

    def reader(self, feed: str = FEED) -> FeedReader:
        return self.link.feeds.reader(feed)

    def end_epoch(self, epoch: int, rows: dict[int, int], again: bool = False) -> None:
        self.call(lambda: self.feeds.on_driver_message(EpochEnd(FEED, epoch, rows, again)))

    def end_feed(self) -> None:
        self.call(lambda: self.feeds.on_driver_message(msg.FeedEnd(())))

    def wait_told(self, is_enough: Callable[[list[FeedProgress]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: is_enough(self.told), SOON_S), self.told

    @property
    def ranges(self) -> list[msg.SpooledRange]:
        """What the node has reported of its spool."""
        return [piece for each in self.spooled for piece in each.ranges]

    def wait_received(self, rows: int) -> None:
        self.wait_told(
            lambda told: any(
                count.feed == FEED and count.rows_received == rows
                for progress in told
                for count in progress.counts
            )
        )

    @property
    def target(self) -> Target:
        return Target(self.node_id, f"worker:{self.node_id}", self.uri)

    def _begin(self) -> None:
        self.feeds = NodeFeeds(
            NodeDirectory(
                self.node_id,
                tuple(f"worker:{n}" for n in range(self.node_id + 9)),
                SPEC,
                self._silence_s,
            ),
            StoreLimits(self._limit_nbytes, keeps=self._keeps),
            SOON_S,
            self._send,
            self._tell,
            lambda kind, what: self.lacking.append(f"{kind}: {what}"),
        )
        self.pipe = ChildPipe(self._loop, self._sock, self.feeds.on_child_message)
        self.uri = self.feeds.listen("127.0.0.1", self._tls)

    def _send(self, message: Local, fd: int) -> None:
        if not isinstance(message, Segment):
            self._note(message)
        self.pipe.send(message, fd)

    def _tell(self, message: FeedProgress | Spooled) -> None:
        with self._changed:
            if isinstance(message, Spooled):
                self.spooled.append(message)
            else:
                self.told.append(message)
            self._changed.notify_all()
        if isinstance(message, Spooled) and self.driver is not None:
            self.driver.assign(self, message)

    def soon(self, order: Assign) -> None:
        """Do what the driver does, from any thread."""
        self._loop.call_soon_threadsafe(self.feeds.on_driver_message, order)


class LevelDriver:
    """Assigns all rows that nodes spool, in place of the driver's policy: equally many to each."""

    def __init__(self, nodes: Sequence[LocalNode]) -> None:
        self._nodes = nodes
        self._totals = Counter({node.node_id: 0 for node in nodes})
        self._lock = threading.Lock()
        for node in nodes:
            node.driver = self

    def assign(self, holder: LocalNode, spooled: Spooled) -> None:
        with self._lock:
            assigned: dict[int, list[msg.AssignedRange]] = {one.node_id: [] for one in self._nodes}
            for piece in spooled.ranges:
                skip = 0
                most_first = [node_id for node_id, _ in self._totals.most_common()]
                for place, node_id in enumerate(most_first):
                    rows = (piece.rows - skip) // (len(most_first) - place)
                    spans = ((piece.partition, piece.start + skip, piece.start + skip + rows),)
                    what = (holder.node_id, piece.number, piece.skip + skip, rows, spans)
                    assigned[node_id] += [msg.AssignedRange(*what)] * bool(rows)
                    self._totals[node_id] += rows
                    skip += rows
            for node in self._nodes:
                if found := tuple(assigned[node.node_id]):
                    uris = {holder.node_id: holder.uri}
                    node.soon(Assign(spooled.feed, spooled.epoch, "run", found, uris))


class NodeProxy(Proxy):
    """A network between feeders and a node, that can be cut.

    Attributes:
        target: where feeders find the node through this network.
    """

    def __init__(self, target: Target, records: bool = False, port: int = 0) -> None:
        super().__init__(target.uri, records, port=port)
        self.target = replace(target, uri=self.uri)


class Running(Generic[T]):
    """A function in a thread of its own."""

    def __init__(self, function: Callable[[], T]) -> None:
        pool = ThreadPoolExecutor(1, "running")
        self._future = pool.submit(function)
        pool.shutdown(wait=False)

    def still_runs(self, after_s: float) -> bool:
        return bool(wait([self._future], after_s).not_done)

    def result(self) -> T:
        return self._future.result(SOON_S)


def values(reader: FeedReader, batch_size: int = 1000) -> list[int]:
    """Read one epoch; return column "x"."""
    return [v for batch in EpochBatches(reader, batch_size) for v in batch["x"].tolist()]


def order(targets: Sequence[Target], run: str = "run", timeout_s: float = SOON_S) -> FeedSpec:
    """Return an order to feed `targets`, which joins no batches."""
    return FeedSpec(FEED, 0, run, tuple(targets), TOKEN, timeout_s, min_piece_nbytes=0)
