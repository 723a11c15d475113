"""A task's connection to the scorer of its executor, which the first task starts.

Runs in: feeder
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

import msgspec
import pyarrow as pa

from sparkdl.control.descriptors import close_fd, nameless_file, peer_of
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import InferenceError, ScorerLostError
from sparkdl.core.paths import python_path
from sparkdl.core.settings import EXECUTORS_GPUS
from sparkdl.feed.store.session import Session
from sparkdl.ml.estimators.source import ModelSource
from sparkdl.ml.scoring import protocol
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.predictor import RowsFailedError
from sparkdl.ml.scoring.share import task_share
from sparkdl.node.resources import executor_jvm_pid, oom_kills
from sparkdl.values.ndarrays import Array

_MAX_PIECES = 2
"""A task's unanswered pieces: one being scored, one waiting. It bounds the memory."""
_START_S = 120.0
"""Until a scorer can be connected to, which is before it loads its model."""
_WELCOME_S = 60.0
_END_S = 5.0
_TAIL_NBYTES = 4000
_TIMEVAL = struct.Struct("@ll")
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
_NOBODY = (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)


class ScorerClient:
    """A task's connection; `connect` makes one, `close` it in any case.

    Args:
        sock: connected.
        log: descriptor of the scorer's error stream, which the client owns.

    Attributes:
        is_waited_for: the task has its core to itself while the scorer computes.
        is_slow: a batch may take long, so no more rows are sent at once.
    """

    is_waited_for = True

    def __init__(self, sock: socket.socket, log: int, is_slow: bool) -> None:
        self._sock = sock
        self._log = log
        self._oom_kills = oom_kills()
        self.pid = peer_of(sock).pid
        self.is_slow = is_slow
        self._pieces = Session()

    @classmethod
    def connect(
        cls,
        source: ModelSource,
        device: str,
        cores: int | None,
        batch_size: int,
        outputs: Sequence[OutputColumn],
        executor: int | None = None,
    ) -> ScorerClient:
        """Return a connection to the scorer of a model, having started it if there is none.

        Args:
            device: an entry for CUDA_VISIBLE_DEVICES; empty for the CPU.
            cores: that the model may use; None for all there are.
            executor: the process whose tasks share the model; None for this executor's JVM.

        Raises:
            InferenceError: if it cannot be started.
        """
        parent = os.getppid()
        executor = executor or executor_jvm_pid() or parent
        name = protocol.name_of(executor, device, source)
        start = protocol.Start(
            name,
            source,
            tuple({executor, parent}),
            cores or len(os.sched_getaffinity(0)),
            bool(device),
        )
        join = protocol.Join(batch_size, tuple(outputs))
        deadline = Deadline.after(_START_S)
        # Repeated: a scorer that was found or started may end before this task has joined.
        while not deadline.has_passed:
            if (found := cls._joined(name, join, source.format == "function")) is not None:
                return found
            _start(start, device, deadline)
        raise InferenceError(f"no scorer can be connected to within {_START_S:g} s")

    @classmethod
    def _joined(cls, name: str, join: protocol.Join, is_slow: bool) -> ScorerClient | None:
        """Connect; None if there is no such scorer, or it is about to end."""
        sock = protocol.new_socket()
        try:
            wait = _TIMEVAL.pack(int(_WELCOME_S), 0)
            # `settimeout` would make the socket non-blocking, and connect then fails at once when
            # the backlog is full (unix(7)).
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
            sock.connect(f"\0{name}")
            if (user := peer_of(sock).uid) != os.geteuid():
                raise InferenceError(f"the scorer's name is taken by a process of user {user}")
            protocol.send(sock, join)
            message, log = protocol.receive(sock)
        except _NOBODY:
            sock.close()
            return None
        except OSError as error:
            sock.close()
            raise InferenceError(f"a scorer does not answer: {error}") from error
        except BaseException:
            sock.close()
            raise
        if not isinstance(message, protocol.Welcome):
            close_fd(log)
            sock.close()
            return None
        # Without a limit from here on: an answer takes as long as the model does.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, 0))
        return cls(sock, log, is_slow)

    @property
    def is_full(self) -> bool:
        """Whether no more pieces may be sent before an answer has come."""
        return not self._pieces.may_send(_MAX_PIECES)

    def send(self, values: Mapping[str, Array], given: Mapping[str, pa.Array]) -> None:
        """Send a piece, see `protocol.write_inputs`.

        Raises:
            InferenceError, ScorerLostError: as `receive`.
        """
        fd = protocol.write_inputs(values, given)
        try:
            self._say(protocol.Rows(), fd)
        finally:
            os.close(fd)
        self._pieces.send(1)

    def receive(self) -> list[pa.Array]:
        """Wait for the answer to the oldest piece that is not answered.

        Raises:
            RowsFailedError: if the model fails.
            InferenceError: if it cannot be loaded.
            ScorerLostError: if the scorer ends.
        """
        try:
            message, fd = protocol.receive(self._sock)
        except OSError:
            message, fd = None, -1
        if isinstance(message, protocol.Answer) and fd >= 0:
            self._pieces.answer(1)
            return protocol.read_answer(fd)
        close_fd(fd)
        if isinstance(message, protocol.Failed):
            if message.number < 0:
                raise InferenceError(message.text)
            raise RowsFailedError(message.text, message.number, message.start, message.stop)
        raise ScorerLostError(self._ending())

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
        close_fd(self._log)
        self._log = -1

    def _say(self, message: protocol.Message, fd: int = -1) -> None:
        try:
            protocol.send(self._sock, message, fd)
        except OSError:
            while True:  # receive() raises the scorer's error, or its loss
                self.receive()

    def _ending(self) -> str:
        text = (
            f"the scorer, process {self.pid} on host {socket.gethostname()}, which runs the model "
            "for several task slots, ended with rows unanswered"
        )
        if killed := oom_kills() - self._oom_kills:
            text += f". Meanwhile the kernel has killed {killed} processes here for want of memory"
        tail = _tail(self._log)
        lines = "".join(f"\n  | {line}" for line in tail.splitlines())
        return f"{text}. {'Its last lines:' + lines if tail else 'It left no word'}"


def _start(start: protocol.Start, device: str, deadline: Deadline) -> None:
    """Start a scorer, and wait until it can be connected to, or another has been first.

    Raises:
        InferenceError: if it ends before, or takes too long.
    """
    with (
        os.fdopen(nameless_file("sparkdl-scorer-log"), "rb") as log,
        os.fdopen(nameless_file("sparkdl-scorer"), "wb+") as given,
    ):
        fcntl.fcntl(log, fcntl.F_SETFL, os.O_APPEND)  # it is emptied when it is long
        given.write(msgspec.msgpack.encode(start))
        given.seek(0)
        ready, is_ready = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "sparkdl.ml.scoring.scorer", str(is_ready)],
                stdin=given,
                stdout=sys.stderr.fileno(),
                stderr=log,
                pass_fds=[is_ready],
                env=_environment(device),
                # Out of the process group in which Spark's daemon ends its workers by SIGHUP.
                start_new_session=True,
            )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(is_ready)
        # The scorer may outlive this process. Until then only its parent, this one, can reap it.
        reaper = threading.Thread(target=process.wait, name="sparkdl-scorer-wait", daemon=True)
        reaper.start()
        try:
            has_ended = bool(select.select([ready], [], [], deadline.remaining_s)[0])
            is_there = has_ended and bool(os.read(ready, 1))
        finally:
            os.close(ready)
        if is_there:
            return
        if not has_ended:
            process.kill()
        reaper.join(_END_S)
        reason = f"status {process.returncode}" if has_ended else "it took too long"
        raise InferenceError(f"a scorer could not be started, {reason}: {_tail(log.fileno())}")


def _environment(device: str) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": python_path()}
    share = task_share()
    for name in _THREADS:
        if share is not None and found.get(name) == str(share.cores):
            del found[name]  # Spark's, or this worker's: a task's share, not an executor's
    if device:
        found.pop(EXECUTORS_GPUS, None)
        found |= {"CUDA_VISIBLE_DEVICES": device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return found


def _tail(log: int) -> str:
    """Return the end of a scorer's error stream."""
    if log < 0:
        return ""
    start = max(0, os.fstat(log).st_size - _TAIL_NBYTES)
    return os.pread(log, _TAIL_NBYTES, start).decode(errors="replace").strip()
