"""A feed as a dataset of PyTorch, for a `DataLoader` with any number of workers.

Runs in: child
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from multiprocessing.context import assert_spawning
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.feed.adapters.elements import Names, arrange
from sparkdl.feed.adapters.shared_columns import Columns, Plain
from sparkdl.feed.adapters.torch_workers import BatchServer, Hello, batches_from
from sparkdl.feed.reader.batches import EpochBatches

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset

    from sparkdl.feed.adapters.torch_mesh import SharedRows


def torch_dataset(
    batches: EpochBatches,
    x: Names | None = None,
    y: Names | None = None,
    shared: SharedRows | None = None,
) -> IterableDataset[Any]:
    """Return a dataset whose elements are batches and whose every iteration is one epoch.

    It is meant for `DataLoader(dataset, batch_size=None)`: batches are made already, and any other
    `batch_size` would make batches of batches. A transform goes into the loader's `collate_fn`,
    which gets a batch. A dataset and its loader have no `len()`, for nobody knows the length of an
    epoch before its end.

    With `num_workers` the loader's workers get each batch of the epoch once between them, whoever
    asks next; the order in which they come out is the loader's. Iterate one loader at a time: who
    begins takes the feed over, and the others' epoch ends. What workers have read ahead when a
    loop is left early is given back with the rest of the epoch, unless it was the epoch's last.
    Workers of the start method "fork" keep the feed's memory of that moment as long as they live;
    `multiprocessing_context="forkserver"` does not.

    Args:
        x: column of the features, or several columns for a dict of features.
        y: column or columns of the labels.
        shared: with whom this node shares its rows. Such a dataset is read without workers.

    Returns:
        Elements are `(x, y)`; `x` alone without `y`; a dict of all columns without both. A batch
        with the column "sample_weight" that neither names has it as another element at the end.
        Tensors are `[rows, …]` and own their memory. Strings and bytes are lists, `None` where
        null.

    Raises:
        FeedTypeError: when iterated, if a column is neither numbers nor strings.
    """
    handout = BatchServer(batches, plain)
    return _make(handout.door, x, y, batches, handout, shared)


def plain(columns: Columns) -> Plain:
    """Return columns as what a batch is made of: arrays of numbers, or lists of strings.

    Raises:
        FeedTypeError: if a column is neither.
    """
    return {name: _plain(name, column) for name, column in columns.items()}


class _FeedDataset:
    """All of the dataset but its base class, for torch is imported late."""

    def __init__(
        self,
        door: socket.socket,
        x: Names | None,
        y: Names | None,
        batches: EpochBatches | None,
        handout: BatchServer | None,
        shared: SharedRows | None,
    ) -> None:
        self._door, self._x, self._y = door, x, y
        self._batches, self._handout, self._shared = batches, handout, shared
        self._pid = os.getpid()
        self._iterations = 0

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        if worker is not None and self._shared is not None:
            raise ConfigError(
                "with mesh=... the nodes exchange their rows, which workers of a DataLoader "
                "cannot: use num_workers=0, and transform the batches in the training loop"
            )
        if worker is not None:
            loader = worker.seed - worker.id
            hello = Hello(loader, worker.num_workers, worker.id, self._iterations)
            self._iterations += 1
            return self._elements(batches_from(self._door, hello))
        if self._batches is None or os.getpid() != self._pid:
            raise ConfigError(
                "the feed can be read in the node's process and in the workers of a DataLoader, "
                "and this is neither. Use DataLoader(dataset, batch_size=None, num_workers=…)"
            )
        own = (_own(plain(columns)) for columns in self._batches)
        return self._elements(map(self._shared.exchange, own) if self._shared else own)

    def __reduce__(self) -> tuple[Any, ...]:
        assert_spawning(self)
        if self._shared is not None:
            raise ConfigError("with mesh=... a DataLoader must have num_workers=0")
        return _make, (self._door, self._x, self._y, None, None, None)

    def _elements(self, batches: Iterator[Plain]) -> Iterator[Any]:
        for columns in batches:
            tensors = {name: _tensor(name, part) for name, part in columns.items()}
            yield arrange(tensors, self._x, self._y)


def _make(
    door: socket.socket,
    x: Names | None,
    y: Names | None,
    batches: EpochBatches | None,
    handout: BatchServer | None,
    shared: SharedRows | None,
) -> IterableDataset[Any]:
    from torch.utils.data import IterableDataset

    kind: Any = type("FeedDataset", (_FeedDataset, IterableDataset), {})
    made: IterableDataset[Any] = kind(door, x, y, batches, handout, shared)
    return made


def _plain(name: str, column: np.ndarray) -> np.ndarray | list[Any]:
    if column.dtype.kind in "biufc":
        return column.astype(column.dtype.newbyteorder("="), copy=False)
    if column.dtype.kind not in "OSU":
        raise FeedTypeError(
            f"column {name!r} is of type {column.dtype}, which PyTorch does not have; feed it as a "
            "number, or read it with ctx.batches()"
        )
    values: list[Any] = column.tolist()
    if column.dtype.kind == "O":
        for value in values:
            if not isinstance(value, (str, bytes, type(None))):
                raise FeedTypeError(
                    f"column {name!r} holds {type(value).__name__} values that make no tensor; "
                    "arrays must have one shape in all rows, or be read with ctx.batches()"
                )
    return values


def _own(columns: Plain) -> Plain:
    """Copy what is shared with the feed: a tensor can be written to."""
    return {
        name: column if isinstance(column, list) else np.array(column, order="C")
        for name, column in columns.items()
    }


def _tensor(name: str, column: np.ndarray | list[Any]) -> Any:
    import torch

    if isinstance(column, list):
        return column
    try:
        return torch.from_numpy(column)
    except TypeError as error:
        raise FeedTypeError(f"column {name!r}: {error}") from None
