"""The parameters of Horovod's estimators and models, and what becomes of each.

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/common/params.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.ml.param import TypeConverters

from sparkdl.core.errors import ConfigError
from sparkdl.core.texts import did_you_mean
from sparkdl.ml.params import HasParams, Row, as_it_is

_int, _text, _bool = TypeConverters.toInt, TypeConverters.toString, TypeConverters.toBoolean
_texts = TypeConverters.toListString
_ACCESSORS = {
    "inmemory_cache_all": "InMemoryCacheAll",
    "num_gpus": "NumGPUs",
    "outputCols": "OutputCols",
    "shuffle_buffer_size": "ShufflingBufferSize",
    "train_reader_num_workers": "TrainReaderNumWorker",
    "val_reader_num_workers": "ValReaderNumWorker",
}


def row(name: str, doc: str, default: Any = None, convert: Callable[[Any], Any] = as_it_is) -> Row:
    """Return a parameter with the setter and getter that Horovod has for it."""
    words = name.strip("_").split("_")
    accessor = _ACCESSORS.get(name) or "".join(word.title() for word in words)
    return Row(name, default, convert, doc, accessor)


ESTIMATOR = (
    row("num_proc", "number of processes; Spark's default parallelism if unset", None, _int),
    row("backend", "a SparkBackend, instead of num_proc"),
    row("store", "where the files of fit_on_parquet are, and logs of TensorBoard go"),
    row("model", "the model to train"),
    row("optimizer", "the optimizer"),
    row("loss", "the loss, or a list with one for each label"),
    row("loss_weights", "one weight for each label", None, TypeConverters.toListFloat),
    row("metrics", "metrics to compute besides the loss", []),
    row("feature_cols", "columns for the model's inputs, in their order", None, _texts),
    row("label_cols", "columns for the model's outputs, in their order", None, _texts),
    row("sample_weight_col", "column of the rows' weights", None, _text),
    row("validation", "share of the rows, [0, 1), or the column that marks rows by 1 or true"),
    row("callbacks", "the framework's callbacks", []),
    row("batch_size", "rows of a batch of a process", 32, _int),
    row("epochs", "passes over the training rows", 1, _int),
    row("verbose", "accepted, without effect", 1, _int),
    row("random_seed", "of initial weights and of the order of the rows", None, _int),
    row("shuffle", "whether training rows come in random order", True, _bool),
    row("shuffle_buffer_size", "0 is shuffle=False; others have no effect", None, _int),
    row("run_id", "name of the run in the store; a fit begins with model= anyway", None, _text),
    row("transformation_fn", "function of rows as a pandas DataFrame, before the training"),
    row("use_gpu", "whether to train on GPUs where there are any", True, _bool),
)
MODEL = (
    row("history", "the metrics of the training"),
    row("model", "the trained model"),
    row("feature_columns", "columns for the model's inputs, in their order", None, _texts),
    row("label_columns", "the labels it was trained with", None, _texts),
    row("run_id", "name of the run in the store", None, _text),
    row("_metadata", "accepted, without effect"),
    row("outputCols", "columns of the results; by default <label>__output", None, _texts),
)
_HINTS = (
    *("compress_sparse_cols", "continuous_cols", "categorical_cols", "gradient_compression"),
    *("inmemory_cache_all", "mp_start_method", "partitions_per_process", "reader_pool_type"),
    *("train_reader_num_workers", "val_reader_num_workers", "val_batch_size"),
    *("tensorflow_dataset_prefetch_buffer_size", "num_gpus", "loader_num_epochs"),
    *("debug_data_loader", "train_async_data_loader_queue_size", "transformation_edit_fields"),
    *("val_async_data_loader_queue_size", "transformation_removed_fields"),
)
_STEPS = "an epoch is a pass over the rows, fit(df.sample(…)) makes it shorter"
_REFUSED = {
    "backend_env": "set spark.executorEnv.NAME of the Spark session",
    "backward_passes_per_step": "only 1: multiply batch_size by it",
    "checkpoint_callback": "add the callback keras.callbacks.EarlyStopping(monitor, "
    "patience=epochs, restore_best_weights=True)",
    "data_module": "there is only one way of rows to the processes: use transformation_fn",
    "label_shapes": "labels have the shapes of the outputs: let the loss reshape them",
    "loss_constructors": "give loss=, it is pickled to the processes",
    "terminate_on_nan": "add the callback EarlyStopping('loss', check_finite=True)",
    "train_minibatch_fn": "the loop is Lightning's: use sparkdl.LightningEstimator",
    "train_steps_per_epoch": _STEPS,
    "validation_steps_per_epoch": _STEPS,
}
OTHERS = (
    *(row(name, "accepted, without effect") for name in _HINTS),
    *(row(name, f"refused: {advice}") for name, advice in _REFUSED.items()),
)
"""Parameters of Horovod's readers and loops, which the feed has no use for."""


class HorovodParams(HasParams):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._set_table_defaults()
        self.setParams(**kwargs)

    def setParams(self, **kwargs: Any) -> Any:
        """Set parameters by name; `None` leaves one as it is.

        Raises:
            TypeError: for an unknown name, or a value of another type.
        """
        names = [param.name for param in self.params]
        for name in kwargs:
            if name not in names:
                raise TypeError(
                    f"{type(self).__name__} has no parameter {name!r}; it has "
                    f"{', '.join(names)}{did_you_mean(name, names)}"
                )
        return self._set(**{name: value for name, value in kwargs.items() if value is not None})


class EstimatorParams(HorovodParams, params=[*ESTIMATOR, *OTHERS]):
    def check_no_refused(self) -> None:
        """Raise a ConfigError if a parameter is set that would change the result elsewhere."""
        for name, advice in _REFUSED.items():
            value = self.getOrDefault(name)
            if value not in (None, False) and (name, value) != ("backward_passes_per_step", 1):
                raise ConfigError(f"{name}={value!r} is not supported: {advice}")


class ModelParams(HorovodParams, params=MODEL):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.getOutputCols() is None and self.getLabelColumns():
            self.setOutputCols([f"{name}__output" for name in self.getLabelColumns()])
