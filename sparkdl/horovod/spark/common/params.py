"""The parameters of Horovod's estimators and models, with setters and getters made from tables.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/common/params.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.core.spelling import did_you_mean


class Row(NamedTuple):
    """One parameter; `accessor` names its setter and getter where `BatchSize` is not the rule."""

    name: str
    default: Any
    doc: str
    convert: Callable[[Any], Any] | None = None
    accessor: str = ""

    @property
    def verb(self) -> str:
        """The suffix of the setter's and getter's names."""
        words = self.name.strip("_").split("_")
        return self.accessor or "".join(word.title() for word in words)


_int, _text, _bool = TypeConverters.toInt, TypeConverters.toString, TypeConverters.toBoolean
_texts = TypeConverters.toListString

ESTIMATOR = (
    Row("num_proc", None, "number of processes; Spark's default parallelism if it is not set",
        _int),
    Row("backend", None, "what runs the processes; instead of num_proc"),
    Row("store", None, "where the data, checkpoints and logs are kept"),
    Row("data_module", None, "refused: the files are read in one way alone"),
    Row("model", None, "the model to train"),
    Row("optimizer", None, "the optimizer"),
    Row("loss", None, "the loss, or a list with one for each label"),
    Row("loss_weights", None, "one weight for each label", TypeConverters.toListFloat),
    Row("metrics", [], "metrics to compute besides the loss"),
    Row("feature_cols", None, "columns for the model's inputs, in their order", _texts),
    Row("label_cols", None, "columns for the model's outputs, in their order", _texts),
    Row("continuous_cols", None, "accepted, without effect", _texts),
    Row("categorical_cols", None, "accepted, without effect", _texts),
    Row("sample_weight_col", None, "column of the rows' weights", _text),
    Row("validation", None, "part of the rows, [0, 1), chosen at random; or the column whose rows "
        "with 1 or true are those"),
    Row("callbacks", [], "the framework's callbacks"),
    Row("batch_size", 32, "rows of a batch of a process, at most", _int),
    Row("val_batch_size", None, "the same for validation; batch_size if it is not set", _int),
    Row("epochs", 1, "passes over the training rows", _int),
    Row("train_steps_per_epoch", None, "batches of an epoch; all rows if it is not set", _int),
    Row("validation_steps_per_epoch", None, "batches of a validation; all rows if it is not set",
        _int),
    Row("verbose", 1, "0 for no progress on the standard output", _int),
    Row("random_seed", None, "of the framework's numbers and of the order of the rows", _int),
    Row("shuffle", True, "whether training rows come in random order", _bool),
    Row("shuffle_buffer_size", None, "deprecated: 0 is shuffle=False", _int, "ShufflingBufferSize"),
    Row("partitions_per_process", 10, "Parquet files for each process, at most", _int),
    Row("run_id", None, "name of the run in the store; a run that has a checkpoint there is "
        "continued", _text),
    Row("transformation_fn", None, "function of a batch as a pandas DataFrame, before each step"),
    Row("label_shapes", None, "shape of a batch of each label"),
    Row("gradient_compression", None, "hvd.Compression of the gradients"),
    Row("compress_sparse_cols", False, "accepted: Parquet compresses the zeros of vectors", _bool),
    Row("inmemory_cache_all", False, "whether each process keeps its rows in memory", _bool,
        "InMemoryCacheAll"),
    Row("use_gpu", True, "whether to train on GPUs where there are any", _bool),
    Row("mp_start_method", None, "how multiprocessing starts processes", _text),
    Row("train_reader_num_workers", 2, "accepted, without effect", _int, "TrainReaderNumWorker"),
    Row("val_reader_num_workers", 2, "accepted, without effect", _int, "ValReaderNumWorker"),
    Row("reader_pool_type", "thread", "accepted, without effect", _text),
)  # fmt: skip

MODEL = (
    Row("history", None, "what the training measured"),
    Row("model", None, "the trained model"),
    Row("feature_columns", None, "columns for the model's inputs, in their order", _texts),
    Row("label_columns", None, "the labels it was trained with", _texts, "LabelColumns"),
    Row("run_id", None, "name of the run in the store", _text),
    Row("_metadata", None, "types and sizes of the columns, see util._get_metadata"),
    Row("outputCols", None, "columns of the results; by default <label>__output", _texts,
        "OutputCols"),
)  # fmt: skip


class HorovodParams(Params):
    """Gives a class the parameters of a table, which its constructor takes by keyword."""

    _rows: tuple[Row, ...] = ()

    def __init_subclass__(cls, params: Sequence[Row] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._rows = (*cls._rows, *params)
        for row in params:
            param = Param(Params._dummy(), row.name, row.doc, row.convert)
            accessors = {
                row.name: param,
                f"set{row.verb}": _setter(row),
                f"get{row.verb}": _getter(row),
            }
            for name, value in accessors.items():
                if name not in vars(cls):
                    setattr(cls, name, value)
        own = [Parameter(r.name, Parameter.KEYWORD_ONLY, default=r.default) for r in cls._rows]
        cls.__signature__ = Signature(own)  # type: ignore[attr-defined]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._setDefault(**{row.name: row.default for row in self._rows})
        self.setParams(**kwargs)

    def setParams(self, **kwargs: Any) -> Any:
        """Set parameters by name; `None` leaves one as it is.

        Raises:
            TypeError: for an unknown name, or a value of another type.
        """
        names = [row.name for row in self._rows]
        for name in kwargs:
            if name not in names:
                near = did_you_mean(name, names)
                raise TypeError(
                    f"{type(self).__name__} has no parameter {name!r}; it has "
                    f"{', '.join(names)}{near}"
                )
        return self._set(**{name: value for name, value in kwargs.items() if value is not None})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _setter(row: Row) -> Callable[..., Any]:
    def set_param(self: Any, value: Any) -> Any:
        if value is None:
            self.clear(getattr(self, row.name))
            return self
        return self._set(**{row.name: value})

    set_param.__name__, set_param.__doc__ = f"set{row.verb}", f"Set `{row.name}`: {row.doc}."
    return set_param


def _getter(row: Row) -> Callable[..., Any]:
    def get_param(self: Any) -> Any:
        return self.getOrDefault(row.name)

    get_param.__name__, get_param.__doc__ = f"get{row.verb}", f"Return `{row.name}`: {row.doc}."
    return get_param


class EstimatorParams(HorovodParams, params=ESTIMATOR):
    """The parameters of all estimators."""


class ModelParams(HorovodParams, params=MODEL):
    """The parameters of all models."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.getOutputCols() is None and self.getLabelColumns():
            self.setOutputCols([f"{name}__output" for name in self.getLabelColumns()])

    def setLabelColoumns(self, value: Sequence[str]) -> Any:
        """Set `label_columns`, by the name that Horovod spells so."""
        return self.setLabelColumns(value)

    def _get_metadata(self) -> Any:
        return self.getOrDefault(self._metadata)
