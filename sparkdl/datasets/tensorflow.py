"""One epoch of a feed as a `tf.data.Dataset`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.core.errors import FeedTypeError, SparkdlError
from sparkdl.core.patch import Function, Patch
from sparkdl.feed.reader.batches import EpochBatches, Names, arrange
from sparkdl.feed.reader.reader import FeedReader
from sparkdl.values.columns import Columns, is_csr, is_text, objects_in, places
from sparkdl.values.ndarrays import Array
from sparkdl.values.tensors import MASK, as_numbers, no_tensor

if TYPE_CHECKING:
    import tensorflow as tf

_MARK = "_sparkdl_is_step_batched"
_READER = "_sparkdl_reader"
_BATCHES = "_sparkdl_batches"
_ONE_BY_ONE = ("_MapDataset", "_ParallelMapDataset", "_PrefetchDataset", "_OptionsDataset")
"""Datasets of TensorFlow that have as many elements as their input."""
_SOURCE = "_sparkdl_source"
"""The attribute for the original dataset, on a dataset that a strategy has distributed."""


def tf_dataset(
    batches: EpochBatches, x: Names | None, y: Names | None, ahead: int = 0
) -> tf.data.Dataset:
    """Return a dataset whose every iteration is one epoch of the feed, see `ctx.dataset`.

    Args:
        ahead: batches that are made ready while others are used.
    """
    import tensorflow as tf

    first = batches.peek()
    if first is None:
        raise batches.reader.end_of_feed()
    specs = specs_of(batches, batches.sample(first))
    signature = arrange(specs, x, y)

    read: list[Iterator[Any]] = []

    def epoch() -> Iterator[Any]:
        read.clear()
        try:
            for columns in (steps := batches.ahead()):
                if columns is None:
                    read.append(steps)
                    return
                # tf.data may read any number of batches ahead, and does not say how many.
                batches.reader.read_ahead(None)
                yield arrange(tensors(columns, specs), x, y)
        except SparkdlError as problem:
            # TensorFlow makes an error of its own of it, in which class and cause are lost.
            batches.reader.registry.raised = problem
            raise

    def end() -> Iterator[Any]:
        for steps in read:
            yield from steps

    dataset = tf.data.Dataset.from_generator(epoch, output_signature=signature)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # A hidden prefetch would take rows that a peek at the first batch can't give back.
    options.experimental_optimization.inject_prefetch = False
    # TensorFlow 2.21's autotuning thread sometimes oversleeps the end of its iterator by as long as
    # the iterator has lived, and the next epoch waits for it. Nothing here needs tuning; a later
    # `map` with AUTOTUNE has a thread per core, and `with_options` turns tuning on again.
    options.autotune.enabled = False
    dataset = dataset.with_options(options)
    if ahead:
        dataset = dataset.prefetch(ahead)
    # Behind the prefetch: an epoch is over when all its batches have been asked for, so that one
    # whose first batch was looked at begins again, however short it is.
    ending = tf.data.Dataset.from_generator(end, output_signature=signature)
    dataset = dataset.concatenate(ending)
    setattr(dataset, _MARK, True)
    setattr(dataset, _READER, batches.reader)
    setattr(dataset, _BATCHES, batches)
    let_strategies_keep_batches()
    _see_ends()
    return dataset


def _see_ends() -> None:
    for patch in _SEE_ENDS:
        if not patch.objection():  # a checkpoint at an epoch's end asks for batches= otherwise
            patch.apply()


class Fed:
    """The mark of other data than TensorFlow's datasets: its feed, see `readers_of`."""

    def __init__(self, batches: EpochBatches) -> None:
        setattr(self, _READER, batches.reader)
        setattr(self, _BATCHES, batches)


def readers_of(dataset: Any) -> list[FeedReader]:
    """Return the readers of the feeds that `dataset` comes from, none for anything else."""
    if reader := getattr(dataset, _READER, None):
        return [reader]
    loaded = getattr(dataset, "dataset", None)  # by a DataLoader of PyTorch
    inputs = _inputs(dataset) if loaded is None else [loaded]
    return [reader for part in inputs for reader in readers_of(part)]


def batches_of(data: Any) -> EpochBatches | None:
    """Return the batches of the feed that `data` gives one by one; `None` for anything else."""
    data = getattr(data, _SOURCE, data)
    if (loaded := getattr(data, "dataset", None)) is not None and data.batch_size is None:
        data = loaded
    while (batches := getattr(data, _BATCHES, None)) is None:
        inputs = _inputs(data) if type(data).__name__ in _ONE_BY_ONE else []
        if len(inputs) != 1:
            return None
        data = inputs[0]
    found: EpochBatches = batches
    return found


def _inputs(dataset: Any) -> list[Any]:
    inputs: list[Any] = getattr(dataset, "_inputs", lambda: [])()
    return inputs


def specs_of(batches: EpochBatches, sample: Columns) -> dict[str, Any]:
    """Return the tensor specs of the columns; `sample` is the first batch."""
    import tensorflow as tf

    rows = batches.batch_size if batches.tail == "pad" else None
    specs = {name: spec_of(name, column, rows) for name, column in sample.items()}
    for name in (name for name, length in batches.pad.items() if length is None):
        for each in specs.keys() & {name, name + MASK}:
            shape = (rows, None, *specs[each].shape[2:])
            specs[each] = tf.TensorSpec(shape, specs[each].dtype)
    return specs


def spec_of(name: str, column: Array, rows: int | None) -> Any:
    """Return what a column is as a tensor; `rows` is the fixed size of a batch, if it has one."""
    import tensorflow as tf

    if is_csr(column):
        return tf.SparseTensorSpec((rows, column.shape[1]), column.dtype)
    column = as_numbers(name, column)
    if column.dtype == object and not is_text(column.reshape(-1)):
        raise no_tensor(name, column, "TensorFlow")
    dtype = tf.string if column.dtype == object else tf.as_dtype(column.dtype)
    return tf.TensorSpec((rows, *column.shape[1:]), dtype)


def tensors(columns: Columns, specs: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns as their specs say. Refuse other columns."""
    return {name: _tensor(name, column, specs[name]) for name, column in columns.items()}


def _tensor(name: str, column: Array, spec: Any) -> Any:
    column = column if is_csr(column) else as_numbers(name, column)
    dtype, inner = np.dtype(spec.dtype.as_numpy_dtype), spec.shape.as_list()[1:]
    sizes = column.shape[1:]
    fits = len(inner) == len(sizes) and all(
        wanted in (None, size) for wanted, size in zip(inner, sizes, strict=True)
    )
    if not fits or (column.size and not np.can_cast(column.dtype, dtype, "same_kind")):
        raise FeedTypeError(
            f"column {name!r} held {dtype} {inner} in the first rows, and holds "
            f"{objects_in(column)} now. Feed rows of one type and shape, or, for arrays of any "
            f"length, pad={{{name!r}: None}}"
        )
    return _sparse(column) if is_csr(column) else column


def _sparse(column: Any) -> tf.SparseTensor:
    import tensorflow as tf

    return tf.SparseTensor(places(column), column.data, column.shape)


def let_strategies_keep_batches() -> None:
    """Make strategies that span several nodes take our batches as they are. Imports TensorFlow.

    `experimental_distribute_dataset` cuts each batch into one part per replica of the whole
    cluster, assuming that every node reads the same global batches. A node's feed holds that node's
    rows only, so its datasets go in as per-node datasets.
    """
    _KEEP_BATCHES.apply()


def _distribute(stock: Function, strategy: Any, dataset: Any, options: Any = None) -> Any:
    spans_nodes = getattr(strategy.extended, "_num_workers", 1) > 1
    if spans_nodes and _is_step_batched(dataset):
        found = strategy.distribute_datasets_from_function(lambda _context: dataset, options)
    else:
        found = stock(strategy, dataset, options)
    with suppress(AttributeError):  # without a strategy it is a dataset of TensorFlow's own
        setattr(found, _SOURCE, dataset)
    return found


_KEEP_BATCHES = Patch(
    "tensorflow:distribute.Strategy.experimental_distribute_dataset",
    ("self", "dataset"),
    _distribute,
)


def _next(stock: Function, iterator: Any) -> Any:
    try:
        return stock(iterator)
    except StopIteration:
        for part in getattr(iterator, "_iterators", [iterator]):
            for reader in readers_of(getattr(part, "_dataset", None)):
                reader.reach_end()
        raise


_SEE_ENDS = (
    Patch("tensorflow.python.data.ops.iterator_ops:OwnedIterator.__next__", ("self",), _next),
    Patch(
        "tensorflow.python.distribute.input_lib:DistributedIteratorBase.__next__", ("self",), _next
    ),
)
"""An epoch ends for the training later than for the generator: tf.data reads ahead."""


def _is_step_batched(dataset: Any) -> bool:
    """Whether `dataset` is sparkdl's, or comes from one without being batched again."""
    if getattr(dataset, _MARK, False):
        return True
    if "batch" in type(dataset).__name__.lower():
        return False
    inputs = _inputs(dataset)
    return len(inputs) == 1 and _is_step_batched(inputs[0])
