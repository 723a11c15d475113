"""Parquet files that user code of this node reads: a thread brings its share to a reader.

The driver and the agent take no part. Each epoch is read from the files, as far ahead of user code
as there is room, and not beyond the next epoch.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from sparkdl.control.channel import Consumed, Local, Reclaim, Release, Segment, Terminated
from sparkdl.control.messages import EpochEnd, FeedBegin, Granted
from sparkdl.control.rows import EpochRows, Share
from sparkdl.core.errors import ConfigError, ReadError, SparkdlError
from sparkdl.core.row_ranges import Span, merge_ranges, spans_within
from sparkdl.feed.reader.cursor import Item
from sparkdl.feed.reader.reader import FeedReader, FeedRegistry
from sparkdl.feed.store.spool import read_within

_log = logging.getLogger(__name__)
MEMORY_NBYTES = 256 * 1024 * 1024
"""What may be here that user code has not used, where `Feeding(memory_nbytes=…)` is not given."""


@dataclass(frozen=True)
class FileOrder:
    """Which files to read, and whose share of their rows.

    Attributes:
        nodes: the ids of the nodes that share the rows, in this order; all read with the same.
        node: whose share is to be read.
        seed: of the order of the row groups, which differs from epoch to epoch; `None` keeps it.
        done: rows covered by a checkpoint, by epoch: they are not read.
    """

    paths: tuple[str, ...]
    nodes: tuple[int, ...] = (0,)
    node: int = 0
    columns: tuple[str, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    done: EpochRows = field(default_factory=dict)


class OwnFiles(threading.Thread):
    """A data set that nodes share among themselves, and the reader to which its rows come."""

    def __init__(
        self,
        feed: str,
        report: Callable[[Consumed], None],
        memory_nbytes: int = MEMORY_NBYTES,
        registry: FeedRegistry | None = None,
    ) -> None:
        super().__init__(name=f"sparkdl-reading-{feed}", daemon=True)
        self.reader = FeedReader(feed, self._on_message, registry)
        self.order: FileOrder | None = None
        self._on_report = report
        self._memory_nbytes = memory_nbytes
        self._changed = threading.Condition()
        self._is_stopped = self._has_news = False
        self._epoch = 0
        self._held: dict[int, int] = {}
        """The bytes of segments that user code may still read, by number."""
        self._spans: list[tuple[Span, ...]] = []

    def begin(self, order: FileOrder) -> None:
        self.order = order
        self.start()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def rows(self, consumed: EpochRows) -> EpochRows:
        """Return by partition, of which there is one, the rows that are given by segment."""
        found: EpochRows = {}
        for epoch, segments in consumed.items():
            spans = [s for n, used in segments.items() for s in spans_within(self._spans[n], used)]
            found[epoch] = {0: tuple(merge_ranges((start, stop) for _, start, stop in spans))}
        return found

    def run(self) -> None:
        try:
            self._read_all()
        except SparkdlError as error:
            self.reader.fail(error)
        except Exception as error:  # noqa: BLE001 (who reads has to know)
            _log.error("Reading Parquet files failed", exc_info=error)
            self.reader.fail(ReadError(f"{type(error).__name__}: {error}"))

    def _on_message(self, message: Local) -> None:
        # The reader's lock may be held.
        if isinstance(message, Consumed):
            self._on_report(structs.replace(message, is_own=True))
        with self._changed:
            match message:
                case Consumed():
                    self._epoch = message.given.epochs
                case Release(_, numbers):
                    for number in numbers:
                        del self._held[number]
                case Terminated():
                    self._is_stopped = True
            self._has_news = True
            self._changed.notify_all()

    def _read_all(self) -> None:
        from sparkdl.storage.parquet.source import list_files, shuffled

        order, reader = self.order, self.reader
        assert order is not None
        source = list_files(order.paths, order.columns, order.options)
        if not source.num_rows:
            raise ConfigError(
                f"the files of {', '.join(order.paths)} have no rows, so there is "
                "nothing to read. Give a path whose files have rows"
            )
        first: int | None = None
        for epoch in itertools.count():
            done = order.done.get(epoch, {}).get(0, ())
            if done == ((0, source.num_rows),):
                reader.on_message(FeedBegin(reader.feed, epoch + 1, epoch + 1))
                continue
            first = epoch if first is None else first
            if epoch > first and not self._wait_for_epoch(epoch - 1):
                return
            # Each node plans the shares of all nodes, with the same result: it learns from it
            # how many rows the others have.
            shares = source.shares(len(order.nodes), order.seed, done=done)
            rows = {n: share.num_rows for n, share in zip(order.nodes, shares, strict=True)}
            reader.on_message(Granted(reader.feed, epoch, min(rows.values())))
            share = shares[order.nodes.index(order.node)]
            if not self._read(shuffled(share, order.seed, epoch), epoch):
                return
            # If fewer rows than nodes are left, they come first in the next epoch.
            continues = bool(done) and not all(rows.values())
            reader.on_message(EpochEnd(reader.feed, epoch, rows, goes_on=continues))

    def _read(self, share: Share, epoch: int) -> bool:
        # Ends the decoding threads when the rows are not wanted any more.
        with closing(read_within(share, self._memory_nbytes)) as batches:
            for batch, spans in batches:
                if not self._wait_for_room(batch.nbytes):
                    return False
                number = len(self._spans)
                self._spans.append(spans)
                with self._changed:
                    self._held[number] = batch.nbytes
                segment = Segment(self.reader.feed, number, epoch, batch.num_rows, batch.nbytes)
                self.reader.add(Item(segment, -1, mapped=batch))
        return True

    def _wait_for_epoch(self, epoch: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._epoch >= epoch)
            return not self._is_stopped

    def _wait_for_room(self, nbytes: int) -> bool:
        while not self._is_stopped:
            with self._changed:
                self._has_news = False
                if not self._held or sum(self._held.values()) + nbytes <= self._memory_nbytes:
                    return True
            # Without the lock: the reader has one of its own, and answers at once. All that is
            # here goes if user code waits for more.
            self.reader.on_message(Reclaim(self.reader.feed))
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped or self._has_news)
        return False
