"""The child's end of the pipe to its agent: feeds come in, progress and results go out."""

from __future__ import annotations

import logging
import math
import operator
import os
import queue
import select
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyarrow as pa

from sparkdl.control.channel import (
    Consumed,
    EndMark,
    Local,
    Reported,
    Segment,
    Start,
    Unframer,
    receive,
    send,
)
from sparkdl.control.descriptors import OUT_OF_DESCRIPTORS, close_fd
from sparkdl.control.lease import SILENT_LOOKS, look_s
from sparkdl.control.messages import AllGathered, CheckpointCommit, FeedBegin, Gather
from sparkdl.control.rows import EpochRows
from sparkdl.control.values import decode_value, encode_value
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import (
    ConfigError,
    CoordinationError,
    FeedClosedError,
    ReadError,
    ResultError,
    SparkdlError,
)
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.core.world import FIRST_TIME
from sparkdl.feed.reader.cursor import Item
from sparkdl.feed.reader.files import MEMORY_NBYTES, OwnFiles
from sparkdl.feed.reader.reader import FeedMessage, FeedReader, FeedRegistry, TrainingWatch
from sparkdl.frameworks.independent_models import IndependentModelCheck
from sparkdl.values.batches import from_ipc, to_ipc


class FeedReaders:
    """The readers of one node, one for each feed. Any thread may call."""

    def __init__(self, send: Callable[[Local], None]) -> None:
        self._send_to_agent = send
        self._lock = threading.Lock()  # of what follows: user code's threads ask for readers
        self._readers: dict[str, FeedReader] = {}
        self._own: dict[str, OwnFiles] = {}
        self.registry = FeedRegistry()
        self._has_ended = self._is_lost = False

    def reader(self, feed: str) -> FeedReader:
        with self._lock:
            reader = self._readers.get(feed)
            if reader is None:
                reader = FeedReader(feed, self._send, registry=self.registry)
                self._add(reader)
                # A reader made after the end would otherwise wait for rows that never come.
                if self._has_ended:
                    reader.on_message(EndMark(feed))
            return reader

    def _add(self, reader: FeedReader) -> None:
        self._readers[reader.feed] = reader
        if self._is_lost:
            reader.on_agent_lost()

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
        cause = self.registry.raised
        if cause is None or cause is error or str(cause) not in str(error):
            return error
        cause.__cause__ = cause.__context__ = None
        return cause.with_traceback(error.__traceback__)

    def own_files(self, memory_nbytes: int | None) -> OwnFiles:
        """Return a new feed that this node reads from files; no driver ends it."""
        with self._lock:
            name = f"parquet:{len(self._own)}"
            self.registry.own.add(name)
            own = OwnFiles(name, self._send, memory_nbytes or MEMORY_NBYTES, self.registry)
            self._own[name] = own
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
        with self._lock:
            return max((reader.steps for reader in self._readers.values()), default=0)

    def begin(self, start: Start, watch: TrainingWatch) -> None:
        """Let all readers know their world; with checkpoints they note which rows are used."""
        member, is_resumed = start.world.member(start.node_id), start.resume != FIRST_TIME
        with self._lock:
            self.registry.expect(start.spec, member, is_resumed, watch)
            for reader in self._readers.values():
                reader.begin()

    def take(self, message: Local, fd: int) -> None:
        """Sort a message to the reader of its feed; `fd` is ours."""
        match message:
            case Segment(feed):
                self.registry.begin(feed)
                # The kernel had no descriptor left for these rows, so they are lost.
                if fd < 0:
                    self.reader(feed).fail(ReadError(f"rows are lost: {OUT_OF_DESCRIPTORS}"))
                else:
                    self.reader(feed).add(Item(message, fd))
            case EndMark(""):
                self._end_all()
            case _ if isinstance(message, FeedMessage):
                if isinstance(message, FeedBegin):
                    self.registry.begin(message.feed)
                self.reader(message.feed).on_message(message)

    def on_agent_lost(self) -> None:
        with self._lock:
            self._is_lost = True
            for reader in self._readers.values():
                reader.on_agent_lost()

    def _send(self, message: Local) -> None:
        if isinstance(message, Consumed):
            self.registry.touch()
        self._send_to_agent(message)

    def _end_all(self) -> None:
        with self._lock:
            self._has_ended = True
            readers = [r for feed, r in self._readers.items() if feed not in self._own]
        for reader in readers:
            reader.on_message(EndMark(reader.feed))


def _meant(read: list[str], batches: int) -> str:
    if DEFAULT_FEED in read:
        return DEFAULT_FEED
    if len(read) != 1:
        names = ", ".join(map(repr, sorted(read))) or "none"
        raise ConfigError(
            f"batches={batches} names no feed, and this node reads {names}. Name the feeds: "
            "batches={'input': …}"
        )
    return read[0]


_log = logging.getLogger(__name__)
T = TypeVar("T")

_CALLS = ("ctx.all_gather or ctx.barrier", "for a batch with fewer rows than nodes")


class _Gatherings:
    """Those of one kind, one at a time: the driver puts values together by their number."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0
        self.ended: queue.Queue[AllGathered] = queue.Queue()


class AgentLink:
    """One thread receives and hands on; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()  # the frames of two threads must not mix
        self._starts: queue.Queue[tuple[Start, int] | None] = queue.Queue()
        self._commits: queue.Queue[CheckpointCommit] = queue.Queue()
        self._gatherings = _Gatherings(), _Gatherings()
        self._first_rows: dict[str, pa.RecordBatch] = {}
        self.feeds = FeedReaders(self.send)
        self._is_closing = False
        self._look_s: float | None = None
        self._thread = threading.Thread(target=self._receive, name="sparkdl-link", daemon=True)
        self._thread.start()

    def wait_start(
        self, when_idle: Callable[[], None] = lambda: None, idle_s: float = 2.0
    ) -> tuple[Start, socket.socket]:
        """Wait for the world; return it, and the socket that holds this node's port.

        Args:
            when_idle: called once if it has not come after `idle_s`: a child imports the modules
                it needs later while other nodes are slower.
        """
        try:
            # Not at once: if the world is about to begin, these imports would delay it.
            start = self._starts.get(timeout=idle_s)
        except queue.Empty:
            when_idle()
            start = self._starts.get()
        if start is None:
            raise FeedClosedError("the agent of this node ended before the training began")
        message, fd = start
        if fd < 0:
            raise ConfigError(f"this node cannot have its port: {OUT_OF_DESCRIPTORS}")
        return message, socket.socket(fileno=fd)

    def wait_commit(self, step: int, deadline: Deadline) -> CheckpointCommit | None:
        """Wait for a reply about the checkpoint of `step`; `None` if there was none in time."""
        return wait_for_nodes(self._commits, lambda reply: reply.step == step, deadline)

    def first_row(
        self, is_first: bool, of: tuple[float, str, int], reader: FeedReader
    ) -> pa.RecordBatch:
        """Return a row of the first node, for nodes that have none; all call it alike."""
        with self._gatherings[1].lock:
            if (row := self._first_rows.get(reader.feed)) is None:
                own = reader.peek_batch(is_needed=True) if is_first else None
                data, *_ = self._gather(1, own and to_ipc(own.slice(0, 1)), *of)
                row = self._first_rows[reader.feed] = from_ipc(data)
            return row

    def all_gather(self, value: Any, timeout_s: float, node: str, generation: int) -> list[Any]:
        """Return the values that all nodes gave to this call, see `NodeContext.all_gather`."""
        with self._gatherings[0].lock:
            return self._gather(0, value, timeout_s, node, generation)

    def _gather(
        self, kind: int, value: Any, timeout_s: float, node: str, generation: int
    ) -> list[Any]:
        try:
            data = encode_value(value)
        except ResultError as error:
            raise ConfigError(f"ctx.all_gather cannot send this value: {error}") from None
        gatherings = self._gatherings[kind]
        number, gatherings.calls = 2 * gatherings.calls + kind, gatherings.calls + 1
        self.send(Gather(generation, number, data))
        deadline = Deadline.after(timeout_s)
        end = wait_for_nodes(gatherings.ended, lambda end: end.number == number, deadline)
        if end is None:
            raise CoordinationError(
                f"not all nodes called {_CALLS[kind]} within {timeout_s:g} s; this was "
                f"call {gatherings.calls} of {node}. cluster.stacks() shows what the nodes are "
                "doing"
            )
        if end.problem:
            raise CoordinationError(
                f"call {gatherings.calls} of {_CALLS[kind]} cannot complete: {end.problem}"
            )
        return [decode_value(part) for part in end.values]

    def send(self, message: Local, fd: int = -1) -> None:
        try:
            with self._send_lock:
                send(self._sock, message, fd)
        except OSError as error:
            raise FeedClosedError(f"the agent of this node is gone: {error}") from None

    def close(self) -> None:
        """End the link in order; the agent sees the end of the stream."""
        # Before the shutdown: otherwise the thread takes the end of the stream for a lost agent.
        self._is_closing = True
        self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()
        while start := self._starts.get():  # the last one is None
            close_fd(start[1])
        # The loop has taken the end of the queue, which a later wait has to find, too.
        self._starts.put(None)

    def _receive(self) -> None:
        unframer = Unframer()
        try:
            while self._wait_readable() and (messages := receive(self._sock, unframer)) is not None:
                for message, fd in messages:
                    self._dispatch(message, fd)
        except (OSError, SparkdlError) as error:
            _log.debug("The pipe to the agent broke: %s", error)
        unframer.close()
        # For the main thread, if it still waits for the world.
        self._starts.put(None)
        self.feeds.on_agent_lost()
        if not self._is_closing:
            # Without its agent nothing would end this process, and it must not train on unseen.
            os.kill(os.getpid(), signal.SIGKILL)

    def _wait_readable(self) -> bool:
        """Wait for the agent; false if it has been silent until the driver may give it up."""
        # Until the lease comes with `Start`, only the pipe's end shows that the agent is gone.
        if self._look_s is None:
            return True
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return any(poller.poll(self._look_s * 1000) for _ in range(SILENT_LOOKS))

    def _dispatch(self, message: Local, fd: int) -> None:
        match message:
            case Start():
                self._look_s = look_s(message.spec.settings.lease_s)
                # Before the main thread learns of the world: user code asks for readers at once.
                self.feeds.begin(message, self._watch_training(message))
                self._starts.put((message, fd))
            case CheckpointCommit():
                self._commits.put(message)
            case AllGathered(_, number):
                self._gatherings[number % 2].ended.put(message)
            case _:
                self.feeds.take(message, fd)

    def _watch_training(self, start: Start) -> TrainingWatch:
        spec, own = start.spec, start.world.member(start.node_id)
        trainers = [each for each in start.world.trainers if not each.role.is_server]
        if spec.independent_models or own not in trainers or len(trainers) == 1:
            return TrainingWatch()
        return IndependentModelCheck(spec.framework, len(trainers))


def wait_for_nodes(
    arrived: queue.Queue[T], is_wanted: Callable[[T], bool], deadline: Deadline
) -> T | None:
    """Return the first wanted message; drop earlier ones, whose waits have timed out.

    A thread that stands here waits for the other nodes (`node/waits.py`).
    """
    while True:
        try:
            message = arrived.get(timeout=deadline.wait_s)
        except queue.Empty:
            return None
        if is_wanted(message):
            return message


def reported(step: Any, metrics: Mapping[str, Any]) -> Reported:
    """Return the message for `NodeContext.report`.

    Args:
        step: a whole number; arrays and tensors of one such number are taken as well.
        metrics: likewise, of any number.
    """
    try:
        number = operator.index(step.item() if hasattr(step, "item") else step)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"report(step={step!r}): must be a whole number ({error})") from None
    if number < 0:
        raise ConfigError(f"report(step={number}): steps are 0 or more")
    values: dict[str, float | str] = {}
    for name, value in metrics.items():
        try:
            found = float(value)
        except (TypeError, ValueError) as error:
            text = f"report({name}={value!r}): must be a number ({error})"
            raise ConfigError(text) from None
        # JSON has no number for infinity and NaN: a loss of NaN would end the node.
        values[name] = found if math.isfinite(found) else str(found)
    return Reported(number, values)
