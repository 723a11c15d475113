"""The chief's end of parameter servers: its strategy, and datasets over the feeds of its workers.

Runs in: child

TensorFlow's `ClusterCoordinator` gives a step to any worker that is free, takes all workers' data
for the same, and cancels all other steps at the first error of one. `_apply_shim` changes:

- a worker without a row for a step fails it with a `CancelledError` with `NO_ROW_MARK`. As in stock
  TensorFlow, the coordinator takes this for a transient error and queues the step again. It then
  waits a moment before it gives this worker a step, so that another one takes this one. It logs no
  error;
- `fit` and `evaluate` of tf_keras fetch the result of the last step they have scheduled. At the end
  of the data this step has no result, and they raised its error instead of ending.

When the feed has ended and all workers have used their rows, the datasets end on all of them
together: the end of one alone would cancel the others' steps.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from sparkdl.core.errors import ConfigError, FeedClosedError, FrameworkMissingError
from sparkdl.core.patch import Function, Patch
from sparkdl.core.world import Member, World
from sparkdl.feed.reader.batches import Names, arrange
from sparkdl.frameworks.tensorflow_server import (
    NO_ROW,
    OVER,
    TOKEN,
    Column,
    Described,
    Wanted,
)

if TYPE_CHECKING:
    import tensorflow as tf

_log = logging.getLogger(__name__)

NO_ROW_MARK = "/job:worker of sparkdl has no row"
"""Part of the error of a step without a row; the coordinator looks for its first word."""

_WATCH_PERIOD_S = 0.5
_JOIN_S = 5.0
_PAUSE_S = 0.05
_COORDINATOR = "tensorflow.python.distribute.coordinator.cluster_coordinator"


def connect(
    world: World, member: Member, variable_partitioner: Any
) -> tuple[tf.distribute.ParameterServerStrategy, FedWorkers]:
    """Connect to the servers that `TF_CONFIG` names, see `NodeContext.parameter_server_strategy`.

    Raises:
        ConfigError: if there are no servers, or this node is not the chief.
        FrameworkMissingError: if the installed TensorFlow's coordinator is not known.
    """
    servers = [other for other in world.members if other.role.is_server]
    if not servers or not member.role.is_chief:
        raise ConfigError(
            f"{member.node.name} has no parameter servers to train on: call this on the "
            "chief of a cluster with Roles(ps=1, chief='chief') or more servers, and without "
            "coordinator=False"
        )
    import tensorflow as tf

    _apply_shim()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner)
    return strategy, FedWorkers([server.index for server in servers if server.role.is_fed])


class FedWorkers:
    """The workers of this chief that are fed rows.

    Args:
        tasks: TensorFlow's indices of the workers.
    """

    def __init__(self, tasks: Sequence[int]) -> None:
        self._tasks = tuple(tasks)
        self._last: dict[str, Wanted] = {}
        self._watched: dict[str, bytes] = {}
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._end_what_is_drained, daemon=True)
        self._lock = threading.Lock()
        atexit.register(self.close)

    def dataset_fn(self, wanted: Wanted, x: Names | None, y: Names | None) -> FedDatasetFn:
        """Return a dataset function over the feed; waits for a first row on any worker.

        Raises:
            FeedClosedError: if the feed ended before a row came.
        """
        last = self._last.get(wanted.feed)
        number = last.number if last else 0
        # The same request means the same stream: validation makes its dataset anew in each epoch.
        if last != msgspec.structs.replace(wanted, number=number):
            number += 1
        wanted = self._last[wanted.feed] = msgspec.structs.replace(wanted, number=number)
        stream = msgspec.json.encode(wanted)
        columns = self._described(stream, wanted.feed)
        with self._lock:
            self._watched[wanted.feed] = stream
            if self._watch.ident is None:
                self._watch.start()
        return FedDatasetFn(stream, columns, partial(arrange, x=x, y=y), self.ask_all)

    def ask(self, task: int, verb: str, stream: bytes) -> bytes:
        """Call a method of a worker's stream; return its result, in JSON."""
        import tensorflow as tf

        # The worker's server runs the operation, and finds the function in its own process.
        with tf.device(f"/job:worker/replica:0/task:{task}/device:CPU:0"):
            (answer,) = tf.raw_ops.PyFunc(
                input=[tf.constant(verb), tf.constant(stream), tf.constant(b"")],
                token=TOKEN,
                Tout=[tf.string],
            )
        return bytes(answer.numpy())

    def ask_all(self, verb: str, stream: bytes) -> list[bytes]:
        """Call a method of every worker's stream, one after another."""
        return [self.ask(task, verb, stream) for task in self._tasks]

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._watch.ident is not None:
            self._watch.join(_JOIN_S)

    def _described(self, stream: bytes, feed: str) -> tuple[Column, ...]:
        waiting = list(self._tasks)
        while waiting:
            # In turn: each waits a moment, and the first worker with rows answers for all.
            for task in tuple(waiting):
                described = msgspec.json.decode(self.ask(task, "describe", stream), type=Described)
                if described.columns is not None:
                    return described.columns
                if described.has_ended:
                    waiting.remove(task)
        raise FeedClosedError(f"feed {feed!r} ended before any row came, so its types are unknown")

    def _end_what_is_drained(self) -> None:
        import tensorflow as tf

        while not self._closed.wait(_WATCH_PERIOD_S):
            with self._lock:
                streams = list(self._watched.items())
            try:
                for feed, stream in streams:
                    if all(answer == b"true" for answer in self.ask_all("is_drained", stream)):
                        self.ask_all("finish", stream)
                        with self._lock:
                            # A newer dataset may have taken the feed's place meanwhile.
                            if self._watched.get(feed) == stream:
                                del self._watched[feed]
            except tf.errors.OpError as error:  # that worker's agent reports its failure
                _log.debug("A worker could not be asked: %s", error)


@dataclass(frozen=True)
class FedDatasetFn:
    """A dataset function for `DatasetCreator` and `create_per_worker_dataset`.

    TensorFlow calls it on the chief; the graph of the dataset runs on each worker, and reads that
    worker's rows.
    """

    _stream: bytes
    _columns: tuple[Column, ...]
    _arrange: Callable[[dict[str, Any]], Any]
    _ask_all: Callable[[str, bytes], list[bytes]] = field(repr=False)

    def __call__(self, context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Return the dataset of a worker."""
        import tensorflow as tf

        _let_fit_end()
        take = tf.autograph.experimental.do_not_convert(self._take)
        # A graph and no generator of Python: a worker that runs it has no objects of the chief.
        dataset = tf.data.Dataset.from_tensors(self._stream).repeat().map(take)
        dataset = dataset.take_while(lambda kind, *_: tf.not_equal(kind, OVER))
        options = tf.data.Options()
        # Steps wait in threads of their own, and nothing but TensorFlow's iterator reads ahead.
        options.threading.private_threadpool_size = 2
        options.experimental_optimization.inject_prefetch = False
        return dataset.map(lambda _kind, batch: batch).with_options(options)

    def terminate(self) -> None:
        """Take no more rows: the `feed` call that is under way returns, the rest is dropped."""
        self._ask_all("terminate", self._stream)

    def _take(self, stream: tf.Tensor) -> tuple[tf.Tensor, Any]:
        import tensorflow as tf

        specs = [tf.TensorSpec(c.shape, tf.as_dtype(c.dtype)) for c in self._columns]
        kind, *values = tf.raw_ops.PyFunc(
            input=[tf.constant(b"next"), stream, tf.constant(msgspec.json.encode(self._columns))],
            token=TOKEN,
            Tout=[tf.int64, *(spec.dtype for spec in specs)],
        )
        # PyFunc loses shapes, which Keras needs to build a model.
        kind.set_shape(())
        with tf.control_dependencies([tf.cond(tf.equal(kind, NO_ROW), _give_back, _go_on)]):
            kind = tf.identity(kind)
        for spec, value in zip(specs, values, strict=True):
            value.set_shape(spec.shape)
        names = [column.name for column in self._columns]
        return kind, self._arrange(dict(zip(names, values, strict=True)))


def _give_back() -> tf.Tensor:
    """Fail with `CancelledError`, as enqueueing into a closed queue does."""
    import tensorflow as tf

    handle = tf.raw_ops.FIFOQueueV2(component_types=[tf.bool], shared_name=NO_ROW_MARK)
    with tf.control_dependencies([tf.raw_ops.QueueCloseV2(handle=handle)]):
        fails = tf.raw_ops.QueueEnqueueV2(handle=handle, components=[True])
    with tf.control_dependencies([fails]):
        return tf.constant(False)


def _go_on() -> tf.Tensor:
    import tensorflow as tf

    return tf.constant(True)


class _Steps:
    """Counts the steps that have been done."""

    done = 0
    done_before = 0

    def finished(self, stock: Function, *args: Any) -> None:
        stock(*args)
        self.done += 1

    def synced(self, stock: Function, logs: Any) -> Any:
        """Return the results of a step; without them what lets `fit` take those of its metrics."""
        import tensorflow as tf

        remote = tf.distribute.experimental.coordinator.RemoteValue
        has_done, self.done_before = self.done > self.done_before, self.done
        try:
            return stock(logs)
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
            spec = getattr(logs, "_type_spec", None)
            if not isinstance(logs, remote) or not isinstance(spec, dict):
                raise
            # No step of the epoch was done: nothing is known, where metrics would say 0.
            return dict.fromkeys(spec, float("nan")) if has_done else {}


def _apply_shim() -> None:
    """Make the imported TensorFlow train on workers that have rows. Again changes nothing.

    Raises:
        FrameworkMissingError: if it is not known.
    """
    import tensorflow as tf

    for patch in _PATCHES:
        if objection := patch.objection():
            raise FrameworkMissingError(
                f"TensorFlow {tf.__version__} cannot feed workers of parameter servers: "
                f"{objection}. Install TensorFlow 2.21, which sparkdl knows"
            )
        patch.apply()
    tf.get_logger().addFilter(_is_worth_logging)


def _let_fit_end() -> None:
    """Patch tf_keras likewise, if it is used. Without it `fit` ends with an `OutOfRangeError`."""
    if "tf_keras" not in sys.modules:
        return
    if objection := _FIT.objection():
        _log.warning("fit will raise OutOfRangeError at the end of the feed: %s", objection)
    else:
        _FIT.apply()


def _put_back(stock: Function, *args: Any) -> None:
    stock(*args)
    threading.Event().wait(_PAUSE_S)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    return NO_ROW_MARK not in record.getMessage()


_STEPS = _Steps()
_PATCHES = (
    Patch(f"{_COORDINATOR}:_CoordinatedClosureQueue.put_back", ("self", "closure"), _put_back),
    Patch(f"{_COORDINATOR}:_CoordinatedClosureQueue.mark_finished", ("self",), _STEPS.finished),
)
_FIT = Patch(
    "tf_keras.src.utils.tf_utils:sync_to_numpy_or_python_type", ("tensors",), _STEPS.synced
)
