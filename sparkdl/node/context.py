"""What `map_fun(args, ctx)` is given: its place in the world and its feeds.

Runs in: child
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.core.checkpoint import FIRST_TIME, Resume
from sparkdl.core.paths import absolute_url
from sparkdl.core.settings import visible_gpus
from sparkdl.core.spec import DEFAULT_FEED, ClusterSpec
from sparkdl.core.world import Member, World
from sparkdl.feed.adapters.tfos import DataFeed
from sparkdl.feed.parquet.paths import ParquetPaths, Paths
from sparkdl.feed.reader.batches import EpochBatches, Tail
from sparkdl.node.checkpoint.checkpoints import Checkpointing
from sparkdl.node.coordination import Coordination
from sparkdl.node.direct_read import read_own, wanted_files
from sparkdl.node.gathering import Gathering
from sparkdl.node.legacy import NodeManager, RemovedCalls
from sparkdl.node.link import AgentLink
from sparkdl.node.meshes import Meshes
from sparkdl.node.reporting import reported

if TYPE_CHECKING:
    import jax
    import tensorflow as tf
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import IterableDataset

    from sparkdl.feed.adapters.jax import JaxBatches

_log = logging.getLogger(__name__)


class NodeContext(Checkpointing, Coordination, Gathering, Meshes, RemovedCalls):
    """One node's view of the cluster.

    Attributes:
        world: all members, by rank.
        member: this node.
        executor_id: this node's number, as in TensorFlowOnSpark; `worker_num` is its old name.
        job_name: `chief`, `worker`, `ps` or `evaluator`.
        task_index: the node's index among those with the same job name.
        cluster_spec: TensorFlow's: `{job: ["host:port", …]}`.
        num_workers: nodes that train: chief and workers.
        num_gpus: GPUs that this node was given, which are all that its process sees; 0 as well
            where nobody shares GPUs out, see docs/gpus.md.
        defaultFS: Hadoop's default file system.
        working_dir: the driver's working directory.
        restarts: how often all nodes have begun anew after a failure.
    """

    def __init__(
        self,
        world: World,
        member: Member,
        spec: ClusterSpec,
        link: AgentLink,
        port: socket.socket,
        resume: Resume = FIRST_TIME,
        scratch: Path | None = None,
    ) -> None:
        super().__init__()
        self.world = world
        self.member = member
        self.executor_id = self.worker_num = member.node.node_id
        self.job_name = member.role.name
        self.task_index = member.index
        self.cluster_spec = world.cluster_spec()
        self.num_workers = len(world.trainers)
        self.num_gpus = len(visible_gpus() or ())
        self.defaultFS = spec.default_fs
        self.working_dir = spec.working_dir
        self.mgr = NodeManager(self.get_data_feed)
        self.tmp_socket: socket.socket | None = port
        self.restarts = resume.restarts
        self._resume = resume
        self._spec = spec
        self._link = link
        self._scratch = scratch

    def __repr__(self) -> str:
        return f"NodeContext({self.member.node.name}, rank {self.rank} of {self.world.size})"

    @property
    def rank(self) -> int:
        """This node's order in the world, from 0: trainers first, the chief before the workers."""
        return self.member.rank

    @property
    def local_rank(self) -> int:
        """This node's order among the nodes on the same host, from 0."""
        return self.member.local_rank

    @property
    def generation(self) -> int:
        """The number of the world, from 0: one more after each restart."""
        return self.world.generation

    @property
    def is_chief(self) -> bool:
        """Whether this node leads: the chief, or the first worker where there is none."""
        return self.rank == 0

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = DEFAULT_FEED,
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> DataFeed:
        """Return TensorFlowOnSpark's `DataFeed` over the feed called `qname_in`.

        Args:
            train_mode: `False` to answer `cluster.inference` with `batch_results`.
            qname_out: accepted for TensorFlowOnSpark's sake; results go back where the rows
                came from.
            input_mapping: column name to tensor name.
        """
        reader = self._link.reader(qname_in)
        return DataFeed(reader, self._link.send, train_mode, input_mapping)

    def batches(
        self,
        batch_size: int,
        columns: Sequence[str] | None = None,
        feed: str | ParquetPaths = DEFAULT_FEED,
        even: bool | None = None,
        tail: Tail = "short",
        shuffle: bool | int = False,
        seed: int = 0,
    ) -> EpochBatches:
        """Return the feed as batches of numpy arrays; each `iter` is one epoch, or a whole stream.

        Of a feed that has ended the first `iter` beyond the last epoch gives no batch, with a
        warning, and those after it raise `EndOfFeedError`; see `has_epoch`.

        Args:
            batch_size: rows in one batch; the last of an epoch may have fewer.
            columns: which columns, all by default. Rows of an RDD have the columns `"0"`, `"1"`, …
                of tuples and lists, `"value"` of single values.
            feed: its name, or the files that `sparkdl.parquet` returns: then see `parquet`.
            even: whether all nodes take the same number of steps. By default they do where a
                framework trains synchronously.
            tail: what becomes of the rows at the end of an epoch that do not fill a step on every
                node. `short`: they make smaller batches, and each is used once; a node that got
                fewer rows than the others have steps left, because it or the way to it was slower,
                gets one again in each of these: `rows_padded` of the feed's report counts them.
                `pad`: every batch is filled up to
                `batch_size`, and has one more column, `sample_weight`, float32 `[rows]`, 0 for rows
                that only fill. `drop`: they are not used. `carry`: they come first in the next
                epoch.
            shuffle: `True` mixes rows within some 32 MB; a number, within so many rows. Epochs that
                are read from the node's log have their segments in random order as well.
            seed: of that order, which differs from epoch to epoch.

        Returns:
            Dicts of arrays `[rows, …]`, read-only views of the received data where its layout
            allows.

        Raises:
            ConfigError: if an argument cannot be.
        """
        if isinstance(feed, ParquetPaths):
            return self.parquet(feed, batch_size, columns, None, even, tail, shuffle, seed)
        names = None if columns is None else tuple(columns)
        is_even = self._trains_in_step() if even is None else even
        reader = self._link.reader(feed)
        return EpochBatches(reader, batch_size, names, is_even, tail, shuffle, seed)

    def has_epoch(self, feed: str = DEFAULT_FEED) -> bool:
        """Wait for the next epoch of a feed; return false once the feed has ended.

        For loops that do not count: `while ctx.has_epoch(): for batch in batches: …`, over
        whatever reads the feed. An epoch that was left early is still there.
        """
        return self._link.reader(feed).has_epoch()

    def parquet(  # noqa: PLR0913 (what `batches` takes, and the files)
        self,
        path: Paths | ParquetPaths,
        batch_size: int,
        columns: Sequence[str] | None = None,
        epochs: int | None = None,
        even: bool | None = None,
        tail: Tail = "short",
        shuffle: bool | int = False,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> EpochBatches:
        """Return Parquet files as batches of numpy arrays; each `iter` is one epoch.

        The nodes that train share the rows: call it on all of them, alike. Other nodes read all
        rows. A node reads ahead, and once only what fits into `feed_memory` and `feed_disk`. Each
        call reads for itself: keep what it returns.

        Args:
            path: a folder, a file, a pattern, a list of these, or what `sparkdl.parquet` returns.
            columns: which columns, all by default.
            epochs: after so many, `iter` gives no batch; by default there is always another one.
            even, tail, shuffle, seed: see `batches`. An epoch that is read from the files has its
                row groups in random order as well. Give all nodes the same seed.
            options: of the storage, see `sparkdl.parquet`.

        Raises:
            ConfigError: if an argument cannot be; from the iteration, if there are no such files.
            ReadError: from the iteration, if a file cannot be read.
        """
        files = wanted_files(path, columns, options, epochs, self.absolute_path)
        is_even = self._trains_in_step() if even is None else even
        reader = self._link.own_reader("parquet")
        batches = EpochBatches(reader, batch_size, files.columns, is_even, tail, shuffle, seed)
        row_seed = seed if shuffle else None
        done = self._covered(reader.feed)
        read_own(self._link, reader.feed, self.world, self.member, files, epochs, row_seed, done)
        return batches

    def dataset(  # noqa: PLR0913 (what `batches` takes, and the columns)
        self,
        batch_size: int,
        x: str | Sequence[str] | None = None,
        y: str | Sequence[str] | None = None,
        feed: str | ParquetPaths = DEFAULT_FEED,
        even: bool | None = None,
        tail: Tail = "short",
        shuffle: bool | int = False,
        seed: int = 0,
        prefetch: int = 2,
    ) -> tf.data.Dataset:
        """Return the feed as a `tf.data.Dataset`; each iteration is one epoch.

        `model.fit(ctx.dataset(64, x="image", y="label"), epochs=3)` trains on three epochs, with or
        without a strategy. `batch_size` is what this node sees in one step. Waits for the first
        row, to learn the types.

        `fit` of Keras ends with a warning when the feed has ended, after the same epoch on all
        nodes, and ends the feed when `stop_training` ends it; `fit`, `evaluate` and `predict` that
        find no epoch raise `EndOfFeedError`, also for `validation_data` that has too few.

        Args:
            x: column of the features, or several for a dict of features.
            y: column or columns of the labels.
            even, tail, shuffle, seed: see `batches`.
            prefetch: batches that are made ready while the training uses others.

        Returns:
            Elements `(x, y)`, with `tail="pad"` `(x, y, sample_weight)`, as `model.fit` takes them;
            only `x` without `y`; dicts of all columns without both.
        """
        from sparkdl.feed.adapters.keras_epochs import let_epochs_differ
        from sparkdl.feed.adapters.tensorflow import tf_dataset

        let_epochs_differ()
        names = _wanted(x, y) or None
        batches = self.batches(batch_size, names, feed, even, tail, shuffle, seed)
        return tf_dataset(batches, x, y, prefetch)

    def torch_dataset(
        self,
        batch_size: int,
        x: str | Sequence[str] | None = None,
        y: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        mesh: DeviceMesh | None = None,
        data_axis: str | Sequence[str] = "data",
        **options: Any,
    ) -> IterableDataset[Any]:
        """Return the feed as a dataset of PyTorch; each iteration is one epoch.

        For `DataLoader(dataset, batch_size=None, num_workers=…)`: batches are made already.

        Args:
            x: column of the features, or several for a dict of features.
            y: column or columns of the labels.
            columns: without `x`, which columns.
            mesh: nodes that differ in no data axis of it get the same batches, of `batch_size` rows
                as everywhere; each of them reads an equal share. See docs/meshes.md.
            data_axis: along which the rows differ, or several.
            options: `feed`, `even`, `tail`, `shuffle`, `seed`, see `batches`.

        Returns:
            Elements `(x, y)`, with `tail="pad"` `(x, y, sample_weight)`; `x` alone without `y`;
            dicts of the columns without both. See `sparkdl.feed.adapters.torch.torch_dataset`.
        """
        from sparkdl.feed.adapters.torch import torch_dataset

        shared = None
        if mesh is not None:
            from sparkdl.feed.adapters.torch import SharedRows

            shared = SharedRows(mesh, data_axis)
            batch_size = shared.share_of(batch_size)
            options = shared.in_step(options)
        batches = self.batches(batch_size, _wanted(x, y) or columns, **options)
        return torch_dataset(batches, x, y, shared)

    def jax_batches(
        self,
        batch_size: int,
        x: str | Sequence[str] | None = None,
        y: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        sharding: jax.sharding.Sharding | None = None,
        prefetch: int = 2,
        **options: Any,
    ) -> JaxBatches:
        """Return the feed as batches of `jax.Array`; each `iter` is one epoch.

        All batches have `batch_size` rows, those that only fill with weight 0 in the column
        `sample_weight`, and all nodes take the same number of steps, unless `options` say
        otherwise.

        Args:
            x, y, columns: see `torch_dataset`.
            sharding: of all columns over the devices of all nodes; the local device by default.
                `batch_size` is how many rows one node's devices hold. See docs/jax.md.
            prefetch: batches put onto the device in advance.
            options: `feed`, `even`, `tail`, `shuffle`, `seed`, see `batches`.
        """
        from sparkdl.feed.adapters.jax import JaxBatches

        if sharding is not None:
            from sparkdl.feed.adapters.jax import GlobalRows

            batch_size = GlobalRows.of(sharding).share_of(batch_size)
        options = {"tail": "pad", "even": self.num_workers > 1 or None, **options}
        batches = self.batches(batch_size, _wanted(x, y) or columns, **options)
        return JaxBatches(batches, x, y, sharding, prefetch)

    def report(self, step: int, **metrics: float) -> None:
        """Tell the driver which step this node has done, for the cluster's table and hang watch.

        Cheap enough to be called in each step. Batches of feeds and of `parquet` are counted
        anyway; a loop that reads its own data should call this.

        Args:
            metrics: numbers to show beside the step.

        Raises:
            ConfigError: if `step` is no whole number of 0 or more, or a metric is no number.
        """
        self._link.send(reported(step, metrics))

    def absolute_path(self, path: str) -> str:
        """Return `path` as a URL on the default file system, relative to the user's home there.

        On a local default file system it is relative to the driver's working directory. A path
        with a scheme is returned as it is.
        """
        return absolute_url(path, self.defaultFS, self.working_dir)

    def release_port(self) -> None:
        """Close the socket that holds this node's port, so that a server can bind it."""
        if self.tmp_socket is None:
            _log.warning("The port of %s has been released already", self.member.node.name)
            return
        self.tmp_socket.close()
        self.tmp_socket = None

    def _trains_in_step(self) -> bool:
        is_trainer = self.member.role.is_trainer
        return is_trainer and self._spec.framework != "plain" and self.num_workers > 1


_current: NodeContext | None = None


def current() -> NodeContext | None:
    """Return the context of the node that this process is; `None` elsewhere, as in the driver."""
    return _current


def enter(ctx: NodeContext) -> None:
    """Let `current` return `ctx` from now on."""
    global _current
    _current = ctx


def _wanted(*parts: str | Sequence[str] | None) -> list[str]:
    """Return all names in `parts`."""
    return [n for names in parts for n in ([names] if isinstance(names, str) else names or [])]
