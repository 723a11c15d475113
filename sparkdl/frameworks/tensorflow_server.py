"""A TensorFlow server in a ps or a worker, and the worker's feeds as the chief's graphs read them.

Runs in: child

    agent ──segments──▶ FeedReader ──▶ EpochBatches ──▶ Stream (a thread, AHEAD batches)
                                                          ▲ PyFunc, token sparkdl.feed
    chief ──graph of a dataset──▶ tf.distribute.Server ───┘

A dataset function that the chief has traced runs as a graph in this process. Its `PyFunc` looks up
the function to call by a token in this process's registry. The function registered here under the
chief's token returns this worker's rows. Rows never pass through the chief.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, MutableMapping
from importlib import import_module
from typing import Any, NoReturn

import msgspec
import numpy as np

from sparkdl.control.channel import EndMark
from sparkdl.core.errors import FrameworkMissingError
from sparkdl.datasets.tensorflow import specs_of
from sparkdl.feed.reader.batches import EpochBatches, Tail
from sparkdl.frameworks.framework import OpenFeed
from sparkdl.values.columns import Columns
from sparkdl.values.tensors import as_numbers, no_tensor

TOKEN = "sparkdl.feed"
"""Names the function in the registry of `PyFunc`."""

ROWS, NO_ROW, OVER = 0, 1, 2
"""The kinds of batches: rows; no row yet, so another worker takes the step; no more rows."""

AHEAD = 2
"""Batches that are made while TensorFlow uses others."""

PATIENCE_S = 1.0
"""How long a step waits for rows before another worker gets it."""

# The remaining rows are at other workers then, so a step is passed on soon.
PATIENCE_AT_END_S = 0.05
FLUSHED = 8
"""Answers without rows after which no batch is on its way between a dataset and its step."""

_DESCRIBE_S = 0.1
_FAIL_S = 5.0


class Wanted(msgspec.Struct, frozen=True):
    """A dataset's request for a feed's stream on every worker; the newest replaces the others."""

    number: int
    feed: str
    batch_size: int
    columns: tuple[str, ...] | None
    tail: Tail
    shuffle: bool | int
    seed: int
    pad: dict[str, int | None] = {}


class Column(msgspec.Struct, frozen=True):
    """A column of a batch as a tensor; `shape` includes the rows."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class Described(msgspec.Struct, frozen=True):
    """The columns of a stream, `None` before the first row."""

    columns: tuple[Column, ...] | None
    has_ended: bool


class Stream:
    """The batches of a feed, epoch after epoch, read ahead by a thread.

    Args:
        on_problem: called with the error that stopped the thread; must end this process.
    """

    def __init__(self, batches: EpochBatches, on_problem: Callable[[BaseException], None]) -> None:
        self._batches = batches
        self._on_problem = on_problem
        self._changed = threading.Condition()
        self._ahead: deque[Columns] = deque()
        self._first: Columns | None = None
        self._is_closed = False
        self._has_ended = False
        self._is_over = False
        self._misses = 0
        self._turn = 0
        """Counts terminations: batches of an earlier turn are dropped."""
        name = f"sparkdl-stream-{batches.reader.feed}"
        threading.Thread(target=self._read, name=name, daemon=True).start()

    @property
    def feed(self) -> str:
        """The name of the feed."""
        return self._batches.reader.feed

    def next(self) -> Columns | int:
        """Return the next batch; `NO_ROW` if none comes soon, `OVER` if none comes ever."""
        with self._changed:
            patience_s = PATIENCE_AT_END_S if self._has_ended else PATIENCE_S
            self._changed.wait_for(lambda: self._ahead or self._is_over, patience_s)
            if self._ahead:
                self._misses = 0
                self._changed.notify_all()
                return self._ahead.popleft()
            self._misses += 1
            return OVER if self._is_over else NO_ROW

    def describe(self) -> Described:
        """Return what the batches consist of, after a moment even if there is none yet."""
        with self._changed:
            self._changed.wait_for(lambda: self._first or self._has_ended, _DESCRIBE_S)
            first, has_ended = self._first, self._has_ended
        if first is None:
            return Described(None, has_ended)
        specs = specs_of(self._batches, first)
        for name in (name for name, spec in specs.items() if hasattr(spec, "ragged_rank")):
            raise no_tensor(name, first[name], "a dataset of parameter servers")
        columns = (
            Column(name, spec.dtype.name, tuple(spec.shape.as_list()))
            for name, spec in specs.items()
        )
        return Described(tuple(columns), has_ended)

    def is_drained(self) -> bool:
        """Whether the feed has ended, and every batch has been used."""
        with self._changed:
            return self._has_ended and not self._ahead and self._misses >= FLUSHED

    def finish(self) -> None:
        """Answer all further requests for a batch with `OVER`."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def terminate(self) -> None:
        """Take no more rows: the call that feeds this node returns."""
        with self._changed:
            self._turn += 1
            self._ahead.clear()
            self._changed.notify_all()
        self._batches.reader.terminate()

    def close(self) -> None:
        """Leave the feed to another stream; datasets over this one end."""
        with self._changed:
            self._is_closed = self._is_over = True
            self._ahead.clear()
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            while self._has_more():
                turn = self._turn
                for columns in self._batches:
                    numbers = {name: as_numbers(name, each) for name, each in columns.items()}
                    self._put(numbers, turn)
        except BaseException as error:  # noqa: BLE001 (fails the node from its main thread)
            self._on_problem(error)
            return
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _has_more(self) -> bool:
        """Wait for what begins the next epoch; false at the feed's end, and when closed."""
        reader = self._batches.reader
        # Only a look: the iteration that follows claims the feed again, and gets this segment back.
        has_ended = self._is_closed or isinstance(reader.take(reader.claim()), EndMark)
        return not (has_ended or self._is_closed)

    def _put(self, columns: Columns, turn: int) -> None:
        with self._changed:
            self._first = self._first or columns
            self._changed.wait_for(lambda: self._is_closed or len(self._ahead) < AHEAD)
            # The batch was made before `terminate`, and its rows are dropped with the others.
            if not self._is_closed and turn == self._turn:
                self._ahead.append(columns)
            self._changed.notify_all()


class Streams:
    """All streams of this worker, as the chief asks for them."""

    def __init__(self, open_feed: OpenFeed, on_problem: Callable[[BaseException], None]) -> None:
        self._open_feed = open_feed
        self._on_problem = on_problem
        self._streams: dict[bytes, Stream] = {}
        self._lock = threading.Lock()

    def answer(self, verb: bytes, wanted: bytes, columns: bytes) -> list[Any]:
        """Answer an operation `PyFunc` of the chief.

        Args:
            verb: `next`, or the name of another method of `Stream`.
            wanted: `Wanted` in JSON.
            columns: for `next`, the columns in their order, a list of `Column` in JSON.

        Returns:
            For `next` what kind of answer it is, int64, and the columns, arrays `[rows, …]`.
            Otherwise what the method returned, in JSON.
        """
        try:
            stream = self._stream(bytes(wanted))
            if verb == b"next":
                return _in_order(stream.next(), msgspec.json.decode(columns, type=list[Column]))
            found = getattr(stream, verb.decode())()
            return [msgspec.json.encode(found)]
        except Exception as error:
            self._on_problem(error)
            threading.Event().wait(_FAIL_S)  # so that what the chief makes of it comes later
            raise

    def _stream(self, wanted: bytes) -> Stream:
        # TensorFlow runs these operations in several threads.
        with self._lock:
            stream = self._streams.get(wanted)
            if stream is None:
                want = msgspec.json.decode(wanted, type=Wanted)
                for other in self._streams.values():
                    if other.feed == want.feed:
                        other.close()
                batches = self._open_feed(
                    want.batch_size,
                    want.columns,
                    want.feed,
                    even=False,
                    tail=want.tail,
                    shuffle=want.shuffle,
                    seed=want.seed,
                    pad=want.pad,
                )
                stream = self._streams[wanted] = Stream(batches, self._on_problem)
            return stream


def serve(open_feed: OpenFeed) -> NoReturn:
    """Run the server that `TF_CONFIG` says, until this process is ended.

    Raises:
        FrameworkMissingError: if the installed TensorFlow cannot be served rows.
        Exception: whatever keeps a feed from being read.
    """
    import tensorflow as tf

    problems: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    answer = Streams(open_feed, problems.put).answer
    _register(answer)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    server = tf.distribute.Server(
        resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
    )
    problem = problems.get()  # ends with this process, unless a feed breaks
    del server
    raise problem


def _register(answer: Callable[..., list[Any]]) -> None:
    """Let operations `PyFunc` of the token `TOKEN` call `answer`, which the caller keeps alive."""
    import tensorflow as tf

    registry = getattr(import_module("tensorflow.python.ops.script_ops"), "_py_funcs", None)
    functions = getattr(registry, "_funcs", None)
    if not isinstance(functions, MutableMapping):
        raise FrameworkMissingError(
            f"TensorFlow {tf.__version__} keeps its Python functions in a way that sparkdl does "
            "not know, so it cannot feed workers of parameter servers; install TensorFlow 2.21"
        )
    # TensorFlow makes tokens of its own with a prefix, so this one is never taken.
    functions[TOKEN] = answer


def _in_order(answer: Columns | int, columns: list[Column]) -> list[Any]:
    if isinstance(answer, int):
        return [np.int64(answer), *map(_filler, columns)]
    return [np.int64(ROWS), *(answer[column.name] for column in columns)]


def _filler(column: Column) -> np.ndarray:
    """Return what takes the place of a column that is not there; it is never used."""
    shape = [size or 0 for size in column.shape]
    if column.dtype == "string":
        return np.full(shape, b"", object)
    import tensorflow as tf

    return np.zeros(shape, tf.as_dtype(column.dtype).as_numpy_dtype)
