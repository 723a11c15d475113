"""A feed as a `datasets.IterableDataset`, for trainers that take these alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.datasets.torch import called_by_accelerate, let_accelerate_keep_batches, plain
from sparkdl.feed.reader.batches import Columns, EpochBatches
from sparkdl.values.tensors import no_sparse

_ONE_FOR_ONE = ("SelectColumnsIterable", "FormattedExamplesIterable")
_log = logging.getLogger(__name__)


def hf_dataset(batches: EpochBatches, is_resumed: bool = False) -> Any:
    """Return the rows of batches as a `datasets.IterableDataset`; each iteration is one epoch.

    Rows are dicts of Python's numbers, strings, bytes and (nested) lists. The features have the
    columns' types, times as `int64`; arrays of `[rows, …]` are lists of lists.

    Args:
        batches: of whole epochs, all full, and the same number on each node.
        is_resumed: whether the feed begins behind the rows that a checkpoint covers.
    """
    if batches.steps is not None:
        raise ConfigError(
            f"steps={batches.steps}: must be None in ctx.hf_dataset. Set the trainer's max_steps"
        )
    if batches.tail != "drop":
        raise ConfigError(
            f"tail={batches.tail!r}: must be 'drop' in ctx.hf_dataset, because trainers "
            "batch its rows again, and all nodes must take the same number of steps"
        )
    no_sparse(batches.sparse, "in ctx.hf_dataset, whose rows are lists")
    try:
        library = import_module("datasets")
        iterables = import_module("datasets.iterable_dataset")
    except ImportError as error:
        raise FrameworkMissingError(
            f"ctx.hf_dataset needs Hugging Face's datasets ({error}): pip install datasets"
        ) from error
    let_accelerate_keep_batches()
    sample = batches.peek()
    features = None
    if sample is not None:
        columns = plain(batches.sample(sample), with_ragged=True)
        schema = pa.schema([(name, _type_of(column)) for name, column in columns.items()])
        features = library.Features.from_arrow_schema(schema)
    kind: Any = type("FeedExamples", (_FeedExamples, iterables._BaseExamplesIterable), {})
    info = library.DatasetInfo(features=features)
    return library.IterableDataset(kind(batches, is_resumed), info=info)


def _type_of(column: Any) -> pa.DataType:
    if isinstance(column, list):
        if not isinstance(column[0], np.ndarray):
            return pa.binary() if isinstance(column[0], bytes) else pa.string()
        column = column[0][None]
    found = pa.from_numpy_dtype(column.dtype)
    for _ in column.shape[1:]:
        found = pa.list_(found)
    return found


class _FeedExamples:
    """The rows of a feed, all but the base class, for `datasets` is imported late.

    Attributes:
        is_prepared: Accelerate's loaders of it do not shard it again.
        group: of all nodes, by which they agree on steps.
        ends: batches given to trainers by the end of each epoch, and those of the feed.
    """

    num_shards = 1
    sleep_on_threads_shutdown = False

    def __init__(self, batches: EpochBatches, is_resumed: bool) -> None:
        super().__init__()
        self.batches, self.is_resumed = batches, is_resumed
        self.is_prepared = False
        self.group: Any = None
        self.ends = {0: 0}
        self._state_dict: dict[str, Any] | None = None
        self._pass: Iterator[Columns] = iter(())
        self._owner = -1
        self._head: Columns | None = None
        """The first batch of a pass of which nothing else was asked for."""

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        from torch.utils.data import get_worker_info

        if get_worker_info() is not None:
            raise _no_workers()
        if not self.is_prepared and called_by_accelerate():
            raise ConfigError(
                "Accelerate would shard the rows of ctx.hf_dataset, which are this node's share "
                "already. Import accelerate before the call, and do not mix the dataset with others"
            )
        if self._state_dict and self._state_dict["rows"]:
            raise ConfigError(
                "the state of a dataset says how many rows were used, not which: a feed resumes "
                "only from ctx.checkpoint. Leave out load_state_dict"
            )
        reader = self.batches.reader
        # Trainers look at the first row more often than once: no pass is abandoned for it.
        if self._head is None or not reader.owns(self._owner):
            self._pass = iter(self.batches)
            self._owner = reader._owner
            self._head = next(self._pass, None)
        key, columns, passing = 0, self._head, self._pass
        while columns is not None:
            reader.read_ahead(None)
            for row in _rows_of(columns):
                if self._state_dict is not None:
                    self._state_dict["rows"] = key + 1
                yield key, row
                key += 1
            if passing is not self._pass:
                return
            self._head, columns = None, next(passing, None)
        if self._state_dict is not None:
            self._state_dict["rows"] = 0

    def __copy__(self) -> _FeedExamples:
        return self

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict = {"rows": 0, "type": "FeedExamples"}
        return self._state_dict

    def shuffle_data_sources(self, generator: np.random.Generator) -> _FeedExamples:
        return self

    def reshard_data_sources(self) -> _FeedExamples:
        return self

    def shard_data_sources(
        self, num_shards: int, index: int, contiguous: bool = True
    ) -> _FeedExamples:
        if num_shards > 1:
            raise ConfigError(
                "ctx.hf_dataset holds this node's share of the rows already: leave out shard and "
                "split_dataset_by_node"
            )
        return self

    def _sparkdl_loader(self, loader: Any) -> Any:
        """Return a loader of this node's rows, of as many batches as on all other nodes."""
        import torch

        if loader.dataset._distributed is not None:
            self.shard_data_sources(2, 0)
        if loader.num_workers:
            raise _no_workers()
        self.is_prepared = True
        kind: Any = type("LoadedRows", (LoadedRows, torch.utils.data.IterableDataset), {})
        rows = kind(self, loader.dataset, loader.batch_size)
        pins = loader.pin_memory and torch.cuda.is_available()
        return torch.utils.data.DataLoader(
            rows, batch_size=None, collate_fn=loader.collate_fn, pin_memory=pins
        )


def _no_workers() -> ConfigError:
    return ConfigError(
        "ctx.hf_dataset must be read in the node's process: set num_workers=0 "
        "(dataloader_num_workers=0), or use ctx.torch_dataset"
    )


def _rows_of(columns: Columns) -> Iterator[dict[str, Any]]:
    lists = [_listed(column) for column in plain(columns, with_ragged=True).values()]
    return (dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True))


def _listed(column: Any) -> list[Any]:
    if isinstance(column, np.ndarray):
        return list(column.tolist())
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in column]


class LoadedRows:
    """Lists of rows of a mapped `ctx.hf_dataset`; each iteration is one epoch.

    Attributes:
        is_exact: the batches are those of the feed: no row is left out, added, or packed.
    """

    def __init__(self, examples: _FeedExamples, dataset: Any, batch_size: int) -> None:
        from torch import distributed

        self._examples, self._dataset, self._batch_size = examples, dataset, batch_size
        self._sparkdl_is_resumed = examples.is_resumed
        self.is_exact = batch_size == examples.batches.batch_size and _is_one_for_one(dataset)
        if not self.is_exact and distributed.is_initialized() and examples.group is None:
            examples.group = distributed.new_group(backend="gloo")
        self._group = None if self.is_exact else examples.group

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        given = max(self._examples.ends)
        rows = iter(self._dataset)
        while True:
            batch = list(islice(rows, self._batch_size))
            if not self._has_row_everywhere(len(batch)):
                break
            given += 1
            yield batch
        left_out = len(batch) + sum(1 for _ in rows)
        if left_out:
            _log.warning(
                "%d examples at the end of an epoch were not used: another node had none left, and "
                "all nodes take the same number of steps",
                left_out,
            )
        self._examples.ends[given] = self._examples.batches.reader.batches_ended

    def used(self, batches: int) -> int | None:
        """Return how many batches of the feed so many batches have used, `None` if unknown."""
        return batches if self.is_exact else self._examples.ends.get(batches)

    def _has_row_everywhere(self, rows: int) -> bool:
        if self._group is None:
            return rows > 0
        import torch

        least = torch.tensor(rows)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=self._group)
        return bool(least > 0)

    def check(self, batches: int | None, save_strategy: str) -> None:
        """Check that the rows used are known after so many batches; before the first, at each save.

        Raises:
            ConfigError: if they are not.
        """
        known = (
            save_strategy in ("epoch", "no") if batches is None else self.used(batches) is not None
        )
        if not (self.is_exact or known):
            raise ConfigError(
                f"save_strategy={save_strategy!r} must be 'epoch' or 'no', and epochs complete: "
                "the rows used are unknown within one, because ctx.hf_dataset is filtered, packed "
                "or mapped by batches, or its batch_size is not per_device_train_batch_size. Set "
                "save_strategy='epoch', or map single rows and use one batch size"
            )


def _is_one_for_one(dataset: Any) -> bool:
    found = dataset._ex_iterable
    while not isinstance(found, _FeedExamples):
        kind = type(found).__name__
        is_map = kind == "MappedExamplesIterable" and not found.batched
        is_rebatched = kind == "RebatchedArrowExamplesIterable" and not found.drop_last_batch
        if not (is_map or is_rebatched or kind in _ONE_FOR_ONE):
            return False
        found = found.ex_iterable
    return True
