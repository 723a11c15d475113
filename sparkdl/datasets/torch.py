"""A feed as a dataset of PyTorch, for a `DataLoader` with any number of workers."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from sparkdl.core.errors import ConfigError, FeedTypeError, FrameworkMissingError
from sparkdl.core.patch import Function, Patch
from sparkdl.datasets.mesh import same_rows
from sparkdl.datasets.tensorflow import readers_of
from sparkdl.feed.reader.batches import EpochBatches, Names, arrange
from sparkdl.feed.reader.reader import FeedReader
from sparkdl.values.columns import Columns, is_csr, is_text
from sparkdl.values.tensors import as_numbers, check_shared, no_sparse, no_tensor

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import IterableDataset


def torch_dataset(
    batches: EpochBatches,
    x: Names | None = None,
    y: Names | None = None,
    shared: SharedRows | None = None,
    is_resumed: bool = False,
) -> IterableDataset[Any]:
    """Return a dataset of batches; each iteration is one epoch.

    It is meant for `DataLoader(dataset, batch_size=None)`: batches are made already, and any other
    `batch_size` would make batches of batches. A transform goes into the loader's `collate_fn`,
    which gets a batch. A dataset and its loader have no `len()`: the length of an epoch is known
    only at its end.

    With `num_workers`, the loader reads the batches in the node's process, and gives them to its
    workers by turns. Iterate one loader at a time: a loader that begins takes the feed over, and
    ends the epoch of the others. When a loop is left early, batches read ahead for workers go back
    with the rest of the epoch, unless they were the epoch's last. Workers of the start method
    "fork" keep the feed's memory of that moment as long as they live;
    `multiprocessing_context="forkserver"` does not.

    Args:
        x: column of the features, or several columns for a dict of features.
        y: column or columns of the labels.
        shared: with whom this node shares its rows. All their loaders have as many workers.
        is_resumed: whether the feed begins behind the rows that a checkpoint covers. Loaders that
            resume then skip none: torchdata's `StatefulDataLoader`, Accelerate's
            `skip_first_batches`.

    Returns:
        Elements are `(x, y)`; `x` alone without `y`; a dict of all columns without both. A batch
        with the column "sample_weight" that neither names has it as another element at the end.
        Tensors are `[rows, …]` and own their memory. Strings and bytes are lists.

    Raises:
        FeedTypeError: when iterated, if a column is neither numbers nor times nor strings, or holds
            nulls, or arrays of different lengths that `pad` does not fill.
    """
    let_accelerate_keep_batches()
    for patch in _LOADING:
        if not patch.objection():  # workers are refused otherwise, a checkpoint asks for batches=
            patch.apply()
    if shared is not None:
        check_shared(batches.pad)
        no_sparse(batches.sparse, "with mesh=..., whose nodes exchange arrays")
    made: Any = _make(x, y, batches, shared)
    made._sparkdl_is_resumed = is_resumed
    return cast("IterableDataset[Any]", made)


_ACCELERATE = Patch(
    "accelerate.accelerator:prepare_data_loader",
    ("dataloader",),
    lambda stock, dataloader, *args, **kwargs: _prepare(stock, dataloader, *args, **kwargs),
)


def _begin(stock: Function, loading: Any, loader: Any) -> None:
    """Give batches to workers in the place of indices; those of a dataset by index take them."""
    stock(loading, loader)
    if isinstance(loading._dataset, _FeedDataset) and loading._num_workers:
        kinds: Any = import_module("torch.utils.data.dataloader")._DatasetKind
        loading._dataset_kind, loading._index_sampler = kinds.Map, _Ahead(loading._dataset)


def _next(stock: Function, loading: Any) -> Any:
    try:
        return stock(loading)
    except StopIteration:  # the workers were at the end of the epoch earlier
        dataset = loading._dataset
        if isinstance(dataset, _FeedDataset) and not dataset.is_read_ahead:
            for reader in readers_of(dataset):
                reader.reach_end()
        raise


_ITERATOR = "torch.utils.data.dataloader:{}DataLoaderIter."
_LOADING = (
    Patch(
        _ITERATOR.format("_Base") + "__init__",
        ("self", "loader"),
        _begin,
        ("_dataset_kind", "_index_sampler"),
    ),
    Patch(_ITERATOR.format("_MultiProcessing") + "_next_data", ("self",), _next),
)


def let_accelerate_keep_batches() -> None:
    """Make Hugging Face's Accelerate, where imported, use a node's batches as they are.

    Accelerate would shard a dataset among the processes, or let the first one read for all. A
    node's dataset holds its own rows already.
    """
    if "accelerate" not in sys.modules:
        return
    if objection := _ACCELERATE.objection():
        raise FrameworkMissingError(
            f"this Accelerate would shard the rows of a node's dataset a second time: {objection}. "
            "Install Accelerate 1.15, or use loaders of a node's dataset without "
            "accelerator.prepare"
        )
    _ACCELERATE.apply()
    for patch in _SKIPPING:
        if not patch.objection():
            patch.apply()


def _begin_at_first(stock: Function, loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
    stock(loader, dataset, *args, **kwargs)
    if isinstance(dataset, _FeedDataset):
        dataset.is_read_ahead = True  # these two read ahead, and do not shard
    if getattr(dataset, "_sparkdl_is_resumed", False):
        loader.skip_batches = 0


_SKIPPING = tuple(
    Patch(f"accelerate.data_loader:{kind}.__init__", ("self", "dataset"), _begin_at_first)
    for kind in ("DataLoaderShard", "SkipDataLoader")
)
"""Loaders that skip the batches before a checkpoint, which a resumed feed has left out already."""


def _prepare(stock: Function, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
    dataset = getattr(dataloader, "dataset", None)
    if isinstance(dataset, _FeedDataset):
        dataset.is_read_ahead = True
        if dataloader.batch_size is not None:
            dataloader = _loader_of_rows(dataset, dataloader)
    else:
        part = getattr(dataset, "_ex_iterable", None)  # of a datasets.IterableDataset
        while part is not None and not hasattr(part, "_sparkdl_loader"):
            part = getattr(part, "ex_iterable", None)
        if part is None:
            return stock(dataloader, *args, **kwargs)
        dataloader = part._sparkdl_loader(dataloader)
    bound = inspect.signature(stock).bind(dataloader, *args, **kwargs)
    alone = {"num_processes": 1, "process_index": 0, "torch_device_mesh": None}
    # As the only process it reads all of the dataset, which is this node's share.
    bound.arguments.update(alone, dispatch_batches=False, split_batches=False)
    return stock(*bound.args, **bound.kwargs)


def _loader_of_rows(dataset: _FeedDataset, loader: Any) -> Any:
    """Return a loader whose collator gets the rows of one batch of the feed, as a Trainer's does.

    Nodes in step take equally many batches, but the last ones may differ in size, so rows of two
    batches must not be mixed.
    """
    import torch

    batches = dataset._batches
    if batches is None or (dataset._x, dataset._y) != (None, None) or batches.tail == "pad":
        raise ConfigError(
            "a Trainer takes rows as dicts of columns: ctx.torch_dataset(batch_size) without x and "
            "y, and without tail='pad', whose weights it would ignore"
        )
    if batches.batch_size != loader.batch_size:
        raise ConfigError(
            f"batch_size={loader.batch_size}: must be that of ctx.torch_dataset, "
            f"{batches.batch_size}; with a Trainer set per_device_train_batch_size and "
            "per_device_eval_batch_size to it"
        )
    no_sparse(batches.sparse, "in a Trainer, which takes rows")
    dataset.gives_rows = True
    names = ("num_workers", "collate_fn", "prefetch_factor", "persistent_workers")
    options = {name: getattr(loader, name) for name in names}
    # PyTorch warns of it where there is no GPU, and a Trainer sets it by default.
    options["pin_memory"] = loader.pin_memory and torch.cuda.is_available()
    return torch.utils.data.DataLoader(dataset, batch_size=None, **options)


def called_by_accelerate() -> bool:
    """Return whether a loader of Accelerate's is among the callers.

    PyTorch's fetcher may stand between that loader and a dataset, so all callers count.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals.get("__name__") != "accelerate.data_loader":
        frame = frame.f_back
    return frame is not None


Plain = dict[str, Any]
"""Columns by name: arrays or tensors of numbers `[rows, …]`, or lists of other values."""


def plain(columns: Columns, with_ragged: bool = False) -> Plain:
    """Return columns as what a batch is made of: arrays of numbers, or lists of strings.

    Args:
        with_ragged: arrays of different lengths are lists, for a collator.
    """
    return {
        name: column.tolist() if with_ragged and _is_ragged(column) else _plain(name, column)
        for name, column in columns.items()
    }


@dataclass(eq=False)
class _FeedDataset:
    """All of the dataset but its base class, for torch is imported late."""

    _x: Names | None
    _y: Names | None
    _batches: EpochBatches | None = None
    """`None` in a worker that does not come from a fork."""
    _shared: SharedRows | None = None
    _pid: int = field(default_factory=os.getpid, init=False)
    is_read_ahead: bool = field(default=False, init=False)
    """The loop over it is a batch ahead of the training, so the rows used so far are unknown."""
    _sparkdl_is_resumed: bool = field(default=False, init=False)
    gives_rows: bool = field(default=False, init=False)
    """Elements are lists of rows, dicts of tensors: what a collator takes."""

    @property
    def _sparkdl_reader(self) -> FeedReader | None:
        """See `readers_of`."""
        return None if self._batches is None else self._batches.reader

    @property
    def _sparkdl_batches(self) -> EpochBatches | None:
        """See `batches_of`."""
        return self._batches

    def state_dict(self) -> dict[str, Any]:
        """Return no state: `ctx.checkpoint` saves which rows were used."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a loader from skipping batches: the feed has left out the used rows."""
        if not self._sparkdl_is_resumed:
            raise ConfigError(
                "the state of a loader says how many batches were used, not which rows: a feed "
                "resumes only from ctx.checkpoint. Save the loader's state within ctx.checkpoint, "
                "and load it only if there is a ctx.last_checkpoint"
            )

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, self.tensors(self.is_read_ahead))

    def __getitem__(self, tensors: Plain) -> Any:
        """Return the element that a batch is; in a worker, if there is one."""
        if not self.gives_rows:
            return arrange(tensors, self._x, self._y)
        columns = [
            [torch_from(name, np.array(v)) if isinstance(v, np.ndarray) else v for v in column]
            for name, column in tensors.items()
        ]
        return [dict(zip(tensors, row, strict=True)) for row in zip(*columns, strict=True)]

    def tensors(self, is_ahead: bool) -> Iterator[Plain]:
        """Begin an epoch; its batches are tensors by column, and lists of other values.

        Args:
            is_ahead: how many of the batches the training has used is unknown.
        """
        if self._batches is None or os.getpid() != self._pid:
            raise ConfigError(
                "the feed can be read only in the node's process, and this is another one. Give "
                "DataLoader(dataset, batch_size=None, num_workers=…) this dataset itself, not one "
                "derived from it"
            )
        if not self.is_read_ahead and called_by_accelerate():
            raise ConfigError(
                "Accelerate shares out the rows of this dataset, which are this node's share "
                "already: import accelerate before calling ctx.torch_dataset, which prevents this"
            )
        read = self._read(self._batches, is_ahead)
        own = (_own(plain(columns, self.gives_rows)) for columns in read)
        return map(_as_tensors, map(self._shared.exchange, own) if self._shared else own)

    def _read(self, batches: EpochBatches, is_ahead: bool) -> Iterator[Columns]:
        for columns in batches:
            if is_ahead:
                batches.reader.read_ahead(None)
            yield columns

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"gives_rows": self.gives_rows, "_sparkdl_is_resumed": self._sparkdl_is_resumed}
        return _make, (self._x, self._y), state


class _Ahead:
    """The batches of a dataset for a loader's workers; torchdata asks for its state."""

    def __init__(self, dataset: _FeedDataset) -> None:
        self._dataset = dataset
        self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[Plain]:
        return self._dataset.tensors(is_ahead=True)


def _make(*parts: Any) -> IterableDataset[Any]:
    """Return a `_FeedDataset` of these parts."""
    from torch.utils.data import IterableDataset

    kind: Any = type("FeedDataset", (_FeedDataset, IterableDataset), {})
    made: IterableDataset[Any] = kind(*parts)
    return made


def _plain(name: str, column: np.ndarray) -> np.ndarray | list[Any]:
    if is_csr(column):
        return column
    column = as_numbers(name, column)
    if column.dtype.kind in "biufc":
        # PyTorch knows this machine's byte order alone.
        return column.astype(column.dtype.newbyteorder("="), copy=False)
    if column.dtype.kind not in "OSU" or (column.dtype.kind == "O" and not is_text(column)):
        raise no_tensor(name, column, "PyTorch")
    values: list[Any] = column.tolist()
    return values


def _is_ragged(column: np.ndarray) -> bool:
    return column.dtype == object and all(
        isinstance(value, np.ndarray) and value.dtype.kind in "biufc" for value in column
    )


def _own(columns: Plain) -> Plain:
    """Copy the arrays shared with the feed: a tensor can be written to."""
    return {
        name: column if isinstance(column, list) or is_csr(column) else np.array(column, order="C")
        for name, column in columns.items()
    }


def tensors_of(columns: Columns) -> Plain:
    """Return columns as tensors of their own memory, and strings as lists."""
    return _as_tensors(_own(plain(columns)))


def _as_tensors(columns: Plain) -> Plain:
    return {
        name: column if isinstance(column, list) else torch_from(name, column)
        for name, column in columns.items()
    }


def torch_from(name: str, column: np.ndarray) -> Any:
    import torch

    if is_csr(column):
        csr: Any = column
        parts = [np.array(part, np.int64) for part in (csr.indptr, csr.indices)]
        numbers = map(torch.from_numpy, [*parts, np.array(csr.data)])
        return torch.sparse_csr_tensor(*numbers, size=csr.shape, check_invariants=True)
    try:
        return torch.from_numpy(column)
    except TypeError as error:
        raise FeedTypeError(
            f"column {name!r} has no type of PyTorch: {error}. Cast it to numbers or bool before "
            "feeding"
        ) from None


class SharedRows:
    """The nodes that differ in no data axis of a mesh, and so compute on the same rows.

    All nodes of the mesh make one, and exchange the same number of batches. The exchange has a
    process group of its own, of gloo: rows are in the host's memory, and no collective of the
    training comes in between.

    Attributes:
        members: how many nodes share a batch.
    """

    def __init__(self, mesh: DeviceMesh, data_axes: str | Sequence[str]) -> None:
        from torch import distributed

        names = mesh.mesh_dim_names or ()
        axes = [data_axes] if isinstance(data_axes, str) else data_axes
        groups = same_rows(mesh.mesh.numpy(), names, axes)
        nodes = distributed.get_world_size()
        if mesh.mesh.numel() != nodes:
            raise ConfigError(
                f"the mesh has {mesh.mesh.numel()} places, and {nodes} nodes train: rows can be "
                "shared over all of them only, as ctx.mesh(...) makes it"
            )
        self.members = len(groups[0])
        self._group: Any = None
        if self.members > 1:
            self._group, _ = distributed.new_subgroups_by_enumeration(groups, backend="gloo")

    def in_step(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of `ctx.batches` with `even=True`."""
        if options.get("even") is False:
            raise ConfigError(
                "even=False: with mesh=... the nodes exchange rows in each step, so all of them "
                "take the same number of steps. Leave it out"
            )
        return {**options, "even": True}

    def exchange(self, columns: Plain) -> Plain:
        """Return the rows that all members have read, in their order, on each of them."""
        if self.members == 1:
            return columns
        sent = {name: _packed(column) for name, column in columns.items()}
        # Lengths first: only the sender knows how long its packed strings are.
        own = np.array([[len(array) for array in sent.values()]], np.int64)
        lengths = np.concatenate(self._gathered(own, [1] * self.members))
        found: Plain = {}
        for (name, array), counts in zip(sent.items(), lengths.T.tolist(), strict=True):
            parts = self._gathered(array, counts)
            if isinstance(columns[name], list):
                found[name] = [value for part in parts for value in _texts(part)]
            else:
                found[name] = np.concatenate(parts)
        return found

    def _gathered(self, array: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
        """Return each member's array; they differ in the first dimension alone.

        Args:
            counts: the first dimension of each.
        """
        from torch import distributed

        # The collective wants arrays of one size, so shorter ones are filled up and cut again.
        sent = np.zeros((max(counts), *array.shape[1:]), array.dtype)
        sent[: len(array)] = array
        found = np.empty((self.members, *sent.shape), array.dtype)
        distributed.all_gather_into_tensor(_bytes(found), _bytes(sent), group=self._group)
        return [part[:count] for part, count in zip(found, counts, strict=True)]


def _packed(column: np.ndarray | list[Any]) -> np.ndarray:
    if not isinstance(column, list):
        return column
    return np.frombuffer(msgspec.msgpack.encode(column), np.uint8)


def _texts(packed: np.ndarray) -> list[str | bytes | None]:
    texts: list[str | bytes | None] = msgspec.msgpack.decode(packed.tobytes())
    return texts


def _bytes(array: np.ndarray) -> torch.Tensor:
    """Return an array's memory: gloo does not know all of numpy's types."""
    import torch

    return torch.from_numpy(array.reshape(-1).view(np.uint8))
