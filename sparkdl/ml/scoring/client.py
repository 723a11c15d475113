"""A task's calls of the scorer of its executor, which the first task starts.

They go by Arrow Flight over a Unix socket. `DoExchange` without a command lasts as long as a task:
a scorer with such a call is in use. Each piece of a task's rows is a `DoExchange` of its own, with
a `Piece` as the command: a batch in, and a batch or a `Failed` back. The action `leave` asks a
scorer to end for another.

A scorer holds its name as that of an abstract socket: the kernel gives the name to one process, and
takes it back when that ends, however it ends (unix(7)). The socket of Flight is a file that only
its user may connect to.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.control.descriptors import nameless_file
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import InferenceError, ScorerLostError
from sparkdl.core.files import python_path
from sparkdl.core.settings import EXECUTORS_GPUS
from sparkdl.ml.scoring.columns import OutputColumn, type_decoded, type_encoded
from sparkdl.ml.scoring.predictor import RowsFailedError
from sparkdl.ml.scoring.share import task_share
from sparkdl.ml.scoring.source import ModelSource
from sparkdl.node.gpus import claim_name
from sparkdl.node.resources import executor_jvm_pid, oom_kills
from sparkdl.values.columns import as_csr, convert, is_csr
from sparkdl.values.ndarrays import Array, nest

_PREFIX = "sparkdl-scorer-"
# Not TMPDIR, which may be too long for a socket's path: on YARN it is.
_FOLDER = Path("/tmp")
_START_S = 120.0
"""Until a scorer can be connected to, which is before it loads its model."""
_WELCOME_S = 60.0
_END_S = 5.0
_TAIL_NBYTES = 4000
# Else the next connection to this path, which may be to another scorer, would wait after an error.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
_LOST = (pa.ArrowException, OSError, StopIteration)


class Start(msgspec.Struct, frozen=True):
    """The configuration of a scorer, which ends with its owners, processes."""

    name: str
    source: ModelSource
    owners: tuple[int, ...]
    cores: int
    is_on_gpu: bool


class Welcome(msgspec.Struct, frozen=True):
    pid: int
    task: int


class Piece(msgspec.Struct, frozen=True):
    """What to do with a batch; `task` is that of its `Welcome`, `size` the rows of a full batch."""

    task: int
    outputs: tuple[OutputColumn, ...]
    size: int = 0


class Failed(msgspec.Struct, frozen=True):
    """The model failed; `is_loaded`: on this batch alone."""

    text: str
    is_loaded: bool
    is_async: bool = False


encode_piece = msgspec.msgpack.Encoder(enc_hook=type_encoded).encode
decode_piece = msgspec.msgpack.Decoder(Piece, dec_hook=type_decoded).decode


def name_of(executor: int, device: str, source: ModelSource) -> str:
    # With its start time, because the number of a process is used again.
    where = _digest(os.geteuid(), executor, psutil.Process(executor).create_time(), device)
    model = _digest(*(getattr(source, each.name) for each in fields(source) if each.compare))
    return f"{_PREFIX}{where}-{model}"


def path_of(name: str) -> Path:
    return _FOLDER / name


def uri_of(name: str) -> str:
    return f"grpc+unix://{path_of(name)}"


def siblings(name: str) -> Iterator[str]:
    """Yield the names of other scorers of the same executor and device that run.

    Delete the sockets of all scorers of this user that were killed.
    """
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if path.name == name or path.lstat().st_uid != os.geteuid():
                continue
            if (free := claim_name(path.name)) is not None:
                with free:
                    path.unlink()
            elif path.name.startswith(name.rpartition("-")[0] + "-"):
                yield path.name


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


_SPARSE = b"sparse"
"""In the metadata of a column of vectors that stay sparse."""


def inputs_batch(values: Mapping[str, Array], given: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Return a piece as it travels: columns that are no plain arrays of numbers as they came."""
    columns, fields = [], []
    for name, array in values.items():
        is_plain = array.dtype.kind in "biuf" and array.dtype.isnative and 0 not in array.shape
        columns.append(nest(array) if is_plain and not is_csr(array) else given[name])
        mark = {_SPARSE: b"1"} if is_csr(array) else None
        fields.append(pa.field(name, columns[-1].type, metadata=mark))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def inputs_of(batch: pa.RecordBatch) -> dict[str, Array]:
    found = {}
    for field, column in zip(batch.schema, batch.columns, strict=True):
        make = as_csr if _SPARSE in (field.metadata or {}) else convert
        found[field.name] = make(column, where=f"column {field.name!r}")
    return found


class ScorerClient:
    """A task's calls; `connect` makes one, `close` it in any case."""

    def __init__(self, name: str, outputs: Sequence[OutputColumn]) -> None:
        if (user := path_of(name).lstat().st_uid) != os.geteuid():
            raise InferenceError(f"the scorer's name is taken by a process of user {user}")
        self._outputs = tuple(outputs)
        self._oom_kills = oom_kills()
        self._pieces: deque[tuple[Any, Any]] = deque()
        self.is_async = False
        """Whether the scorer runs an `async` function; unknown before the first answer."""
        with ExitStack() as stack:
            client = flight.FlightClient(uri_of(name), generic_options=_OPTIONS)
            self._client = stack.enter_context(client)
            # A call that lasts as long as the task: until then the scorer does not end.
            call = self._client.do_exchange(flight.FlightDescriptor.for_command(b""))
            stack.callback(_cancel, *call)
            too_late = threading.Timer(_WELCOME_S, call[1].cancel)
            too_late.start()
            try:
                first = call[1].read_chunk()
            finally:
                too_late.cancel()
            welcome = msgspec.msgpack.decode(first.app_metadata, type=Welcome)
            self.pid = welcome.pid
            self._task = welcome.task
            # The scorer's error stream, which is read after a crash.
            self._log = stack.enter_context(Path(f"/proc/{self.pid}/fd/2").open("rb"))
            self._open = stack.pop_all()

    @classmethod
    def connect(
        cls,
        source: ModelSource,
        device: str,
        cores: int | None,
        outputs: Sequence[OutputColumn],
        executor: int | None = None,
    ) -> ScorerClient:
        """Return a connection to the scorer of a model, having started it if there is none.

        Args:
            device: an entry for CUDA_VISIBLE_DEVICES; empty for the CPU.
            cores: that the model may use; None for all there are.
            executor: the process whose tasks share the model; None for this executor's JVM.
        """
        parent = os.getppid()
        executor = executor or executor_jvm_pid() or parent
        name = name_of(executor, device, source)
        cores = cores or len(os.sched_getaffinity(0))
        start = Start(name, source, tuple({executor, parent}), cores, bool(device))
        deadline = Deadline.after(_START_S)
        # Repeated: a scorer that was found or started may end before this task has joined.
        while not deadline.has_passed:
            with suppress(*_LOST):
                return cls(name, outputs)
            _start(start, device, deadline)
        raise InferenceError(f"no scorer can be connected to within {_START_S:g} s")

    def send(
        self, values: Mapping[str, Array], given: Mapping[str, pa.Array], size: int = 0
    ) -> Any:
        """Send a piece, see `inputs_batch`; return it for `receive`."""
        batch = inputs_batch(values, given)
        piece = Piece(self._task, self._outputs, size)
        command = flight.FlightDescriptor.for_command(encode_piece(piece))
        try:
            self._pieces.append(self._client.do_exchange(command))
            writer, _ = self._pieces[-1]
            writer.begin(batch.schema)
            # The scorer reads it at once, also while the model is busy.
            writer.write_batch(batch)
            writer.done_writing()
            return self._pieces[-1]
        except _LOST:
            raise ScorerLostError(self._ending()) from None

    def receive(self, piece: Any = None) -> list[pa.Array]:
        """Wait for a piece's answer (the oldest piece's), as long as the model takes."""
        writer, reader = piece = piece or self._pieces[0]
        try:
            answer = reader.read_chunk()
        except _LOST:
            raise ScorerLostError(self._ending()) from None
        self._pieces.remove(piece)
        _cancel(writer, reader)
        if answer.data is not None:
            self.is_async = answer.app_metadata is not None
            return list(answer.data.columns)
        failed = msgspec.msgpack.decode(answer.app_metadata, type=Failed)
        self.is_async = failed.is_async
        raise (RowsFailedError if failed.is_loaded else InferenceError)(failed.text)

    def close(self) -> None:
        while self._pieces:
            _cancel(*self._pieces.popleft())
        self._open.close()

    def _ending(self) -> str:
        text = (
            f"the scorer, process {self.pid} on host {socket.gethostname()}, which runs the model "
            "for several task slots, ended with rows unanswered"
        )
        if killed := oom_kills() - self._oom_kills:
            text += f". The kernel has killed {killed} processes here meanwhile for lack of memory"
        tail = _tail(self._log.fileno())
        lines = "".join(f"\n  | {line}" for line in tail.splitlines())
        return f"{text}. {'Its last lines:' + lines if tail else 'No output was captured'}"


def _cancel(writer: Any, reader: Any) -> None:
    """End a call. Arrow prints errors about a writer that is not closed."""
    reader.cancel()
    with suppress(pa.ArrowException, OSError):
        writer.close()


def _start(start: Start, device: str, deadline: Deadline) -> None:
    """Start a scorer, and wait until it can be connected to, or another has been first."""
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
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        if share is not None and found.get(name) == str(share.cores):
            del found[name]  # Spark's, or this worker's: a task's share, not an executor's
    if device:
        found.pop(EXECUTORS_GPUS, None)
        found |= {"CUDA_VISIBLE_DEVICES": device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return found


def _tail(log: int) -> str:
    start = max(0, os.fstat(log).st_size - _TAIL_NBYTES)
    return os.pread(log, _TAIL_NBYTES, start).decode(errors="replace").strip()
