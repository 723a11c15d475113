"""Reads Parquet files into a node's spools and logs: a thread a data set, which waits for room."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from sparkdl.control.channel import EndMark, Local, ReadFailed, ReadParquet
from sparkdl.control.messages import EpochEnd, FeedBegin, Granted, ReadShare
from sparkdl.control.rows import Share
from sparkdl.core.errors import ConfigError, SparkdlError
from sparkdl.core.row_ranges import take_rows
from sparkdl.feed.store.held import AppendRequest, HeldSegments
from sparkdl.feed.store.log import Log
from sparkdl.feed.store.spool import Spool

_log = logging.getLogger(__name__)

_MIN_BATCH_NBYTES = 1 << 16
_MARKS_AHEAD = 4
"""How many epochs ahead the child is told that they read the same rows again."""


class ParquetLoader(threading.Thread):
    """Reads one data set; ends once its rows are not wanted any more.

    Args:
        memory_nbytes: of all feeds of the node; batches and rows read ahead take fractions.
    """

    def __init__(self, feed: str, memory_nbytes: int) -> None:
        super().__init__(name=f"sparkdl-reading-{feed}", daemon=True)
        self._feed = feed
        self._memory_nbytes = memory_nbytes

    def stop(self) -> None:
        """Stop waiting: further rows are refused from now on."""

    def _read(self, share: Share, into: HeldSegments, request: AppendRequest) -> bool:
        """Read a share to its end; return whether all of it was wanted.

        Its rows are those of partition 0, numbered through all files.

        Raises:
            ReadError: if a file cannot be read, or there have been no descriptors for a minute.
            ConfigError: if the storage cannot be opened here.
        """
        # Imported here, because agents that read no files do not need it.
        from sparkdl.storage.parquet.read import BATCH_NBYTES, PREFETCH_NBYTES, read_share

        # Fractions, so that several batches and the rows read ahead fit beside other feeds.
        batch_nbytes = max(_MIN_BATCH_NBYTES, min(BATCH_NBYTES, self._memory_nbytes // 16))
        prefetch_nbytes = max(batch_nbytes, min(PREFETCH_NBYTES, self._memory_nbytes // 4))
        numbers = deque(part.numbers for part in share.ranges)
        batches = read_share(share, batch_nbytes=batch_nbytes, prefetch_nbytes=prefetch_nbytes)
        # Ends the decoding threads when the rows are not wanted any more.
        with closing(batches):
            for batch in batches:
                spans = tuple((0, *rows) for rows in take_rows(numbers, batch.num_rows))
                if not into.append_in_time(batch, replace(request, spans=spans)):
                    return False
        return True


class ShareLoader(ParquetLoader):
    """A pass that the driver has ordered: its rows go to the spool.

    Args:
        on_problem: called on this thread with why not all rows can be read.
    """

    def __init__(
        self, order: ReadShare, spool: Spool, memory_nbytes: int, on_problem: Callable[[str], None]
    ) -> None:
        super().__init__(order.feed, memory_nbytes)
        self._order = order
        self._spool = spool
        self._on_problem = on_problem

    def run(self) -> None:
        """Read the share."""
        order = self._order
        request = AppendRequest(order.epoch, keep=order.keep, run=order.run)
        try:
            self._read(order.share, self._spool, request)
        except Exception as error:  # noqa: BLE001 (the driver has to know)
            self._on_problem(_problem_text(error))


class DirectLoader(ParquetLoader):
    """A data set that user code of this node has asked for, epoch after epoch.

    While the child uses an epoch the next one is read, as far as there is room; no later one.

    Args:
        send_to_child: called on this thread; in order with the segments of the log.
    """

    def __init__(
        self,
        order: ReadParquet,
        log: Log,
        memory_nbytes: int,
        send_to_child: Callable[[DirectLoader, Local], None],
    ) -> None:
        super().__init__(order.feed, memory_nbytes)
        self._order = order
        self._log = log
        self._send_to_child = send_to_child
        self._changed = threading.Condition()
        self._epoch = 0
        self._is_stopped = False

    def reached(self, epoch: int) -> None:
        """Note that the child has reached this epoch."""
        with self._changed:
            self._epoch = epoch
            self._changed.notify_all()

    def stop(self) -> None:
        """Wait no longer: the log has been closed."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def run(self) -> None:
        """List the files, and read this node's share for each epoch."""
        try:
            self._read_all()
        except Exception as error:  # noqa: BLE001 (user code has to know)
            is_config = isinstance(error, ConfigError)
            self._send_to_child(self, ReadFailed(self._feed, _problem_text(error), is_config))

    def _read_all(self) -> None:
        from sparkdl.storage.parquet.source import list_files, shuffled

        order, log = self._order, self._log
        source = list_files(order.paths, order.columns, order.options)
        if not source.num_rows:
            raise ConfigError(
                f"ctx.parquet: the files of {', '.join(order.paths)} have no rows, so there is "
                "nothing to read. Give a path whose files have rows"
            )
        has_begun = is_whole = False
        rows: dict[int, int] = {}
        # `epochs` may be None, which no number equals: the loop is endless then.
        for epoch in itertools.takewhile(lambda e: e != order.epochs, itertools.count()):
            done = order.done.get(epoch, {}).get(0, ())
            # A checkpoint covers the whole epoch, so the child goes on to the next one.
            if done == ((0, source.num_rows),):
                self._send_to_child(self, FeedBegin(log.feed, epoch + 1, epoch + 1))
                continue
            if has_begun and not self._wait_for(epoch - (_MARKS_AHEAD if is_whole else 1)):
                return
            is_last, has_begun = epoch + 1 == order.epochs, True
            if not is_whole:
                # Each node plans the shares of all nodes, with the same result: it learns from it
                # how many rows the others have.
                shares = source.shares(len(order.nodes), order.seed, done=done)
                rows = {n: share.num_rows for n, share in zip(order.nodes, shares, strict=True)}
                if len(rows) > 1:
                    self._send_to_child(self, Granted(log.feed, epoch, min(rows.values())))
                share = shuffled(shares[order.nodes.index(order.node)], order.seed, epoch)
                # An epoch of which a checkpoint covers a part cannot be read again as a whole one.
                request = AppendRequest(epoch, keep=not (is_last or done))
                if not (self._read(share, log, request) and log.takes(epoch)):
                    return
                is_whole = log.cut(epoch).is_whole and not self._has_done_from(epoch)
            is_again = is_whole and not is_last
            if not is_again:
                log.settle(epoch)
            # If fewer rows than nodes are left, they come first in the next epoch.
            continues = bool(done) and not all(rows.values())
            end = EpochEnd(log.feed, epoch, rows, again=is_again, goes_on=continues)
            self._send_to_child(self, end)
        self._send_to_child(self, EndMark(log.feed))

    def _has_done_from(self, epoch: int) -> bool:
        """Whether some rows of `epoch` or a later one are not to be read."""
        return any(each >= epoch and rows for each, rows in self._order.done.items())

    def _wait_for(self, epoch: int) -> bool:
        """Wait until the child has reached `epoch`; return whether to continue."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._epoch >= epoch)
            return not self._is_stopped


def _problem_text(error: Exception) -> str:
    if isinstance(error, SparkdlError):
        return str(error)
    _log.error("Reading Parquet files failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
