"""The readers of a node's feeds: what comes from the agent is sorted to them, by feed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from sparkdl.control.channel import (
    Consumed,
    EndMark,
    Local,
    Segment,
    Start,
)
from sparkdl.control.descriptors import OUT_OF_DESCRIPTORS
from sparkdl.control.messages import FeedBegin
from sparkdl.control.rows import EpochRows
from sparkdl.core.errors import ConfigError, ReadError
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.core.world import FIRST_TIME
from sparkdl.feed.reader.cursor import Item
from sparkdl.feed.reader.files import MEMORY_NBYTES, OwnFiles
from sparkdl.feed.reader.reader import UNWATCHED, FeedMessage, FeedReader, Supply, TrainingWatch


class FeedReaders:
    """The readers of one node, one for each feed. Any thread may call.

    Args:
        send: takes what readers have for the agent.

    Attributes:
        watch: of the training, once there is a world.
    """

    def __init__(self, send: Callable[[Local], None]) -> None:
        self._send_to_agent = send
        self._lock = threading.Lock()  # of what follows: user code's threads ask for readers
        self._readers: dict[str, FeedReader] = {}
        self._own: dict[str, OwnFiles] = {}
        self._supply = Supply()
        self._has_ended = self._is_lost = False
        self._tracks = self._is_resumed = False
        self.watch: TrainingWatch = UNWATCHED

    def reader(self, feed: str) -> FeedReader:
        """Return the reader of the feed called `feed`; there is one for each name."""
        with self._lock:
            reader = self._readers.get(feed)
            if reader is None:
                reader = FeedReader(feed, self._send, supply=self._supply)
                self._add(reader)
                # A reader that is asked for after the end would otherwise wait for rows that never
                # come.
                if self._has_ended:
                    reader.hear(EndMark(feed))
            return reader

    def _add(self, reader: FeedReader) -> None:
        self._readers[reader.feed] = reader
        reader.begin(self.watch, self._tracks, self._is_resumed)
        if self._is_lost:
            reader.lose()

    def batches_given(self) -> dict[str, int]:
        """Return how many batches of each feed user code was handed, without the unread feeds."""
        with self._lock:
            readers = dict(self._readers)
        given = {feed: reader.batches_given for feed, reader in readers.items()}
        return {feed: count for feed, count in given.items() if count}

    def report(self) -> None:
        """Report what user code has been given last: it has returned."""
        with self._lock:
            readers = list(self._readers.values())
        for reader in readers:
            reader.report()
        for own in self._own.values():
            own.stop()

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error of a feed that `error` repeats, as TensorFlow does; else `error`."""
        with self._lock:
            found = [reader.raised for reader in self._readers.values()]
        for cause in found:
            if cause is not None and cause is not error and str(cause) in str(error):
                cause.__cause__ = cause.__context__ = None
                return cause.with_traceback(error.__traceback__)
        return error

    def own_files(self, memory_nbytes: int | None) -> OwnFiles:
        """Return a new feed that this node reads from files; no driver ends it."""
        with self._lock:
            name = f"parquet:{len(self._own)}"
            own = self._own[name] = OwnFiles(name, self._send, memory_nbytes or MEMORY_NBYTES)
            self._add(own.reader)
        return own

    def positions(
        self, batches: int | Mapping[str, int] | None
    ) -> tuple[dict[str, EpochRows], dict[str, EpochRows]]:
        """Return which rows user code has used: by feed, epoch and segment; of its files, by row.

        Args:
            batches: how many batches of the default feed, or of the only one that was read; by
                feed, of others as well, see `FeedReader.batches_beside` for those not named;
                `None` for all that were handed out.

        Raises:
            ConfigError: see `FeedReader.position`, or if it is unclear which feed is meant.
        """
        asked = self._asked(batches)
        found = {feed: self._readers[feed].position(count) for feed, count in asked.items()}
        own = {feed: self._own[feed].rows(found.pop(feed)) for feed in asked if feed in self._own}
        return found, own

    def _asked(self, batches: int | Mapping[str, int] | None) -> dict[str, int | None]:
        with self._lock:
            readers = dict(self._readers)
        read = [feed for feed, reader in readers.items() if reader.batches_given]
        if batches is None:
            return dict.fromkeys(read)
        if isinstance(batches, int):
            batches = {_meant(read, batches): batches} if read or batches else {}
        if unknown := sorted(set(batches) - set(readers)):
            raise ConfigError(
                f"batches= names {unknown}: must name feeds that this node reads, which are "
                f"{sorted(readers)}"
            )
        # The caller counts what it trains on; a validation, beside it, needs no count.
        return {f: batches[f] if f in batches else readers[f].batches_beside() for f in read}

    @property
    def steps(self) -> int:
        """How many batches have been read, of the feed with the most."""
        with self._lock:
            return max((reader.steps for reader in self._readers.values()), default=0)

    def begin(self, start: Start, watch: TrainingWatch) -> None:
        """Let all readers know their world; with checkpoints they note which rows are used."""
        member, is_resumed = start.world.member(start.node_id), start.resume != FIRST_TIME
        with self._lock:
            self._supply.expect(start.spec, member, is_resumed)
            self.watch = watch
            self._tracks, self._is_resumed = start.spec.checkpoint_dir is not None, is_resumed
            for reader in self._readers.values():
                reader.begin(watch, self._tracks, is_resumed)

    def take(self, message: Local, fd: int) -> None:
        """Sort a message to the reader of its feed; `fd` is ours."""
        match message:
            case Segment(feed):
                self._supply.begin(feed)
                # The kernel had no descriptor left for these rows, so they are lost.
                if fd < 0:
                    self.reader(feed).fail(ReadError(f"rows are lost: {OUT_OF_DESCRIPTORS}"))
                else:
                    self.reader(feed).add(Item(message, fd))
            case EndMark(""):
                self._end_all()
            case _ if isinstance(message, FeedMessage):
                if isinstance(message, FeedBegin):
                    self._supply.begin(message.feed)
                self.reader(message.feed).hear(message)

    def lose(self) -> None:
        """Fail all waits: the agent is gone."""
        with self._lock:
            self._is_lost = True
            for reader in self._readers.values():
                reader.lose()

    def _send(self, message: Local) -> None:
        if isinstance(message, Consumed):
            self._supply.move()
        self._send_to_agent(message)

    def _end_all(self) -> None:
        with self._lock:
            self._has_ended = True
            readers = [r for feed, r in self._readers.items() if feed not in self._own]
        for reader in readers:
            reader.hear(EndMark(reader.feed))


def _meant(read: list[str], batches: int) -> str:
    """Return the feed meant by a single number of batches."""
    if DEFAULT_FEED in read:
        return DEFAULT_FEED
    if len(read) != 1:
        names = ", ".join(map(repr, sorted(read))) or "none"
        raise ConfigError(
            f"batches={batches} could be of several feeds, or of none: read were {names}. Name "
            "the feeds: batches={'input': …}"
        )
    return read[0]
