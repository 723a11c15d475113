"""TensorFlow's own collectives: for nodes without PyTorch, and for TensorFlow on GPUs (NCCL).

Runs in: child

The runtime is TensorFlow's for several workers, as `tf.distribute.MultiWorkerMirroredStrategy`
sets it up: a gRPC server in each process, on a port of its own, and rings between them, or NCCL.
It must be set up before TensorFlow does anything else in the process, and stays until its end.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from sparkdl.collectives.base import Array, Group, Op, even_splits, shares
from sparkdl.collectives.tensorflow_ops import Collectives
from sparkdl.core.errors import CollectiveError, ConfigError
from sparkdl.core.world import host_port

T = TypeVar("T")
_RUNTIME: list[Any] = []
"""The strategy that keeps the runtime, at most one in a process."""


class Offer:
    """What a member tells the others so that they find it: where its server will listen."""

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
        device = _begin(self._rank, list(addresses))
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
        self._subgroups = 0
        number = 1 << 20 | zlib.crc32(name.encode()) & 0x7FFFFFFF  # strategies count from 1
        self.exchange = Collectives(self, number, device, timeout_s)

    def all_reduce(
        self, arrays: Sequence[Array], op: Op = Op.AVERAGE, name: str | None = None
    ) -> list[Array]:
        """See `Group.all_reduce`."""
        return self._arrays(lambda: self.exchange.all_reduce(_tensors(arrays), op))

    def all_gather(self, array: Array, name: str | None = None) -> Array:
        """See `Group.all_gather`."""
        rows = _tensors([np.atleast_1d(array)])
        return self._arrays(lambda: self.exchange.all_gather(rows))[0]

    def broadcast(self, array: Array, root: int, name: str | None = None) -> Array:
        """See `Group.broadcast`."""
        if root not in range(self.size):
            raise ConfigError(f"root={root}: there are the members 0 to {self.size - 1}")
        return self._arrays(lambda: self.exchange.broadcast(_tensors([array]), root))[0]

    def all_to_all(
        self, array: Array, splits: Sequence[int] | Array | None = None, name: str | None = None
    ) -> tuple[Array, Array]:
        """See `Group.all_to_all`."""
        rows = np.atleast_1d(array)
        counts = np.array(even_splits(len(rows), self.size, splits), np.int32)
        both = _tensors([rows, counts])
        out, got = self._arrays(lambda: list(self.exchange.all_to_all(*both)))
        return out, got

    def reduce_scatter(self, array: Array, op: Op = Op.AVERAGE, name: str | None = None) -> Array:
        """See `Group.reduce_scatter`."""
        rows = np.atleast_1d(array)
        counts = shares(len(rows), self.size)
        start = sum(counts[: self.rank])
        return self.all_reduce([rows], op)[0][start : start + counts[self.rank]]

    def barrier(self) -> None:
        """See `Group.barrier`."""
        self.all_reduce([np.zeros(1, np.float32)], Op.SUM)

    def join(self) -> int:
        """Refuse: members cannot tell each other here what they are about to do.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "join() needs PyTorch on all nodes (pip install torch): TensorFlow's collectives "
            "cannot go on without one of the members. Or give all nodes the same number of steps"
        )

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """See `Group.subgroup`."""
        wanted = self.members(ranks)
        self._subgroups += 1
        if self.rank not in wanted:
            return None
        in_world = [self.ranks[rank] for rank in wanted]
        name, mine = f"{self._name}/{self._subgroups}", wanted.index(self.rank)
        return TensorFlowGroup(mine, in_world, self._key, name, self._device, self.timeout_s)

    def _arrays(self, work: Callable[[], list[Any]]) -> list[Array]:
        import tensorflow as tf

        def in_eager() -> list[Array]:
            with tf.init_scope():
                return [tensor.numpy() for tensor in work()]

        return self.run(in_eager)


def _tensors(arrays: Sequence[Array]) -> list[Any]:
    import tensorflow as tf

    if texts := [array.dtype for array in arrays if array.dtype.hasobject]:
        raise ConfigError(f"an array of dtype {texts[0]} has no bytes; use the _object forms")
    with tf.init_scope():
        return [tf.convert_to_tensor(array) for array in arrays]


def _begin(rank: int, addresses: list[str]) -> str:
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
