"""The pipe between an agent and its child: typed messages and file descriptors over a socket pair.

Runs in: agent, child

    agent                                        child
      │  Start(world, …) + descriptor ─────────────▶│  imports done or not, sent once, with the port
      │  Segment(feed, number, …) + descriptor ────▶│  one received batch, for the child to map
      │  EndMark, Reopened, Reclaim ───────────────▶│
      │  FeedBegin, Granted, EpochEnd,              │
      │      FeedCovered ──────────────────────────▶│  the coordinator's, passed on
      │◀─────────────────────────────── ChildRunning│  map_fun is called
      │◀────────────────────────── Consumed, Release│  rows read; segments no longer needed
      │◀───────── Results + descriptor, Terminated  │
      │◀─────────────────────────── Reported, Waited│  the step that user code is at, what it does
      │◀─ CheckpointBegun, Checkpointed,            │  the rows of its part of a checkpoint; its end
      │      CheckpointDone ────────────────────────│  the whole
      │◀─ Gather ──── AllGathered, CheckpointCommit ▶│  what the coordinator collects, passed on
      │◀───────────────────── ChildReturned, Raised │  last message

A frame is a four-byte length and one JSON object. Descriptors travel beside the stream in the
order of the messages that carry them (SCM_RIGHTS, unix(7)).
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from sparkdl.control.descriptors import close_fd, receive_with_fds
from sparkdl.control.messages import (
    AllGathered,
    CheckpointCommit,
    CheckpointDone,
    ChildReturned,
    ChildRunning,
    EpochEnd,
    FeedBegin,
    FeedCovered,
    Gather,
    Granted,
)
from sparkdl.control.rows import EpochRows, ReadCounts
from sparkdl.core.errors import ProtocolError
from sparkdl.core.failure import Failure
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import Resume, World

if TYPE_CHECKING:
    import asyncio

_LENGTH = struct.Struct("!I")
_MAX_FDS = 64
_MAX_FRAME_NBYTES = 64 * 1024 * 1024


class LocalMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages on this pipe."""


class Start(LocalMessage, frozen=True):
    """The world is complete; the bound socket of this node's port comes with it.

    Attributes:
        payload: the file with the pickled `(map_fun, args)`.
        environment: variables that belong to this node.
    """

    world: World
    node_id: int
    spec: ClusterSpec
    resume: Resume = Resume()
    payload: str = ""
    environment: dict[str, str] = {}


class Segment(LocalMessage, frozen=True):
    """One record batch as an Arrow IPC stream; the descriptor comes with it.

    `exchange` is empty for training rows. For inference it names the partition, which expects one
    result per row; `is_last` marks the partition's last segment, an empty one. Only rows [`start`,
    `start` + `rows`) of the batch count.
    """

    feed: str
    number: int
    epoch: int
    rows: int
    nbytes: int
    exchange: str = ""
    is_last: bool = False
    is_on_disk: bool = False
    start: int = 0


class Reopened(LocalMessage, frozen=True):
    """The agent knows of `Terminated`; what comes from now on is of a feeding from `epoch` on."""

    feed: str
    epoch: int


class EndMark(LocalMessage, frozen=True):
    feed: str


class Reclaim(LocalMessage, frozen=True):
    """A feeder waits for room: release whatever has been read."""

    feed: str


class Beat(LocalMessage, frozen=True):
    """The agent lives; see `control/lease.py`."""


class Consumed(LocalMessage, frozen=True):
    """What user code has been given of a feed since the child started; see `FeedCount`.

    Args:
        is_own: the child reads its rows from files.
    """

    feed: str
    given: ReadCounts = ReadCounts()
    is_waiting: bool = False
    is_own: bool = False


class Release(LocalMessage, frozen=True):
    feed: str
    numbers: tuple[int, ...]


class Terminated(LocalMessage, frozen=True):
    feed: str


class Results(LocalMessage, frozen=True):
    """Results for the oldest unanswered rows of `exchange`; the descriptor holds the batch."""

    exchange: str
    rows: int


class Reported(LocalMessage, frozen=True):
    """User code is at this step. See `NodeContext.report`, and `NodeActive` for the metrics."""

    step: int
    metrics: dict[str, float | str] = {}


class Waited(LocalMessage, frozen=True):
    """How long this process has waited since `map_fun` began. See `NodeActive`."""

    watched_s: float
    rows_s: float
    others_s: float


class CheckpointBegun(LocalMessage, frozen=True):
    """The state of the next checkpoint is made of these rows, whatever is read while it is written.

    Args:
        feeds: what user code has used, by feed, epoch and segment.
        own: likewise of files that the child reads, by feed, epoch and partition.
    """

    feeds: dict[str, EpochRows]
    own: dict[str, EpochRows]


class Checkpointed(LocalMessage, frozen=True):
    """This node's part of the checkpoint that it began last is written.

    Args:
        problem: why the part could not be written instead; empty if it was.
    """

    step: int
    problem: str = ""


class Raised(LocalMessage, frozen=True):
    """`map_fun` raised, or the child could not prepare, at this time of the monotonic clock."""

    failure: Failure
    raised_s: float


Local = (
    Start
    | Segment
    | FeedBegin
    | Granted
    | EpochEnd
    | Reopened
    | FeedCovered
    | EndMark
    | Reclaim
    | Beat
    | ChildRunning
    | Consumed
    | Release
    | Terminated
    | Results
    | Reported
    | Waited
    | CheckpointBegun
    | Checkpointed
    | CheckpointCommit
    | CheckpointDone
    | Gather
    | AllGathered
    | ChildReturned
    | Raised
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Local] = msgspec.json.Decoder(Local)


def frame(message: Local) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def carries_fd(message: Local) -> bool:
    return isinstance(message, (Start, Segment, Results))


class Unframer:
    """Cuts a byte stream into messages and gives each its descriptor."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: list[int]) -> Iterator[tuple[Local, int]]:
        """Yield the messages that are complete, each with its descriptor or -1."""
        self._buffer += data
        self._fds.extend(fds)
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > _MAX_FRAME_NBYTES:
                raise ProtocolError(f"a frame of {length} bytes on the pipe to the child")
            stop = _LENGTH.size + length
            if len(self._buffer) < stop:
                return
            body = bytes(self._buffer[_LENGTH.size : stop])
            del self._buffer[:stop]
            try:
                message = _decoder.decode(body)
            # msgspec raises the last two for deep nesting and for broken UTF-8.
            except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
                raise ProtocolError(f"not a message on the pipe to the child: {error}") from None
            has_fd = carries_fd(message)
            if has_fd and not self._fds:
                raise ProtocolError(f"a {type(message).__name__} came without its descriptor")
            yield message, self._fds.popleft() if has_fd else -1

    def close(self) -> None:
        while self._fds:
            close_fd(self._fds.popleft())


def receive(sock: socket.socket, unframer: Unframer) -> Iterator[tuple[Local, int]] | None:
    """Read once and return the messages that completed, or `None` at the end of the stream.

    They raise as `Unframer.feed` does; a descriptor for which there was no room is -1.
    """
    data, fds = receive_with_fds(sock, 1 << 16, _MAX_FDS)
    return unframer.feed(data, fds) if data else None


def send(sock: socket.socket, message: Local, fd: int = -1) -> None:
    """Write one message on a blocking socket; the caller keeps `fd`."""
    data = frame(message)
    sent = _send_some(sock, data, fd)
    # The kernel may take a part of a large frame. The descriptor has left with its first byte.
    if sent < len(data):
        sock.sendall(data[sent:])


def _send_some(sock: socket.socket, data: bytes, fd: int) -> int:
    """Send the beginning of `data`, and `fd` with its first byte (unix(7)); return its length."""
    return socket.send_fds(sock, [data], [fd]) if fd >= 0 else sock.send(data)


class ChildPipe:
    """The agent's end of the pipe to a child: never blocks the loop, owns descriptors it sends.

    Sends and receives on the event loop; other threads go through `call_soon_threadsafe`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_message: Callable[[Local, int], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self.on_message = on_message
        self._unframer = Unframer()
        self._outbox: deque[tuple[bytes, int]] = deque()
        self._is_open = True
        sock.setblocking(False)
        loop.add_reader(sock, self._read)

    def send(self, message: Local, fd: int = -1) -> None:
        """Queue a message; `fd` is the pipe's from here on."""
        if not self._is_open:
            close_fd(fd)
            return
        self._outbox.append((frame(message), fd))
        # With more, an earlier message waits for room, and the loop flushes then.
        if len(self._outbox) == 1:
            self._flush()

    def close(self) -> None:
        """Read the messages already received, then stop; the caller closes the socket."""
        if self._is_open:  # its exit may be noticed before its last message
            self._read()
        self._shut()

    def _shut(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._drop_outbox()
        self._unframer.close()

    def _drop_outbox(self) -> None:
        for _data, fd in self._outbox:
            close_fd(fd)
        self._outbox.clear()

    def _read(self) -> None:
        while self._is_open:
            # Read on until nothing is left: a listener may close this pipe, which ends it.
            try:
                messages = receive(self._sock, self._unframer)
            except BlockingIOError:
                return
            except OSError:
                # A reset connection is treated like a closed one.
                messages = None
            if messages is None:
                self._shut()
                return
            try:
                for message, fd in messages:
                    self.on_message(message, fd)
            except ProtocolError as error:  # what follows cannot be understood either
                self._give_up(str(error))

    def _give_up(self, problem: str) -> None:
        """Report the child's failure, and hang up on it: without its agent it ends."""
        self._shut()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        name = ProtocolError.__name__
        failure = Failure("", "exception", f"{name}: {problem}", time.time(), exception_type=name)
        self.on_message(Raised(failure, time.monotonic()), -1)

    def _flush(self) -> None:
        while self._outbox:
            data, fd = self._outbox[0]
            try:
                sent = _send_some(self._sock, data, fd)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError:
                self._drop_outbox()  # the child has ended; its last words are still to be read
                break
            close_fd(fd)
            # The descriptor has left with the first byte, so the rest goes without one.
            if sent < len(data):
                self._outbox[0] = (data[sent:], -1)
            else:
                self._outbox.popleft()
        self._loop.remove_writer(self._sock)
