"""The process that runs one model for several task slots of an executor: a scorer.

Runs in: feeder

`python -m sparkdl.ml.scoring.scorer` is started by the first task that needs it. The main thread
loads the model and calls it; a thread for each task reads its pieces meanwhile. A scorer ends with
its executor, after some time without a task, or when its model fails again and again. While it has
no task, it also ends as soon as another scorer wants its memory. It leaves nothing behind.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import psutil
import pyarrow as pa

from sparkdl.control.descriptors import close_fd, peer_of
from sparkdl.core.errors import ProtocolError, in_words
from sparkdl.core.imports import quick_imports
from sparkdl.ml.scoring import protocol
from sparkdl.ml.scoring.held import load, outputs_of
from sparkdl.ml.scoring.predictor import Predictor, RowsFailedError
from sparkdl.ml.scoring.share import Share
from sparkdl.values.ndarrays import Array

_IDLE_S = 300.0
"""For which a scorer without tasks keeps its model for the next."""
_TICK_S = 1.0
_END_S = 5.0
_MAX_FAILED = 2
"""Tasks that fail one after another, with none answered between: then another scorer tries."""
_MAX_LOG_NBYTES = 1 << 20
_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True)
class _Task:
    """A task that is connected."""

    sock: socket.socket
    wants: protocol.Join


@dataclass(frozen=True)
class _Piece:
    """Rows of one task.

    Attributes:
        number: counts the task's pieces.
        values: the model's inputs, by name.
    """

    task: int
    number: int
    values: Mapping[str, Array]


class Scorer:
    """One model, and the tasks that want it.

    Args:
        listener: bound and listening.
    """

    def __init__(self, start: protocol.Start, listener: socket.socket) -> None:
        self._start = start
        self._listener = listener
        self._changed = threading.Condition()
        self._pieces: deque[_Piece] = deque()
        self._tasks: dict[int, _Task] = {}
        self._count = 0
        self._failed: set[int] = set()
        self._is_closed = False
        """It takes no more tasks, and ends with the last one."""
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Score until no task or owner needs the scorer any more."""
        for target in (self._accept, self._watch):
            threading.Thread(target=target, name=f"sparkdl{target.__name__}", daemon=True).start()
        try:
            # Before loading, because two models may not fit into the memory of one GPU.
            self._make_room()
            try:
                share = Share(self._start.cores, ("0",) if self._start.is_on_gpu else None)
                with quick_imports():
                    model = load(self._start.source, share)
                gc.freeze()  # or the end would take seconds: it looks for garbage several times
            except (Exception, SystemExit) as error:  # noqa: BLE001 (each task raises it)
                self._fail_all(f"it cannot be loaded: {in_words(error)}")
                return
            while piece := self._next():
                self._score(model, piece)
        finally:
            self._close()
            self._has_ended.set()

    # tasks

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                with self._changed:
                    # Want of descriptors passes, and tasks wait in the backlog meanwhile.
                    if self._is_closed or error.errno not in (errno.EMFILE, errno.ENFILE):
                        return
                    self._changed.wait(_TICK_S)
                continue
            threading.Thread(
                target=self._serve, args=(sock,), name="sparkdl-task", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        number = pieces = 0
        try:
            if peer_of(sock).uid != os.geteuid():
                return
            while True:
                message, fd = protocol.receive(sock)
                if message is None:
                    return
                if isinstance(message, protocol.Rows):
                    self._add(_Piece(number, pieces, protocol.read_inputs(fd)))
                    pieces += 1
                    continue
                close_fd(fd)
                if isinstance(message, protocol.Join) and not number:
                    number = self._join(sock, message)
                elif isinstance(message, protocol.Leave):
                    self._leave()
                    return
        except (OSError, ProtocolError, pa.ArrowException) as error:
            if not isinstance(error, ConnectionError):
                sys.stderr.write(f"a task is hung up on: {in_words(error)}\n")
        finally:
            with self._changed:
                self._forget(number)
                sock.close()

    def _join(self, sock: socket.socket, message: protocol.Join) -> int:
        with self._changed:
            if self._is_closed:
                raise ConnectionAbortedError  # it starts another scorer
            self._count += 1
            self._tasks[self._count] = _Task(sock, message)
            # With the file of the error stream, which the task reads by itself after a crash.
            protocol.send(sock, protocol.Welcome(), _STDERR)
            return self._count

    def _add(self, piece: _Piece) -> None:
        with self._changed:
            if piece.task not in self._tasks:
                raise ProtocolError("rows of a task that is not there")
            self._pieces.append(piece)
            self._changed.notify_all()

    def _leave(self) -> None:
        """End for the sake of another scorer, unless there are tasks.

        The other scorer waits until its connection closes: that is the end of this process.
        """
        with self._changed:
            if self._tasks:
                return
            self._close()
        threading.Event().wait(_END_S)

    def _forget(self, number: int) -> None:
        self._tasks.pop(number, None)
        self._pieces = deque(piece for piece in self._pieces if piece.task != number)
        self._changed.notify_all()

    def _say(self, number: int, message: protocol.Message, fd: int = -1) -> None:
        """Send a message to a task if it is still connected."""
        with self._changed:
            if (task := self._tasks.get(number)) is not None:
                try:
                    protocol.send(task.sock, message, fd)
                except OSError:
                    with suppress(OSError):  # its thread notices
                        task.sock.shutdown(socket.SHUT_RDWR)

    # the model

    def _next(self) -> _Piece | None:
        """Wait for a piece, the oldest of all tasks; None if there will be none."""
        with self._changed:
            idle_s = time.monotonic() + _IDLE_S
            while not self._pieces:
                now_s = time.monotonic()
                if not self._tasks and (self._is_closed or now_s >= idle_s):
                    return None
                if self._tasks:
                    idle_s = now_s + _IDLE_S
                self._changed.wait(idle_s - now_s)
            return self._pieces.popleft()

    def _score(self, model: Predictor, piece: _Piece) -> None:
        with self._changed:
            task = self._tasks.get(piece.task)
        # The task has ended, and no other needs this answer.
        if task is None:
            return
        try:
            columns = outputs_of(
                model, piece.values, task.wants.batch_size, task.wants.outputs, piece.number
            )
        except RowsFailedError as error:
            self._fail(piece.task, error)
            return
        # An answer in between shows that the model is well, and that those tasks' rows were not.
        self._failed.clear()
        fd = protocol.write_answer(columns)
        try:
            self._say(piece.task, protocol.Answer(), fd)
        finally:
            os.close(fd)

    def _fail(self, number: int, error: RowsFailedError) -> None:
        with self._changed:
            told = protocol.Failed(str(error), error.number, error.start, error.stop)
            self._say(number, told)
            self._forget(number)
            self._failed.add(number)
            if len(self._failed) >= _MAX_FAILED:  # the model's state may be broken, or the GPU's
                self._close()

    def _fail_all(self, text: str) -> None:
        with self._changed:
            self._close()
            for number in list(self._tasks):
                self._say(number, protocol.Failed(text))

    # the end

    def _close(self) -> None:
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                with suppress(OSError):
                    # Wakes the thread in `accept`, which a `close` alone leaves waiting.
                    self._listener.shutdown(socket.SHUT_RDWR)
                self._listener.close()  # from here on the name is free
            self._changed.notify_all()

    def _make_room(self) -> None:
        """Ask idle scorers of other models to end, and wait until they have."""
        for name in protocol.siblings(self._start.name):
            with protocol.new_socket() as sock, suppress(OSError, ProtocolError):
                sock.settimeout(_END_S)
                sock.connect(f"\0{name}")
                # Any user may take an abstract name.
                if peer_of(sock).uid == os.geteuid():
                    protocol.send(sock, protocol.Leave())
                    protocol.receive(sock)

    def _watch(self) -> None:
        """Copy printed output to the executor's log, and exit when the executor does."""
        owners = []
        for pid in self._start.owners:
            with suppress(psutil.NoSuchProcess):
                owners.append(psutil.Process(pid))
        has_owners = len(owners) == len(self._start.owners)
        passed = 0
        while not self._has_ended.is_set():
            if has_owners:
                has_owners = not psutil.wait_procs(owners, _TICK_S)[0]
            if not has_owners:
                self._close()
                with self._changed:
                    is_free = self._changed.wait_for(lambda: not self._tasks, _TICK_S)
                if is_free and not self._has_ended.wait(_END_S):
                    os.kill(os.getpid(), signal.SIGKILL)  # the model's call does not return
            passed = _pass_on(passed)
        _pass_on(passed)


def _pass_on(start: int) -> int:
    """Copy new standard error output to the executor's log; return the position it ends at.

    It is a file, which tasks read after a crash.
    """
    with suppress(OSError):
        while data := os.pread(_STDERR, _MAX_LOG_NBYTES, start):
            start += len(data)
            os.write(_STDOUT, data)
        if start > _MAX_LOG_NBYTES:
            os.ftruncate(_STDERR, 0)
            return 0
    return start


def main() -> None:
    """Be the scorer of a model, unless there is one; its `Start` is the standard input.

    The argument is the descriptor of a pipe, which gets a byte once tasks can connect.
    """
    start = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=protocol.Start)
    faulthandler.enable(all_threads=False)
    listener = protocol.new_socket()
    is_first = True
    try:
        listener.bind(f"\0{start.name}")
        listener.listen()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # Several tasks may start one at once: the kernel gives the name to the first.
        is_first = False
    with os.fdopen(int(sys.argv[1]), "wb") as ready:
        # Also if another was first, because tasks can connect to that one.
        ready.write(b"1")
    if is_first:
        Scorer(start, listener).run()


if __name__ == "__main__":
    main()
