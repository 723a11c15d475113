"""Changes to Keras 3 so that it trains on several workers with TensorFlow.

Stock Keras 3 fails in `fit` under a `MultiWorkerMirroredStrategy` of several workers, and all of
them write the same files. `apply_shim` changes, for such strategies only:

- the logs of a step are reduced over the workers as the scalars they are;
- a model is built from the element spec of its data: no batch is taken from a stream that can be
  read once, and no collective is needed (stock Keras averages the first batch of all workers);
- `predict` and `predict_on_batch` stay in this process: a worker gets the predictions for the rows
  it passed, in order, and does not wait for other workers (a `DistributedDataset` still gives all
  rows to all);
- only the chief writes. The others save to a folder that is deleted: reading a metric of the model
  is a collective, so all workers must take part in saving;
- `BackupAndRestore` is refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import PurePath
from typing import Any

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.files import scratch_folder
from sparkdl.core.patch import Function, Patch
from sparkdl.datasets.tensorflow import readers_of

_logger = logging.getLogger(__name__)

KNOWN_VERSIONS = "3.12 to 3.15"
"""The versions of Keras with which the tests have passed, at both ends."""


def apply_shim() -> None:
    """Make the imported Keras train on several workers. A second call changes nothing.

    With an unknown version of Keras, only `compile` of a model of several workers changes: it
    raises `FrameworkMissingError`. Programs that do not need the shim thus still run.
    """
    if import_module("keras").backend.backend() != "tensorflow":
        return
    # All or none, because the changes rely on one another.
    objections = [text for patch in _PATCHES if (text := patch.objection())]
    if objections:
        _logger.warning("this Keras cannot be used with several workers: %s", objections[0])
        replace(_COMPILE, replacement=functools.partial(_refuse, objections[0])).apply()
        return
    for patch in _PATCHES:
        patch.apply()


def refuse_adapting(library: str) -> None:
    """Make `adapt` of preprocessing layers refuse the feed of a node, which is one of several.

    Each node has rows of its own: vocabularies and means would differ from node to node.
    """
    for target in _ADAPTING[library]:
        patch = Patch(f"{target}.adapt", ("self",), _adapt)
        if not patch.objection():
            patch.apply()


def _adapt(stock: Function, layer: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    if readers_of(data):
        raise ConfigError(
            f"{type(layer).__name__}.adapt() was given the feed of one of several nodes: each node "
            "would learn other values from its own rows. Compute the values in the driver, from "
            "the DataFrame, and give them to the layer: vocabulary=…, mean= and variance=…, "
            "bin_boundaries=…"
        )
    return stock(layer, data, *args, **kwargs)


def spans_workers(strategy: Any) -> bool:
    if strategy is None:
        return False
    import tensorflow as tf

    spanning = tf.distribute.MultiWorkerMirroredStrategy
    return isinstance(strategy, spanning) and bool(strategy.extended._in_multi_worker_mode())


def _strategy(model: Any) -> Any:
    """Return the strategy of several workers that `model` was created under, or `None`."""
    strategy = getattr(model, "_distribute_strategy", None)
    return strategy if spans_workers(strategy) else None


def _writes(model: Any) -> bool:
    strategy = _strategy(model)
    return strategy is None or bool(strategy.extended.should_checkpoint)


def _refuse(reason: str, stock: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
    if _strategy(model) is None:
        return stock(model, *args, **kwargs)
    raise FrameworkMissingError(
        f"Keras {import_module('keras').__version__} cannot train on several workers: {reason}. "
        f"Install a Keras that sparkdl knows ({KNOWN_VERSIONS}), or install tf_keras and set "
        "TF_USE_LEGACY_KERAS=1 for the executors (spark.executorEnv.TF_USE_LEGACY_KERAS), or "
        "write the training loop with strategy.run"
    )


def _compile(stock: Function, model: Any, *args: Any, **kwargs: Any) -> None:
    stock(model, *args, **kwargs)
    if _strategy(model) is not None and model.steps_per_execution != 1:
        # TensorFlow fails on Keras's loop over steps where each step waits for other workers.
        _logger.warning(
            "steps_per_execution=%s is taken as 1 with several workers: leave it out of compile()",
            model.steps_per_execution,
        )
        model.steps_per_execution = 1


def _reduce(stock: Function, values: Any, strategy: Any, reduction: str) -> Any:
    operation = {"auto": "MEAN", "mean": "MEAN", "sum": "SUM"}.get(reduction)
    if operation is None or not spans_workers(strategy):
        return stock(values, strategy, reduction)
    reduce = functools.partial(strategy.reduce, operation, axis=None)
    return import_module("keras").tree.map_structure(reduce, values)


def _build(stock: Function, model: Any, iterator: Any = None, data_batch: Any = None) -> None:
    strategy = _strategy(model)
    if iterator is not None and strategy is not None:
        data_batch, iterator = _specimen(strategy, iterator), None
    stock(model, iterator, data_batch)


def _specimen(strategy: Any, iterator: Any) -> Any:
    """Return the spec of one replica's batch, or a batch if the spec lacks shapes."""
    tree = import_module("keras").tree
    spec = tree.map_structure(_local_spec, iterator._distributed_dataset.element_spec)
    if all(leaf is None or leaf.shape.rank is not None for leaf in tree.flatten(spec)):
        return spec
    _, _, batches = next(iter(iterator))
    return tree.map_structure(
        lambda value: strategy.experimental_local_results(value)[0], next(batches)
    )


def _local_spec(spec: Any) -> Any:
    """Return the spec of the first replica's part; `None` for an input that is absent."""
    first = spec._value_specs[0] if hasattr(spec, "_value_specs") else spec
    return first if hasattr(first, "shape") and hasattr(first, "dtype") else None


class _ThisProcess:
    def run(self, function: Function, args: tuple[Any, ...]) -> Any:
        return function(*args)

    def experimental_distribute_dataset(self, dataset: Any) -> Any:
        return dataset


def _predict(stock: Function, model: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    import tensorflow as tf

    strategy = _strategy(model)
    if strategy is None or isinstance(x, tf.distribute.DistributedDataset):
        return stock(model, x, *args, **kwargs)
    # Variables have to be created under the strategy, in the rare case that there are none yet.
    scope = contextlib.nullcontext() if model.built else strategy.scope()
    # Keras looks the strategy up by this attribute whenever it makes a function or a dataset.
    model._distribute_strategy = _ThisProcess()
    try:
        with scope:
            return stock(model, x, *args, **kwargs)
    finally:
        model._distribute_strategy = strategy


@contextlib.contextmanager
def _private_path(path: Any) -> Iterator[str]:
    """Yield a path of the same name that is deleted afterwards."""
    with scratch_folder() as folder:
        yield str(folder / PurePath(str(path)).name)


def _save(stock: Function, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    # A file object is each worker's own, so nothing can be overwritten.
    if _writes(model) or not isinstance(filepath, (str, os.PathLike)):
        return stock(model, filepath, *args, **kwargs)
    with _private_path(filepath) as private:
        return stock(model, private, *args, **kwargs)


def _checkpoint(stock: Function, callback: Any, *args: Any, **kwargs: Any) -> Any:
    if _writes(callback.model):
        return stock(callback, *args, **kwargs)
    filepath = callback.filepath
    with _private_path(filepath) as private:
        # Keras formats the name itself, and this is the only place where it takes the path from.
        callback.filepath = private
        try:
            return stock(callback, *args, **kwargs)
        finally:
            callback.filepath = filepath


def _back_up(stock: Function, callback: Any, *args: Any, **kwargs: Any) -> None:
    if _strategy(callback.model) is not None:
        raise ConfigError(
            "BackupAndRestore on several workers: each could resume at another epoch. Use "
            "sparkdl.keras.Checkpoint(ctx), from which all of them resume together"
        )
    stock(callback, *args, **kwargs)


_LAYERS = "keras.src.layers.preprocessing"
_ADAPTING = {
    "keras": (
        f"{_LAYERS}.index_lookup:IndexLookup",
        f"{_LAYERS}.text_vectorization:TextVectorization",
        f"{_LAYERS}.normalization:Normalization",
        f"{_LAYERS}.discretization:Discretization",
        f"{_LAYERS}.feature_space:FeatureSpace",
    ),
    "tf_keras": ("tf_keras.src.engine.base_preprocessing_layer:PreprocessingLayer",),
}
_TRAINER = "keras.src.backend.tensorflow.trainer"
_MODEL = f"{_TRAINER}:TensorFlowTrainer"
_STEP = ("distribute_strategy", "run", "reduce_per_replica")
_DATA = ("_distributed_dataset", "experimental_distribute_dataset")
_CALLBACKS = "keras.src.callbacks"
_BACKUP = f"{_CALLBACKS}.backup_and_restore:BackupAndRestore"
_TO_FILE = ("model", "filepath")
# Where Keras itself has it: loading takes a `compile` of any other class for a custom one.
_COMPILE = Patch("keras.src.trainers.trainer:Trainer.compile", ("self",), _compile)
_PATCHES = (
    _COMPILE,
    # Without a replacement nothing changes: a Keras on which the others cannot work is refused.
    Patch(f"{_MODEL}._make_function", ("self",), None, _STEP),
    Patch(f"{_MODEL}.make_predict_function", ("self",), None, _STEP),
    Patch(f"{_MODEL}.predict", ("self", "x"), _predict),
    Patch(f"{_MODEL}.predict_on_batch", ("self", "x"), _predict),
    Patch(f"{_TRAINER}:reduce_per_replica", ("values", "strategy", "reduction"), _reduce),
    Patch(f"{_MODEL}._maybe_symbolic_build", ("self", "iterator", "data_batch"), _build),
    Patch(f"{_TRAINER}:TFEpochIterator.__init__", ("self",), None, _DATA),
    Patch("keras.src.saving.saving_api:save_model", _TO_FILE, None, ("saving_lib",)),
    Patch("keras.src.saving.saving_lib:save_model", _TO_FILE, _save),
    Patch("keras.src.saving.saving_lib:save_weights_only", _TO_FILE, _save),
    Patch("keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5", _TO_FILE, _save),
    Patch("keras.src.models.model:Model.export", ("self", "filepath"), _save),
    Patch(f"{_CALLBACKS}.model_checkpoint:ModelCheckpoint._save_model", ("self",), _checkpoint),
    Patch(f"{_BACKUP}.on_train_begin", ("self", "logs"), _back_up),
)
