"""The parameters of all stages in one table, and the mix-ins whose setters are made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding, Recovery, Startup
from sparkdl.core.texts import did_you_mean, docs_page
from sparkdl.driver.options import Observe
from sparkdl.ml.namespace import Namespace
from sparkdl.ml.scoring.share import MODEL_PER

T = TypeVar("T")
INVALID = ("error", "skip", "keep")
"""How to treat a row with a null in an input column, in Spark ML's words."""


class TFTypeConverters:
    """Converters that Spark ML lacks; they raise `TypeError`, as Spark ML's do."""

    @staticmethod
    def toDict(value: Any) -> dict[Any, Any]:
        """Return a mapping as a dict."""
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"Could not convert {value!r} to a dict: give a dict")


@dataclass(frozen=True)
class Row:
    """One parameter. `accessor` names its setter and getter: setBatchSize, getBatchSize."""

    name: str
    default: Any
    convert: Callable[[Any], Any]
    doc: str
    accessor: str

    def converted(self, value: Any) -> Any:
        """Return a value as the parameter has it."""
        try:
            return self.convert(value)
        except ConfigError as error:
            raise ConfigError(f"{self.name}={value!r} {error}") from None


def _whole(minimum: int, value: Any) -> int:
    number = TypeConverters.toInt(value)
    if number < minimum:
        raise ConfigError(f"must be at least {minimum}")
    return number


def _columns(value: Any) -> str | Sequence[str]:
    found = value if isinstance(value, str) else TypeConverters.toListString(value)
    if not found:
        raise ConfigError("must name a column")
    return found


def _labels(value: Any) -> str | Sequence[str] | Mapping[str, str]:
    return dict(value) if isinstance(value, Mapping) and value else _columns(value)


def _weights(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: float(weight) for name, weight in value.items()}
    return TypeConverters.toListFloat(value)


def _one_of(words: Sequence[str], value: Any) -> str:
    if value not in words:
        near = did_you_mean(str(value), words)
        raise ConfigError(f"cannot be: choose one of {', '.join(map(repr, words))}{near}")
    return str(value)


def _input_mode(value: Any) -> int:
    if int(value) != _FROM_SPARK:
        raise ConfigError(
            "cannot be: an estimator is fed from its DataFrame, so only InputMode.SPARK works; "
            "to read files in map_fun use TFCluster.run or sparkdl.run"
        )
    return int(value)


def _object(kind: type[T], value: Any) -> T:
    """Return an option object, given itself, or its fields as a saved stage has them."""
    if isinstance(value, kind):
        return value
    if isinstance(value, Mapping):
        return kind(**value)
    raise TypeError(
        f"Could not convert {value!r} to a sparkdl.{kind.__name__}: give one, or a dict of "
        "its fields"
    )


def _bool_or_texts(value: Any) -> bool | Sequence[str]:
    return value if isinstance(value, bool) else TypeConverters.toListString(value)


_FROM_SPARK = 1
"""TensorFlowOnSpark's number of `InputMode.SPARK`."""
_UPPER = {"Ps": "PS", "Tfrecord": "TFRecord", "Gpus": "GPUs"}
"""Words of names as TensorFlowOnSpark writes them in setters."""
_int, _text, _bool = TypeConverters.toInt, TypeConverters.toString, TypeConverters.toBoolean
as_it_is = TypeConverters.identity
_natural, _positive = partial(_whole, 0), partial(_whole, 1)
_dict = TFTypeConverters.toDict

_ROWS: tuple[tuple[str, Any, Callable[[Any], Any], str], ...] = (
    # TensorFlowOnSpark's, with its defaults
    ("batch_size", 100, _positive, "Rows in a batch"),
    ("cluster_size", 1, _positive, "Nodes of the cluster, ps included"),
    ("epochs", 1, _positive, "How often the data is fed"),
    ("grace_secs", 30, _int, "Passed to train_fn; fit waits until train_fn has returned"),
    ("input_mapping", {}, _dict, "DataFrame column to the model's input"),
    ("input_mode", _FROM_SPARK, _input_mode, "How nodes get data; always 1, from Spark"),
    ("master_node", "chief", _text, "Job name of the node that leads"),
    ("model_dir", None, _text, "Folder for checkpoints, or for the trained model"),
    ("num_ps", 0, _natural, "Parameter servers among the nodes"),
    ("driver_ps_nodes", False, _bool, "Run the parameter servers as processes of the "
     "driver's machine"),
    ("output_mapping", {}, _dict, "The model's output to DataFrame column"),
    ("protocol", "grpc", _text, "Passed to train_fn"),
    ("readers", 1, _int, "Passed to train_fn"),
    ("steps", 1000, _int, "Passed to train_fn"),
    ("tensorboard", False, _bool, "Start TensorBoard beside the chief; it shows model_dir"),
    ("tfrecord_dir", None, _text, "Passed to train_fn"),
    ("export_dir", None, _text, "The saved model: a SavedModel's folder, or a .keras file"),
    ("signature_def_key", None, _text, "Signature of the SavedModel; its only one, or "
     "serving_default, if it is not set"),
    ("tag_set", None, _text, "Tags of the SavedModel, separated by commas"),
    # not in TensorFlowOnSpark, for training
    ("recovery", None, partial(_object, Recovery), "How to react to failures and hangs"),
    ("feeding", None, partial(_object, Feeding), "How rows reach the nodes"),
    ("observe", None, partial(_object, Observe), "How the cluster reports progress"),
    ("startup", None, partial(_object, Startup), "Where nodes start, and how"),
    ("validation_indicator_col", None, _text, "Boolean column: rows where it is true are not "
     "trained on; they are the feed 'validation'"),
    ("weight_col", None, _text, "Column of the rows' weights"),
    ("seed", None, _int, "Of random numbers: initial weights, order of rows"),
    ("num_gpus", None, _natural, "GPUs for each node; by default what Spark assigned, or one"),
    ("max_restarts", 0, _natural, "How often all nodes restart after a failure, from the last "
     "checkpoint, if there is a checkpoint_dir"),
    ("checkpoint_dir", None, _text, "Folder that all nodes reach. Each fit has its own folder in "
     "it for its checkpoints, which is deleted when it has succeeded"),
    ("framework", "tensorflow", _text, "Framework of the nodes: tensorflow, torch, plain"),
    # for transform
    ("output_types", {}, _dict, "DataFrame column to its type: 'vector', or a type of Spark like "
     "'double', 'array<float>', 'binary'; by default that of the model's output"),
    ("keep", True, _bool_or_texts, "Which of the DataFrame's columns transform returns: all, none, "
     "or those named"),
    ("handle_invalid", "error", partial(_one_of, INVALID), "A row with a null in an input column: "
     "'error', 'skip' leaves it out, 'keep' gives it null outputs"),
    ("model_per", "auto", partial(_one_of, MODEL_PER), "Where the model is loaded: 'slot': in each "
     "task slot; 'executor': once per GPU of an executor, or once without; 'auto': 'executor' "
     "where tasks share GPUs, else 'slot'"),
    # for PyTorch
    ("input_shapes", {}, _dict, "DataFrame column to the shape of its rows, for arrays that are "
     "stored flat: [3, 224, 224]"),
    ("trainer_args", {}, _dict, "Arguments of Lightning's Trainer by name"),
    # for Transformers
    ("text_col", "text", _text, "Column of the texts"),
    ("tokenizer", None, as_it_is, "Of Transformers: itself, its folder, or a function that makes "
     "it; by default the one in the model's folder"),
    ("max_length", None, _positive, "Tokens after which a text is cut off; by default what the "
     "tokenizer and the model take"),
    ("lora", None, as_it_is, "True, or a config of peft: train small matrices beside the frozen "
     "weights, and merge them in the end"),
    # for Keras
    ("num_workers", 1, _positive, "Nodes that train"),
    ("features_col", "features", _columns, "Column of the features: array, vector or number; or "
     "several columns of numbers, which make a vector"),
    ("label_col", "label", _labels, "Column of the labels; several for the outputs in their order, "
     "or as a dict from column to output"),
    ("prediction_col", "prediction", _text, "Column of the predictions: the class as a double if "
     "there are scores of classes in another column, else the model's output"),
    ("probability_col", None, _text, "Column of the classes' probabilities, a vector; "
     "'probability' if the model ends in a softmax; set it for a sigmoid of two classes"),
    ("raw_prediction_col", None, _text, "Column of the classes' logits, a vector; set it if the "
     "model's output is such"),
    ("optimizer", "adam", as_it_is, "Its name, or an optimizer of Keras; of PyTorch a function of "
     "the parameters, like functools.partial(torch.optim.SGD, lr=0.1)"),
    ("loss", None, as_it_is, "Its name, or a loss of Keras, that of the compiled model if it is "
     "not set; of PyTorch a name of torch.nn, a module, or a function of output and label"),
    ("loss_weights", None, _weights, "Of the losses of several outputs: a list, or a dict by "
     "output"),
    ("metrics", None, as_it_is, "Names, or metrics of Keras; of PyTorch by name, or a list: "
     "'accuracy', functions of output and label, metrics of torchmetrics"),
    ("sparse", [], TypeConverters.toListString, "Columns of features, vectors, that stay sparse"),
    ("shuffle", True, _bool, "Whether rows come in random order"),
    ("mode", "nodes", partial(_one_of, ("nodes", "jobs")), "How to train: on a cluster of nodes, "
     f"or as Spark jobs without nodes, see {docs_page('spark-ml')}"),
)  # fmt: skip


TABLE = {
    row[0]: Row(*row, "".join(_UPPER.get(word, word) for word in row[0].title().split("_")))
    for row in _ROWS
}
TRAINING = (
    *("recovery", "feeding", "observe", "startup", "validation_indicator_col", "num_gpus"),
    *("max_restarts", "checkpoint_dir"),
)
"""Training parameters that TensorFlowOnSpark does not have."""
SCORING = ("output_mapping", "output_types", "keep", "handle_invalid", "model_per")
"""Parameters of `transform` that all models have."""
COLUMNS = ("features_col", "prediction_col", "probability_col", "raw_prediction_col", "sparse")
"""Spark ML's usual columns."""


class HasParams(Params):
    """Gives a class parameters of the table: `class HasEpochs(HasParams, params=["epochs"])`.

    Each has a getter, and a setter that returns the stage.
    """

    _rows: Mapping[str, Row] = {}

    def __init_subclass__(cls, params: Sequence[str | Row] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rows = [TABLE[each] if isinstance(each, str) else each for each in params]
        cls._rows = {**cls._rows, **{row.name: row for row in rows}}
        for row in rows:
            # As Spark ML's own classes do: each stage copies it, with itself as the parent.
            param = Param(Params._dummy(), row.name, row.doc, row.converted)
            setattr(cls, row.name, param)
            for method in _setter_and_getter(row):
                setattr(cls, method.__name__, method)

    def _set_table_defaults(self, **own: Any) -> None:
        self._setDefault(**{n: own.get(n, row.default) for n, row in self._rows.items()})

    def _values(self) -> Namespace:
        return Namespace({param.name: self.getOrDefault(param) for param in self.params})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _setter_and_getter(row: Row) -> tuple[Callable[..., Any], ...]:
    def set_param(self: Any, value: Any) -> Any:
        return self._set(**{row.name: value})

    def get_param(self: Any) -> Any:
        return self.getOrDefault(row.name)

    set_param.__name__, get_param.__name__ = f"set{row.accessor}", f"get{row.accessor}"
    set_param.__doc__ = f"Set `{row.name}`: {row.doc}."
    get_param.__doc__ = f"Return `{row.name}`: {row.doc}."
    return set_param, get_param


class TFParams(HasParams):
    """The user's arguments, and their merger with the parameters."""

    args: Namespace

    def merge_args_params(self) -> Namespace:
        """Return the arguments with the parameters: set ones override arguments, these defaults.

        In TensorFlowOnSpark defaults override arguments. An argument of None is an option missing
        on the command line.
        """
        found = Namespace(self.args)
        values = vars(found)
        defaults = {param.name: value for param, value in self._defaultParamMap.items()}
        values |= {name: value for name, value in defaults.items() if values.get(name) is None}
        values |= {param.name: value for param, value in self._paramMap.items()}
        return found
