"""TensorFlow's own collectives: for nodes without PyTorch, and for TensorFlow on GPUs (NCCL).

Runs in: child

The runtime is TensorFlow's for several workers, as `tf.distribute.MultiWorkerMirroredStrategy`
sets it up: a gRPC server in each process, on a port of its own, and rings between them, or NCCL.
It must be set up before TensorFlow does anything else in the process, and stays until its end.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import numpy as np

from sparkdl.collectives.group import Array, Group, Op, even_splits, shares
from sparkdl.core import trace
from sparkdl.core.errors import CollectiveError, ConfigError, MismatchError, SparkdlError
from sparkdl.core.world import host_port

T = TypeVar("T")
_RUNTIME: list[Any] = []
"""The strategy that keeps the runtime, at most one in a process."""


class Offer:
    """The address by which other members reach this one: where its server will listen."""

    def __init__(self, rank: int, size: int, host: str, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._port = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("", 0))  # bound, not listening: gRPC listens beside it, nobody else can
        self.address = host_port(host, self._port.getsockname()[1])

    def connect(self, addresses: Sequence[str], key: bytes) -> TensorFlowGroup:
        """Return the group of all members, by what each of them offers.

        Raises:
            CollectiveError: if TensorFlow cannot set up its runtime.
        """
        device = _start_runtime(self._rank, list(addresses))
        self.withdraw()
        ranks = range(len(addresses))
        return TensorFlowGroup(self._rank, ranks, key, "world", device, self._timeout_s)

    def withdraw(self) -> None:
        """Let the port go."""
        self._port.close()


class TensorFlowGroup(Group):
    """See `Group`. `exchange` does the same with tensors of TensorFlow, eagerly and in graphs.

    Members that call different things at once wait for each other until the timeout.
    """

    transport = "tensorflow"

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        key: bytes,
        name: str,
        device: str,
        timeout_s: float,
    ) -> None:
        super().__init__(rank, ranks, key, timeout_s)
        self._name, self._device = name, device
        number = 1 << 20 | zlib.crc32(name.encode()) & 0x7FFFFFFF  # strategies count from 1
        self.exchange = Collectives(self, number, device, timeout_s)

    def all_reduce(
        self, arrays: Sequence[Array], op: Op = Op.AVERAGE, name: str | None = None
    ) -> list[Array]:
        """See `Group.all_reduce`."""
        return self._arrays(
            "all_reduce", name, lambda: self.exchange.all_reduce(_tensors(arrays), op)
        )

    def all_gather(self, array: Array, name: str | None = None) -> Array:
        """See `Group.all_gather`."""
        rows = _tensors([np.atleast_1d(array)])
        return self._arrays("all_gather", name, lambda: self.exchange.all_gather(rows))[0]

    def broadcast(self, array: Array, root: int, name: str | None = None) -> Array:
        """See `Group.broadcast`."""
        if root not in range(self.size):
            raise ConfigError(f"root={root}: there are the members 0 to {self.size - 1}")
        return self._arrays(
            "broadcast", name, lambda: self.exchange.broadcast(_tensors([array]), root)
        )[0]

    def all_to_all(
        self, array: Array, splits: Sequence[int] | Array | None = None, name: str | None = None
    ) -> tuple[Array, Array]:
        """See `Group.all_to_all`."""
        rows = np.atleast_1d(array)
        counts = np.array(even_splits(len(rows), self.size, splits), np.int32)
        both = _tensors([rows, counts])
        out, got = self._arrays("all_to_all", name, lambda: list(self.exchange.all_to_all(*both)))
        return out, got

    def reduce_scatter(self, array: Array, op: Op = Op.AVERAGE, name: str | None = None) -> Array:
        """See `Group.reduce_scatter`."""
        rows = _tensors([np.atleast_1d(array)])
        work = partial(self.exchange.reduce_scatter, rows, op)
        return self._arrays("reduce_scatter", name, work)[0]

    def barrier(self) -> None:
        """See `Group.barrier`."""
        self.all_reduce([np.zeros(1, np.float32)], Op.SUM)

    def join(self) -> int:
        """Refuse: members do not announce here what they are about to do.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "join() needs PyTorch on all nodes (pip install torch): TensorFlow's collectives "
            "cannot go on without one of the members. Or give all nodes the same number of steps"
        )

    def _subgroup(self, rank: int, ranks: Sequence[int], number: int) -> Group:
        name = f"{self._name}/{number}"
        return TensorFlowGroup(rank, ranks, self._key, name, self._device, self.timeout_s)

    def _arrays(self, what: str, name: str | None, work: Callable[[], list[Any]]) -> list[Array]:
        import tensorflow as tf

        def in_eager() -> list[Array]:
            with tf.init_scope(), trace.span("collective", what, None, what=name or ""):
                return [tensor.numpy() for tensor in work()]

        return self.run(in_eager)


def _tensors(arrays: Sequence[Array]) -> list[Any]:
    import tensorflow as tf

    if texts := [array.dtype for array in arrays if array.dtype.hasobject]:
        raise ConfigError(f"an array of dtype {texts[0]} has no bytes; use the _object forms")
    with tf.init_scope():
        return [tf.convert_to_tensor(array) for array in arrays]


def _start_runtime(rank: int, addresses: list[str]) -> str:
    """Set up the runtime, and return the device that this process reduces on."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": addresses}),
        task_type="worker",
        task_id=rank,
        rpc_layer="grpc",
    )
    if _RUNTIME:
        raise CollectiveError(
            "TensorFlow's collectives have been set up in this process before, and can be only "
            "once: do not call init() again after shutdown(), or install PyTorch on all nodes"
        )
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    except (RuntimeError, ValueError, tf.errors.OpError) as error:
        raise CollectiveError(
            f"TensorFlow cannot set up its collectives: {error}. Call init() before anything "
            "that makes a tensor, and not beside a MultiWorkerMirroredStrategy"
        ) from error
    _RUNTIME.append(strategy)
    with suppress(AttributeError):
        strategy.extended._stop_check_health_thread()  # the driver watches the nodes
    device: str = strategy.extended.worker_devices[0]
    return device


_MERGE = {Op.SUM: "Add", Op.AVERAGE: "Add", Op.MIN: "Min", Op.MAX: "Max", Op.PRODUCT: "Mul"}
_CARRIED = ("float16", "float32", "float64", "int32", "int64")
_CARRIERS = {  # what TensorFlow's collectives do not carry, and what holds it exactly
    "bool": "int32",
    "int8": "int32",
    "uint8": "int32",
    "int16": "int32",
    "uint16": "int32",
    "uint32": "int64",
    "bfloat16": "float32",
}


class Collectives:
    """What members do with tensors of TensorFlow; all do the same in the same order.

    Each operation has a number, the same on all members: a variable of the group counts them. It
    counts in graphs as well, so that a function may be traced at different times on the members;
    and the operations take the variable, so that TensorFlow keeps them in the order of the program.

    Args:
        group: whose members these are.
        number: of the group, among those of the processes.
        device: that the operations run on.
        timeout_s: of each operation.
    """

    def __init__(self, group: Group, number: int, device: str, timeout_s: float) -> None:
        self.group = group
        self._number = number
        self._device = device
        self._timeout_s = timeout_s
        self._hint = "nccl" if "GPU" in device else "ring"

    def all_reduce(self, tensors: Sequence[Any], op: Op, name: str | None = None) -> list[Any]:
        """Return the tensors reduced over all members; those of one dtype travel as one."""
        import tensorflow as tf

        results: list[Any] = [None] * len(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            these = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            parts = [tf.reshape(tensors[i], [-1]) for i in these]
            flat = self._reduce(tf.concat(parts, 0) if len(parts) > 1 else parts[0], op)
            cut = tf.split(flat, [tf.size(part) for part in parts]) if len(parts) > 1 else [flat]
            for i, part in zip(these, cut, strict=True):
                results[i] = tf.reshape(part, tf.shape(tensors[i]))
                results[i].set_shape(tensors[i].shape)
        return results

    def all_gather(self, tensors: Sequence[Any], name: str | None = None) -> list[Any]:
        """Return, for each tensor, the rows of all members."""
        return [self._gather(tensor)[0] for tensor in tensors]

    def broadcast(self, tensors: Sequence[Any], root: int, name: str | None = None) -> list[Any]:
        """Return the tensors of member `root`."""
        import tensorflow as tf

        results = []
        for tensor in tensors:
            carried = _not_empty(_carried(tensor))
            if carried is None:
                results.append(tensor)
                continue
            with self._errors("broadcast"), tf.device(self._device):
                options = self._options(is_ordered=False)
                if self.group.rank == root:
                    out = tf.raw_ops.CollectiveBcastSendV2(input=carried, **options)
                else:
                    shape = tf.shape(carried)
                    options |= {"shape": shape, "T": carried.dtype}
                    out = tf.raw_ops.CollectiveBcastRecvV2(**options)
            results.append(tf.cast(_like(out, tensor), tensor.dtype))
        return results

    def all_to_all(self, tensor: Any, splits: Any, name: str | None = None) -> tuple[Any, Any]:
        """Return the rows received, and how many came from each member.

        All rows go to all members, and each takes its own.
        """
        import tensorflow as tf

        rank, size = self.group.rank, self.group.size
        rows = tf.shape(tensor)[0]
        wanted = tf.cast(splits, tf.int32)
        if tf.size(wanted) == 0 if tf.executing_eagerly() else wanted.shape.num_elements() == 0:
            wanted = tf.fill([size], rows // size)
        with tf.control_dependencies([tf.debugging.assert_equal(tf.reduce_sum(wanted), rows)]):
            wanted = tf.identity(wanted)
        sent = tf.reshape(self._gather(wanted)[0], [size, size])  # by sender, receiver
        whole, counts = self._gather(tensor)
        starts = tf.cumsum(counts, exclusive=True) + tf.reduce_sum(sent[:, :rank], 1)
        parts = [whole[starts[i] : starts[i] + sent[i, rank]] for i in range(size)]
        return tf.concat(parts, 0), tf.cast(sent[:, rank], tf.int32)

    def reduce_scatter(self, tensors: Sequence[Any], op: Op, name: str | None = None) -> list[Any]:
        """Return, for each tensor, this member's share of its reduced rows."""
        import tensorflow as tf

        results = []
        for tensor, whole in zip(tensors, self.all_reduce(tensors, op), strict=True):
            size, rank = self.group.size, self.group.rank
            if tensor.shape.rank and tensor.shape[0] is not None:
                counts = shares(tensor.shape[0], size)
                start = sum(counts[:rank])
                results.append(whole[start : start + counts[rank]])
                continue
            rows = tf.shape(tensor)[0]
            start = rank * (rows // size) + tf.minimum(rank, rows % size)
            count = rows // size + tf.cast(rank < rows % size, rows.dtype)
            results.append(whole[start : start + count])
        return results

    @cached_property
    def _count(self) -> Any:
        return counter(self._device.rpartition("/")[0] + "/device:CPU:0")

    def _reduce(self, flat: Any, op: Op) -> Any:
        import tensorflow as tf

        carried = _not_empty(_carried(flat))
        if carried is None:
            return flat
        is_mean = op is Op.AVERAGE and carried.dtype.is_floating
        with self._errors("all_reduce"), tf.device(self._device):
            out = tf.raw_ops.CollectiveReduceV2(
                input=carried,
                merge_op=_MERGE[op],
                final_op="Div" if is_mean else "Id",
                **self._options(),
            )
        if op is Op.AVERAGE and not is_mean:
            out = tf.truncatediv(out, tf.cast(self.group.size, out.dtype))
        return tf.cast(_like(out, flat), flat.dtype)

    def _gather(self, tensor: Any) -> tuple[Any, Any]:
        """Return the rows of all members, and how many each has; shorter ones are filled up."""
        import tensorflow as tf

        rows = tf.shape(tensor)[0]
        counts = self._gather_even(rows[tf.newaxis])
        if 0 in tensor.shape[1:]:
            return tf.zeros([tf.reduce_sum(counts), *tensor.shape[1:]], tensor.dtype), counts
        longest = tf.maximum(tf.reduce_max(counts), 1)
        carried = _carried(tensor)
        fill = [[0, longest - rows], *[[0, 0]] * (carried.shape.rank - 1)]
        whole = self._gather_even(tf.pad(carried, fill))
        parts = [whole[i * longest : i * longest + counts[i]] for i in range(self.group.size)]
        result = tf.cast(tf.concat(parts, 0), tensor.dtype)
        result.set_shape([None, *tensor.shape[1:]])
        return result, counts

    def _gather_even(self, tensor: Any) -> Any:
        import tensorflow as tf

        with self._errors("all_gather"), tf.device(self._device):
            return tf.raw_ops.CollectiveGatherV2(input=tensor, **self._options())

    def _options(self, is_ordered: bool = True) -> dict[str, Any]:
        import tensorflow as tf

        key = self._count.assign_add(1, read_value=True)
        options: dict[str, Any] = {
            "group_size": tf.constant(self.group.size),
            "group_key": tf.constant(self._number),
            "instance_key": tf.convert_to_tensor(key),
            "communication_hint": self._hint,
            "timeout_seconds": self._timeout_s,
        }
        return options | ({"ordering_token": [self._count.handle]} if is_ordered else {})

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        import tensorflow as tf

        try:
            yield
        except tf.errors.OpError as error:
            failed = CollectiveError(
                f"rank {self.group.rank}: {what} failed: {error.message}. A member is lost, late, "
                "or called something else"
            )
            raise as_tensorflow_error(failed) from error


def outside_of_functions(make: Callable[[], T]) -> T:
    """Return the result of `make`, which may create variables at any trace of a `tf.function`.

    `tf.init_scope` leaves the graph of a function but not its variable creator, and that refuses
    variables from the second trace on. Both belong to a thread, so another thread has neither.
    """
    import tensorflow as tf

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def made() -> T:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(make).result()

    result: T = made()
    return result


def counter(device: str) -> Any:
    """Return a new variable that counts exchanges."""
    import tensorflow as tf

    def make() -> Any:
        with tf.device(device):
            return tf.Variable(0, trainable=False, dtype=tf.int32, name="sparkdl_exchanges")

    return outside_of_functions(make)


def _not_empty(tensor: Any) -> Any:
    """Return the tensor, or `None` if it is empty: TensorFlow 2.21 crashes on those.

    One whose size is not known while it is traced comes flat, with one more number.
    """
    import tensorflow as tf

    size = tensor.shape.num_elements()
    if size is None:
        return tf.concat([tf.reshape(tensor, [-1]), tf.zeros([1], tensor.dtype)], 0)
    return tensor if size else None


def _like(result: Any, tensor: Any) -> Any:
    """Return what came of `_not_empty(tensor)` in the shape of `tensor`."""
    import tensorflow as tf

    if tensor.shape.num_elements() is None:
        result = tf.reshape(result[:-1], tf.shape(tensor))
    result.set_shape(tensor.shape)
    return result


def _carried(tensor: Any) -> Any:
    """Return the tensor in a type that travels.

    Raises:
        ConfigError: if there is none.
    """
    import tensorflow as tf

    name = tensor.dtype.name
    if name in _CARRIED:
        return tensor
    if name in _CARRIERS:
        return tf.cast(tensor, _CARRIERS[name])
    raise ConfigError(
        f"TensorFlow's collectives do not carry dtype {name}: cast the tensor, or install PyTorch "
        "on all nodes (pip install torch)"
    )


@contextmanager
def tensorflow_errors() -> Iterator[None]:
    """Turn `CollectiveError` and `ConfigError` inside into errors that are TensorFlow's as well.

    `FailedPreconditionError` if members called different things, `InvalidArgumentError` for what
    cannot be, `UnknownError` for lost members: those that Horovod's operations raise.
    """
    try:
        yield
    except (CollectiveError, ConfigError) as error:
        raise as_tensorflow_error(error) from error.__cause__


def as_tensorflow_error(error: SparkdlError) -> SparkdlError:
    """Return the error as one that is TensorFlow's as well; itself if it is already."""
    import tensorflow as tf

    is_both = isinstance(error, tf.errors.OpError)
    return error if is_both else _made(type(error), str(error))


def _made(kind: Any, message: str) -> SparkdlError:
    made: SparkdlError = _both(kind)(None, None, message)
    return made


@cache
def _both(kind: Any) -> Any:
    import tensorflow as tf

    theirs: Any = tf.errors.UnknownError
    if issubclass(kind, ConfigError):
        theirs = tf.errors.InvalidArgumentError
    elif issubclass(kind, MismatchError):
        theirs = tf.errors.FailedPreconditionError

    # AutoGraph makes errors anew with their place in the source if they take these arguments.
    def __init__(self: Any, node_def: Any, op: Any, message: str, *args: Any) -> None:  # noqa: N807
        theirs.__init__(self, node_def, op, message, *args)

    def __reduce__(self: Any) -> Any:  # noqa: N807
        return _made, (kind, self.message)

    members = {"__init__": __init__, "__reduce__": __reduce__, "__module__": kind.__module__}
    return type(kind.__name__, (kind, theirs), members | {"__doc__": kind.__doc__})
