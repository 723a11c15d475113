"""What `ctx` offers a chief that trains on parameter servers.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.spec import DEFAULT_FEED, ClusterSpec
from sparkdl.core.world import Member, World
from sparkdl.feed.reader.batches import Tail

if TYPE_CHECKING:
    import tensorflow as tf

    from sparkdl.frameworks.tensorflow_ps import FedDatasetFn, FedWorkers


class Coordination:
    """The chief's side of `launch(…, num_ps=…)`; see docs/parameter-servers.md."""

    world: World
    member: Member
    _spec: ClusterSpec
    _fed_workers: FedWorkers | None = None

    def parameter_server_strategy(
        self, variable_partitioner: Any = None
    ) -> tf.distribute.ParameterServerStrategy:
        """Connect to the servers of ps and workers, and return the strategy that trains on them.

        Args:
            variable_partitioner: cuts large variables into parts for several ps, see
                `tf.distribute.experimental.partitioners`.

        Raises:
            ConfigError: if there are no such servers, or this node is not the chief.
            FrameworkMissingError: if the installed TensorFlow is not known.
        """
        servers = [member for member in self.world.members if member.role.is_server]
        if not servers or not self.member.role.is_chief:
            raise ConfigError(
                f"{self.member.node.name} has no parameter servers to train on: call this on the "
                "chief of a cluster with num_ps=1 or more and master_node='chief', and without "
                "coordinator=False"
            )
        from sparkdl.frameworks.tensorflow_ps import FedWorkers, strategy

        connected = strategy(variable_partitioner)
        self._fed_workers = FedWorkers([m.index for m in servers if m.role.is_fed])
        return connected

    def fed_dataset_fn(
        self,
        batch_size: int,
        x: str | Sequence[str] | None = None,
        y: str | Sequence[str] | None = None,
        feed: str = DEFAULT_FEED,
        tail: Tail = "short",
        shuffle: bool | int = False,
        seed: int = 0,
    ) -> FedDatasetFn:
        """Return a dataset function that gives every worker the rows that Spark feeds to it.

        For `DatasetCreator(fn)` of tf_keras, and for `coordinator.create_per_worker_dataset(fn)`.
        A worker's dataset goes on from epoch to epoch and ends, on all workers at once, when the
        feed has ended and all rows have been used. A step for which a worker has no row goes to
        another. Waits for the first row, to learn the types.

        Args:
            x: column of the features, or several for a dict of features.
            y: column or columns of the labels.
            tail, shuffle, seed: see `batches`; `tail` is of each worker's part of an epoch.

        Returns:
            What gives elements as those of `dataset`. Its `terminate()` takes no more rows.

        Raises:
            ConfigError: without a strategy from `parameter_server_strategy`.
            FeedClosedError: if the feed ended before a row came.
        """
        if self._fed_workers is None:
            raise ConfigError(
                "call ctx.parameter_server_strategy() first: the workers have to be asked what "
                "their rows are"
            )
        from sparkdl.frameworks.tensorflow_server import Wanted

        columns = [n for part in (x, y) for n in ([part] if isinstance(part, str) else part or [])]
        wanted = Wanted(0, feed, batch_size, tuple(columns) or None, tail, shuffle, seed)
        return self._fed_workers.dataset_fn(wanted, x, y)
