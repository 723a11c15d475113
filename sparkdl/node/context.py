"""`ctx` of `map_fun(args, ctx)`: a node's place in the world, its feeds and its checkpoints."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.exchange import collective_used
from sparkdl.core.settings import visible_gpus
from sparkdl.core.spec import DEFAULT_FEED, ClusterSpec
from sparkdl.core.world import FIRST_TIME, Member, Resume, World
from sparkdl.datasets.mesh import equal_share
from sparkdl.feed.reader.batches import EpochBatches, Slices, Tail
from sparkdl.feed.reader.files import FileOrder
from sparkdl.frameworks.framework import framework_named
from sparkdl.node.checkpoints import Checkpoints, LastCheckpoint, PendingCheckpoint
from sparkdl.node.legacy import LegacyContext, NodeManager
from sparkdl.node.link import AgentLink, reported
from sparkdl.storage.parquet.paths import ParquetPaths, parquet
from sparkdl.values.tensors import Padding

if TYPE_CHECKING:
    import datasets
    import jax
    import tensorflow as tf
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import IterableDataset

    from sparkdl.datasets.jax import JaxBatches

_log = logging.getLogger(__name__)


class NodeContext(LegacyContext):
    """One node's view of the cluster.

    Attributes:
        world: all members, by rank.
        member: this node.
        num_gpus: GPUs assigned to this node; its process sees no others. Also 0 where GPUs are
            not assigned, see docs/deployment.md.
        restarts: how often all nodes have restarted after a failure.
        executor_id, job_name, task_index, cluster_spec, …: as in TensorFlowOnSpark.
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
        place = (member.node.node_id, member.role.name, member.index, world.cluster_spec())
        has_order = spec.settings.feeding.global_batch_size is not None
        num_trainers, mgr = len(world.trainers), NodeManager(link, has_order)
        super().__init__(*place, num_trainers, spec.default_fs, spec.working_dir, mgr, port)
        self.world = world
        self.member = member
        self.num_gpus = len(visible_gpus() or ())
        self.restarts = resume.restarts
        self._spec = spec
        self._link = link
        self._checkpoints = Checkpoints(world, member, spec, link, resume, scratch)

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

    def batches(  # noqa: PLR0913 (one question, one name)
        self,
        batch_size: int | None = None,
        columns: Sequence[str] | None = None,
        feed: str | ParquetPaths = DEFAULT_FEED,
        even: bool | None = None,
        tail: Tail = "short",
        shuffle: bool | int = False,
        seed: int = 0,
        pad: Padding | None = None,
        steps: int | None = None,
        sparse: Sequence[str] = (),
    ) -> EpochBatches:
        """Return the feed as batches of numpy arrays; each `iter` is one epoch, or a whole stream.

        A loop that is left early returns its rows: the next one begins the epoch again. If the
        epoch does not fit in the node's feed memory, the next loop raises a `ConfigError` unless
        this one was left within its first 8 batches.

        Once the feed has ended, the first `iter` beyond the last epoch gives no batch, with a
        warning. Later ones raise `EndOfFeedError`; see `has_epoch`.

        Args:
            batch_size: rows in one batch; the last of an epoch may have fewer. Leave it out with
                `Feeding(global_batch_size=…)`: a node gets its slice of each global batch. Then
                `tail="short"` as well adds `sample_weight`, which makes a mean over the nodes'
                means one over all rows.
            columns: which columns, all by default. Rows of an RDD have the columns `"0"`, `"1"`, …
                of tuples and lists, `"value"` of single values.
            feed: its name. Or the files that `sparkdl.parquet` returns: then each `iter` is one
                epoch of them, as often as wanted. Nodes that train share the rows: call it on all
                of them, alike, with one seed. Others read all rows. A node reads each epoch from
                the files, up to `Feeding(memory_nbytes=…)` or 256 MB ahead; if shuffled, it reads
                row groups in random order. Keep the result: each call reads separately.
            even: whether all nodes take the same number of steps. By default they do where a
                framework trains synchronously.
            tail: the use of the rows at an epoch's end that do not fill a step on every node.
                `short`: they make smaller batches, and each is used once. A node that runs out of
                rows early repeats one row in each further step, counted in `rows_padded` of the
                feed's report. `pad`: every batch is filled up to `batch_size`, and has one more
                column, `sample_weight`, float32 `[rows]`, 0 for filling rows. `drop`: not used.
            shuffle: `True` mixes rows within some 32 MB; a number, within that many rows. Epochs
                that are read from the node's log have their segments in random order as well.
            seed: for the order; it differs from epoch to epoch.
            pad: the length to which zeros fill up the rows of a column of arrays, `{"tokens":
                512}`, or `None` for the length of each batch's longest row. Longer rows are an
                error. Adds columns `"tokens.length"`, int64 `[rows]`, and `"tokens.mask"`, bool
                `[rows, length]`, false where a row is filled up.
            steps: each `iter` has this many batches, and the next one continues, over the end of
                an epoch; fewer come only at the feed's end. By default an `iter` is an epoch,
                and one that is left early begins again, in another order if it is shuffled.
            sparse: columns of Spark ML vectors that stay sparse: each is a
                `scipy.sparse.csr_array` float64 `[rows, size]`. Others are made dense, a batch at
                a time. Rows that `tail="pad"` adds are empty. Needs SciPy.

        Returns:
            Dicts of arrays `[rows, …]`, read-only views of the received data where its layout
            allows; `sample_weight` is read-only, too. A struct is a column for each field,
            `"address.city"`. Arrays that differ in length are an object array of arrays.

        Raises:
            ConfigError: if an argument is invalid; while iterating, if there are no such files.
            FeedTypeError: while iterating, if a column has a null, or a type without an array.
            ReadError: while iterating, if a file cannot be read.
        """
        names, order = columns, (self._is_even(even), tail, shuffle, seed)
        slices = self._slices(batch_size, isinstance(feed, ParquetPaths))
        batch_size = 1 if batch_size is None else batch_size
        if not isinstance(feed, ParquetPaths):
            reader = self._link.feeds.reader(feed)
            names = None if names is None else tuple(names)
            more = (pad or {}, steps, sparse)
            return EpochBatches(reader, batch_size, names, *order, *more, slices=slices)
        files = parquet(feed.paths, feed.columns if names is None else names, feed.options)
        own_files = self._link.feeds.own_files(self._spec.settings.feeding.memory_nbytes)
        reader = own_files.reader
        batches = EpochBatches(reader, batch_size, files.columns, *order, pad or {}, steps, sparse)
        paths = tuple(map(self.absolute_path, files.paths))
        is_trainer = self.member.role.is_trainer
        sharers = self.world.trainers if is_trainer else (self.member,)
        nodes = tuple(sharer.node.node_id for sharer in sharers)
        own, row_seed = self.member.node.node_id, seed if shuffle else None
        done = self._checkpoints.covered(reader.feed) if is_trainer else {}
        # The driver takes no part: each node makes the same plan of these values.
        share = (nodes, own, batches.stored, dict(files.options), row_seed, done)
        own_files.begin(FileOrder(paths, *share))
        return batches

    def has_epoch(self, feed: str = DEFAULT_FEED) -> bool:
        """Wait for the next epoch of a feed; return false once the feed has ended.

        For loops that do not count: `while ctx.has_epoch(): for batch in batches: …`, over
        whatever reads the feed. An epoch that was left early is still there.
        """
        return self._link.feeds.reader(feed).has_epoch()

    def dataset(  # noqa: PLR0913 (what `batches` takes, and the columns)
        self,
        batch_size: int | None = None,
        x: str | Sequence[str] | None = None,
        y: str | Sequence[str] | None = None,
        feed: str | ParquetPaths = DEFAULT_FEED,
        even: bool | None = None,
        tail: Tail = "short",
        shuffle: bool | int = False,
        seed: int = 0,
        pad: Padding | None = None,
        steps: int | None = None,
        sparse: Sequence[str] = (),
    ) -> tf.data.Dataset:
        """Return the feed as a `tf.data.Dataset`; each iteration is one epoch.

        `model.fit(ctx.dataset(64, x="image", y="label"), epochs=3)` trains on three epochs, with or
        without a strategy. `batch_size` is what this node sees in one step. Waits for the first
        row, to learn the types.

        When the feed has ended, Keras' `fit` ends with a warning, after the same epoch on all
        nodes. When `stop_training` ends `fit`, the feed ends. Without any epoch, `fit`, `evaluate`
        and `predict` raise `EndOfFeedError`; so does `validation_data` with too few epochs.

        Args:
            x: column of the features, or several for a dict of features.
            y: column or columns of the labels.
            even, tail, shuffle, seed, pad, steps: see `batches`.
            sparse: columns of vectors that are each a `tf.SparseTensor`, see `batches`.

        Returns:
            Elements `(x, y)`, with `tail="pad"` `(x, y, sample_weight)`, as `model.fit` takes them;
            only `x` without `y`; dicts of all columns without both. Dates are days, other times
            microseconds, int64.
        """
        from sparkdl.datasets.keras_epochs import patch_fit_for_feeds
        from sparkdl.datasets.tensorflow import tf_dataset

        # Keras takes the first epoch's length for all, and the first after a restart is a rest.
        patch_fit_for_feeds()
        columns = _wanted(x, y) or None
        order = (even, tail, shuffle, seed)
        batches = self.batches(batch_size, columns, feed, *order, pad, steps, sparse)
        return tf_dataset(batches, x, y, ahead=2)

    def torch_dataset(
        self,
        batch_size: int | None = None,
        x: str | Sequence[str] | None = None,
        y: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        mesh: DeviceMesh | None = None,
        data_axis: str | Sequence[str] = "data",
        **options: Any,
    ) -> IterableDataset[Any]:
        """Return the feed as a dataset of PyTorch; each iteration is one epoch.

        For `DataLoader(dataset, batch_size=None, num_workers=…)`: it yields whole batches.

        Args:
            x, y: columns of features and labels, see `dataset`.
            columns: which columns to read, without `x`.
            mesh: nodes at the same place along its data axes get the same batches of `batch_size`
                rows, of which each reads an equal share. See docs/jax.md.
            data_axis: the axis, or axes, along which the rows differ.
            options: `feed`, `even`, `tail`, `shuffle`, `seed`, `pad`, `steps`, see `batches`; and
                `sparse`, columns of vectors, each a `torch.sparse_csr_tensor`; not with a mesh.

        Returns:
            Elements `(x, y)`, with `tail="pad"` `(x, y, sample_weight)`; `x` alone without `y`;
            dicts of the columns without both. See `sparkdl.datasets.torch.torch_dataset`.
        """
        from sparkdl.datasets.keras_epochs import patch_fit_for_feeds
        from sparkdl.datasets.torch import SharedRows, torch_dataset

        patch_fit_for_feeds()
        shared = None
        if mesh is not None:
            shared = SharedRows(mesh, data_axis)
            batch_size = self._share_of(batch_size, shared)
            options = shared.in_step(options)
        batches = self.batches(batch_size, _wanted(x, y) or columns, **options)
        return torch_dataset(batches, x, y, shared, self.last_checkpoint is not None)

    def hf_dataset(
        self, batch_size: int | None = None, columns: Sequence[str] | None = None, **options: Any
    ) -> datasets.IterableDataset:
        """Return the feed's rows as a `datasets.IterableDataset`; each iteration is one epoch.

        For Hugging Face's trainers that accept no other dataset, see docs/pytorch.md. Accelerate
        does not shard it again. Waits for the first row, to learn the types.

        Args:
            batch_size: the trainer's `per_device_train_batch_size`.
            options: `feed`, `shuffle`, `seed`, `pad`, see `batches`.

        Returns:
            Rows, and features of the columns' types, see `sparkdl.datasets.hugging_face`.
        """
        from sparkdl.datasets.hugging_face import hf_dataset

        options = {"tail": "drop", "even": self.num_workers > 1 or None, **options}
        batches = self.batches(batch_size, columns, **options)
        return hf_dataset(batches, self.last_checkpoint is not None)

    def jax_batches(
        self,
        batch_size: int | None = None,
        x: str | Sequence[str] | None = None,
        y: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        sharding: jax.sharding.Sharding | None = None,
        prefetch: int = 2,
        **options: Any,
    ) -> JaxBatches:
        """Return the feed as batches of `jax.Array`; each `iter` is one epoch.

        All batches have `batch_size` rows, and all nodes take the same number of steps, unless
        `options` say otherwise. Padding rows have weight 0 in the column `sample_weight`.

        Args:
            x, y, columns: see `torch_dataset`.
            sharding: of all columns over the devices of all nodes; the local device by default.
                `batch_size` is how many rows one node's devices hold. See docs/jax.md.
            prefetch: batches put onto the device in advance.
            options: `feed`, `even`, `tail`, `shuffle`, `seed`, `pad`, `steps`, see `batches`; and
                `sparse`, columns of vectors that are each a `jax.experimental.sparse.BCOO`; not
                with a sharding.
        """
        from sparkdl.datasets.jax import GlobalRows, JaxBatches

        if sharding is not None:
            batch_size = self._share_of(batch_size, GlobalRows.of(sharding))
        # Full batches by default: a global array needs rows of every node, XLA one shape.
        options = {"tail": "pad", "even": self.num_workers > 1 or None, **options}
        batches = self.batches(batch_size, _wanted(x, y) or columns, **options)
        return JaxBatches(batches, x, y, sharding, prefetch)

    def generator(self, step: int, seed: int = 0) -> Any:
        """Return random numbers for a step, the same on all nodes and after any restart.

        With `Feeding(global_batch_size=…)` draw for all rows of a batch, and take this node's:
        `np.array_split(ctx.generator(step).random(rows), ctx.num_workers)[ctx.rank]`.

        Returns:
            A `torch.Generator` with PyTorch, a key with JAX, or else a `numpy.random.Generator`.
        """
        return framework_named(self._spec.framework).generator([seed, step])

    def report(self, step: int, **metrics: float) -> None:
        """Report the step this node has done, for the dashboard and the hang watch.

        Cheap enough to be called in each step. Batches of feeds and of files are counted
        anyway; a loop that reads its own data should call this.

        Args:
            metrics: numbers to show beside the step.

        Raises:
            ConfigError: if `step` is no whole number of 0 or more, or a metric is no number.
        """
        self._link.send(reported(step, metrics))

    @property
    def checkpoint_dir(self) -> str | None:
        """The path or URL of the folder of the checkpoints; `None` if the launch named none."""
        return self._spec.checkpoint_dir

    @property
    def last_checkpoint(self) -> LastCheckpoint | None:
        """The checkpoint that this generation resumes from: its `step`, `folder` and `url`.

        `None` if it starts from scratch. It does not change while `map_fun` runs.
        """
        return self._checkpoints.last

    def checkpoint(
        self, step: int, batches: int | Mapping[str, int] | None = None
    ) -> AbstractContextManager[Path]:
        """Yield a folder, and make a checkpoint of the files written into it.

        Call it on all nodes that train, with the same steps. The checkpoint is complete or absent;
        the first node waits for the others, up to `Feeding(timeout_s=…)`. An exception inside
        leaves no new checkpoint, and does not touch earlier ones. On a local or mounted
        `checkpoint_dir` all nodes write into one and the same folder: nodes that write different
        things need different names. Wait inside for asynchronous saves and threads of your own.

        Args:
            step: how far the training is, by your own count; larger each time.
            batches: how many batches of the feed the saved state has used since `map_fun` began,
                by feed if there are several. Feeds that are not named count the epochs that were
                read to their end. By default all batches handed out: exact, unless tf.data or
                workers of a loader read ahead and the epoch is not at its end.

        Raises:
            ConfigError: without `checkpoint_dir`, on a node that does not train, inside another
                checkpoint, if `step` is not larger than before, or if `batches` must be given.
            CheckpointError: if it could not be written, no node has written a file, a node has not
                called this in time, an asynchronous save still writes at the end of the block, or
                the checkpoint before was written to after its block.
        """
        return self._checkpoints.write(step, batches)

    def checkpoint_async(
        self, step: int, batches: int | Mapping[str, int] | None = None
    ) -> AbstractContextManager[PendingCheckpoint]:
        """Make a checkpoint whose files are written while the training continues.

        Like `checkpoint`, but yields a `PendingCheckpoint`: `saving.folder` is the folder, and
        `saving.until(future)` names a write that continues after the block. Copy the state inside
        the block. A thread waits for the write, uploads, and completes the checkpoint once all
        nodes have written; it covers the rows up to the beginning of the block. Until then a
        restart resumes from the checkpoint before. The next checkpoint and the end of `map_fun`
        wait for the one in flight, up to `Feeding(timeout_s=…)`, and raise its error.

        Raises:
            ConfigError: see `checkpoint`.
            CheckpointError: see `checkpoint`; and if the one in flight failed, or takes too long.
        """
        return self._checkpoints.write_async(step, batches)

    def batches_given(self) -> dict[str, int]:
        """Return how many batches of each feed were handed out since `map_fun` began.

        Batches read ahead of the training count. At an epoch's end, all of them have been used.
        """
        return self._link.feeds.batches_given()

    def all_gather(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Return the values from all nodes that train, by rank.

        Call it on chief and workers, equally often. Like `BarrierTaskContext.allGather` of Spark.
        Values go through the driver, whatever the framework: addresses, seeds, counts, agreements.
        For tensors use the framework's own collectives.

        Args:
            value: None, booleans, numbers, strings, bytes, numpy arrays, and lists, tuples, sets
                and dicts of them; some 12 MB at most for all nodes together.
            timeout_s: seconds to wait for the others, by default
                `Feeding(timeout_s=…)` of the launch.

        Raises:
            ConfigError: on a node that does not train, or for a value of another type.
            CoordinationError: if a node did not call in time, or returned without it.
        """
        self._check_trains("ctx.all_gather and ctx.barrier")
        timeout_s = self._spec.settings.feeding.timeout_s if timeout_s is None else timeout_s
        # A barrier carries no values: nodes that only wait for each other may still train alone.
        if value is not None:
            collective_used.set()
        return self._link.all_gather(value, timeout_s, self.member.node.name, self.generation)

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all nodes that train have called this; see `all_gather`."""
        self.all_gather(None, timeout_s)

    def mesh(self, **axes: int) -> Any:
        """Return the framework's own mesh: `ctx.mesh(data=2, model=2)`.

        Call it on all nodes that train, alike. Nodes that differ in the last axis alone are
        neighbours by rank. Put the axis with the most communication last, usually the model's.

        Args:
            axes: the number of nodes (with JAX, of devices) along each axis; -1 for one axis takes
                the rest.

        Returns:
            With PyTorch a `torch.distributed.device_mesh.DeviceMesh`; the default process group is
            made if there is none. With JAX a `jax.sharding.Mesh` over the devices of all nodes.

        Raises:
            ConfigError: if the axes do not fit the nodes, this node does not train, or the
                framework has no mesh.
        """
        self._check_trains("ctx.mesh")
        collective_used.set()
        return framework_named(self._spec.framework).mesh(axes, self.world, self.member)

    def _is_even(self, even: bool | None) -> bool:
        """Return `even`, by default whether a framework trains synchronously on several nodes."""
        is_trainer = self.member.role.is_trainer
        # Nodes of `plain` have no collectives in which they could wait for each other.
        in_step = is_trainer and self._spec.framework != "plain" and self.num_workers > 1
        return in_step if even is None else even

    def _share_of(self, batch_size: int | None, shared: Any) -> int | None:
        if batch_size is not None:
            return equal_share(batch_size, shared.members)
        if shared.members > 1:
            raise ConfigError(
                "Feeding(global_batch_size=…) gives each node rows of its own, and on this mesh "
                f"{shared.members} nodes share theirs. Pass batch_size, without a fixed order"
            )
        return None

    def _slices(self, batch_size: int | None, is_own: bool) -> Slices | None:
        """Return this node's part of global batches, if rows have a fixed order."""
        rows = self._spec.settings.feeding.global_batch_size
        if rows is None:
            if batch_size is None:
                raise ConfigError(
                    "batch_size is missing: give it, or launch with Feeding(global_batch_size=…)"
                )
            return None
        if is_own:
            raise ConfigError(
                "feed=sparkdl.parquet(…) must be fed by the driver with Feeding("
                f"global_batch_size={rows}): use cluster.feed(sparkdl.parquet(…))"
            )
        if batch_size is not None:
            raise ConfigError(
                f"batch_size={batch_size}: a node gets its slice of each global batch, by "
                f"Feeding(global_batch_size={rows}). Leave batch_size out"
            )
        role, alike = self.member.role, self.world.fed
        if not role.is_fed:  # it reads a feed for its role
            alike = tuple(each for each in self.world.members if each.role == role)
        nodes = tuple(member.node.node_id for member in alike)
        index, settings = nodes.index(self.member.node.node_id), self._spec.settings.feeding
        of = (settings.timeout_s, self.member.node.name, self.generation)
        is_with_all = alike == self.world.trainers
        first_row = partial(self._link.first_row, index == 0, of) if is_with_all else None
        return Slices(rows, nodes, index, first_row)

    def _check_trains(self, calls: str) -> None:
        if not self.member.role.is_trainer or self.member.role.is_server:
            raise ConfigError(
                f"{self.member.node.name} does not train: call {calls} on chief and workers"
            )


_current: NodeContext | None = None


def current() -> NodeContext | None:
    """Return the context of the node that this process is; `None` elsewhere, as in the driver."""
    return _current


def enter(ctx: NodeContext) -> None:
    global _current
    _current = ctx


def leave(ctx: NodeContext) -> None:
    """Finish what `map_fun` has left, once it has returned.

    Raises:
        CheckpointError: if the checkpoint in flight fails.
    """
    ctx._checkpoints.end()


def _wanted(*parts: str | Sequence[str] | None) -> list[str]:
    return [n for names in parts for n in ([names] if isinstance(names, str) else names or [])]
