"""The process that runs one model for several task slots of an executor: a scorer.

`python -m sparkdl.ml.scoring.scorer` is started by the first task that needs it. The main thread
loads the model and calls it; Flight's threads read the tasks' pieces meanwhile. A scorer ends with
its executor, after some time without a task, or when its model fails again and again. While it has
no task, it also ends as soon as another scorer wants its memory.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.core.errors import in_words
from sparkdl.core.imports import quick_imports
from sparkdl.ml.scoring import client
from sparkdl.ml.scoring.loaded import load
from sparkdl.ml.scoring.predictor import AsyncPredictor, Call, Predictor, answer_of
from sparkdl.ml.scoring.share import Share
from sparkdl.node.gpus import claim_name
from sparkdl.values.columns import is_csr
from sparkdl.values.ndarrays import Array

_IDLE_S = 300.0
"""For which a scorer without tasks keeps its model for the next."""
_TICK_S = 1.0
_END_S = 5.0
_MAX_FAILED = 2
"""Tasks that fail one after another, with none answered between: then another scorer tries."""
_MAX_LOG_NBYTES = 1 << 20
_STDOUT, _STDERR = 1, 2


class _Rows(NamedTuple):
    """Rows of one task, and where the batch that answers them goes, a `Failed`, or None."""

    piece: client.Piece
    values: Mapping[str, Array]
    call: flight.ServerCallContext
    answer: queue.SimpleQueue[Any]


def _count(rows: _Rows) -> int:
    return int(next(iter(rows.values.values())).shape[0])


def _kind(rows: _Rows) -> Any:
    """Return what rows have in common that the model can be given together; sparse ones nothing."""
    if any(map(is_csr, rows.values.values())):
        return object()
    return rows.piece.outputs, [(x, v.dtype, v.shape[1:]) for x, v in rows.values.items()]


def _batch(columns: Sequence[pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(columns, list(map(str, range(len(columns)))))


class Scorer(flight.FlightServerBase):  # type: ignore[misc]
    """One model, and the tasks that want it; `claim` holds its name."""

    def __init__(self, start: client.Start, claim: socket.socket) -> None:
        usual = os.umask(0o077)  # no other user may connect
        super().__init__(client.uri_of(start.name))
        os.umask(usual)
        self._start = start
        self._claim = claim
        self._changed = threading.Condition()
        self._rows: queue.SimpleQueue[_Rows | None] = queue.SimpleQueue()
        """None at the end."""
        self._tasks: set[int] = set()
        self._count = 0
        self._failed: set[int] = set()
        self._is_async = False
        self._calls: dict[Call, flight.ServerCallContext] = {}
        """Of an `async` function; `_watch` cancels those of tasks that have ended."""
        self._is_closed = False
        """It takes no more tasks, and ends with the last one."""

    def score(self) -> None:
        threading.Thread(target=self._watch, name="sparkdl-watch", daemon=True).start()
        # Before loading, because two models may not fit into the memory of one GPU.
        self._make_room()
        model: Predictor | client.Failed
        try:
            share = Share(self._start.cores, ("0",) if self._start.is_on_gpu else None)
            with quick_imports():
                model = load(self._start.source, share)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (each task raises it)
            model = client.Failed(f"it cannot be loaded: {in_words(error)}", False)
        self._is_async = isinstance(model, AsyncPredictor)
        left: list[_Rows | None] = []
        while rows := left.pop() if left else self._rows.get():
            if rows.call.is_cancelled():
                rows.answer.put(None)
            elif isinstance(model, AsyncPredictor):
                self._begin(model, rows)
            elif isinstance(model, client.Failed):
                # Only now, as a task knows why: later ones would start another scorer in vain.
                self._close()
                rows.answer.put(model)
            else:
                self._answer_together(model, self._with_others(rows, left))

    def _with_others(self, first: _Rows, left: list[_Rows | None]) -> list[_Rows]:
        """Take further rows that wait and fill the batch; the first that do not go to `left`."""
        found, count = [first], _count(first)
        with suppress(queue.Empty):
            while not left:
                rows = self._rows.get_nowait()
                count += _count(rows) if rows else 0
                if rows and count <= first.piece.size and _kind(rows) == _kind(first):
                    found.append(rows)
                else:
                    left.append(rows)
        return found

    def _answer_together(self, model: Predictor, together: list[_Rows]) -> None:
        names, columns, start = together[0].values, None, 0
        if len(together) > 1:
            with suppress(BaseException):  # alone, those that are well have an answer
                values = {x: np.concatenate([rows.values[x] for rows in together]) for x in names}
                columns = model.columns(values, together[0].piece.outputs)
        for rows in together:
            if columns is None:
                alone = partial(model.columns, rows.values, rows.piece.outputs)
                rows.answer.put(self._answer(alone, rows))
            else:
                part = [column.slice(start, _count(rows)) for column in columns]
                rows.answer.put(_batch(part))
                start += _count(rows)
                self._failed.clear()

    def _begin(self, model: AsyncPredictor, rows: _Rows) -> None:
        def answer(call: Call) -> None:
            del self._calls[call]
            has_gone = rows.call.is_cancelled()
            rows.answer.put(None if has_gone else self._answer(partial(answer_of, call), rows))

        call = model.start(rows.values, rows.piece.outputs)
        self._calls[call] = rows.call
        call.add_done_callback(answer)

    def _answer(self, wait: Callable[[], list[pa.Array]], rows: _Rows) -> Any:
        try:
            found = _batch(wait())
        except BaseException as error:  # noqa: BLE001 (its task waits for an answer)
            self._failed.add(rows.piece.task)
            if len(self._failed) >= _MAX_FAILED:  # the model's state may be broken, or the GPU's
                self._close()
            return client.Failed(str(error), True, self._is_async)
        # An answer in between shows that the model is well, and that those tasks' rows were not.
        self._failed.clear()
        return found

    # calls

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Answer a piece; without a command, let a task join and wait for its end."""
        if not descriptor.command:
            self._join(reader, writer)
            return
        piece = client.decode_piece(descriptor.command)
        values = client.inputs_of(reader.read_chunk().data)
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._rows.put(_Rows(piece, values, context, answer))
        found = answer.get()
        if isinstance(found, client.Failed):
            writer.write_metadata(msgspec.msgpack.encode(found))
        elif found is not None:
            writer.begin(found.schema)
            if self._is_async:
                writer.write_with_metadata(found, b"async")
            else:
                writer.write_batch(found)

    def _join(self, reader: Any, writer: Any) -> None:
        with self._changed:
            if self._is_closed:
                return  # it starts another scorer
            self._count += 1
            task = self._count
            self._tasks.add(task)
        try:
            writer.write_metadata(msgspec.msgpack.encode(client.Welcome(os.getpid(), task)))
            for _ in reader:  # there is none: until the task ends, however it ends
                pass
        finally:
            with self._changed:
                self._tasks.discard(task)
                self._changed.notify_all()

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[Any]:
        """End for the sake of another scorer, unless there are tasks.

        The other scorer waits until its connection closes: that is the end of this process.
        """
        with self._changed:
            if self._tasks:
                return []
            self._close()
        threading.Event().wait(_END_S)
        return []

    # the end

    def _close(self) -> None:
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                client.path_of(self._start.name).unlink(missing_ok=True)
                self._claim.close()  # from here on the name is free
            self._changed.notify_all()

    def _make_room(self) -> None:
        """Ask idle scorers of other models to end, and wait until they have."""
        options = flight.FlightCallOptions(timeout=_END_S)
        for name in client.siblings(self._start.name):
            with (
                suppress(pa.ArrowException, OSError),
                flight.FlightClient(client.uri_of(name)) as other,
            ):
                list(other.do_action("leave", options))

    def _watch(self) -> None:
        """Copy printed output to the executor's log, and see when the scorer is to end."""
        owners = []
        for pid in self._start.owners:
            with suppress(psutil.NoSuchProcess):
                owners.append(psutil.Process(pid))
        has_owners = len(owners) == len(self._start.owners)
        passed = 0
        used_s = time.monotonic()
        while True:
            passed = _pass_on(passed)
            has_owners = has_owners and all(owner.is_running() for owner in owners)
            for call, context in self._calls.copy().items():
                if context.is_cancelled():
                    call.cancel()
            with self._changed:
                if self._tasks:
                    used_s = time.monotonic()
                if not has_owners or time.monotonic() - used_s >= _IDLE_S:
                    self._close()
                if self._is_closed and not self._tasks:
                    break
                self._changed.wait(_TICK_S)
        self._rows.put(None)
        threading.Event().wait(_END_S)
        os.kill(os.getpid(), signal.SIGKILL)  # the model's call does not return


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
    """Run the scorer of a model, unless there is one; its `Start` is the standard input.

    The argument is the descriptor of a pipe, which gets a byte once tasks can connect.
    """
    start = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=client.Start)
    faulthandler.enable(all_threads=False)
    # Several tasks may start one at once: the kernel gives the name to the first.
    claim = claim_name(start.name)
    scorer = None if claim is None else Scorer(start, claim)
    with os.fdopen(int(sys.argv[1]), "wb") as ready:
        # Also if another was first, because tasks can connect to that one.
        ready.write(b"1")
    if scorer is not None:
        try:
            scorer.score()
        except BaseException:  # noqa: BLE001 (the tasks read it in the error stream)
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Flight's own end would wait for calls, and delete the socket of this name's next scorer.
        os._exit(0)  # noqa: TID251


if __name__ == "__main__":
    main()
