"""The parameters of all stages as Spark ML's mix-ins; setters and getters are made from the table.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params

from sparkdl.ml.estimators.namespace import Namespace, merged
from sparkdl.ml.estimators.table import TABLE, Row


class HasParams(Params):
    """Gives a class parameters of the table: `class HasEpochs(HasParams, params=["epochs"])`.

    Setters return the stage; they and the getters are there for each parameter.
    """

    def __init_subclass__(cls, params: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in params:
            row = TABLE[name]
            setattr(cls, name, Param(Params._dummy(), name, row.doc, row.converted))
            setattr(cls, f"set{row.accessor}", _setter(row))
            setattr(cls, f"get{row.accessor}", _getter(row))

    def _set_table_defaults(self, **own: Any) -> None:
        names = [param.name for param in self.params if param.name in TABLE]
        self._setDefault(**{name: own.get(name, TABLE[name].default) for name in names})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _setter(row: Row) -> Callable[..., Any]:
    def set_param(self: Any, value: Any) -> Any:
        return self._set(**{row.name: value})

    set_param.__name__ = f"set{row.accessor}"
    set_param.__doc__ = f"Set `{row.name}`: {row.doc}."
    return set_param


def _getter(row: Row) -> Callable[..., Any]:
    def get_param(self: Any) -> Any:
        return self.getOrDefault(row.name)

    get_param.__name__ = f"get{row.accessor}"
    get_param.__doc__ = f"Return `{row.name}`: {row.doc}."
    return get_param


class HasBatchSize(HasParams, params=["batch_size"]):
    """Has `batch_size`."""


class HasClusterSize(HasParams, params=["cluster_size"]):
    """Has `cluster_size`."""


class HasEpochs(HasParams, params=["epochs"]):
    """Has `epochs`."""


class HasGraceSecs(HasParams, params=["grace_secs"]):
    """Has `grace_secs`."""


class HasInputMapping(HasParams, params=["input_mapping"]):
    """Has `input_mapping`."""


class HasInputMode(HasParams, params=["input_mode"]):
    """Has `input_mode`."""


class HasMasterNode(HasParams, params=["master_node"]):
    """Has `master_node`."""


class HasModelDir(HasParams, params=["model_dir"]):
    """Has `model_dir`."""


class HasNumPS(HasParams, params=["num_ps", "driver_ps_nodes"]):
    """Has `num_ps` and `driver_ps_nodes`."""


class HasOutputMapping(HasParams, params=["output_mapping"]):
    """Has `output_mapping`."""


class HasProtocol(HasParams, params=["protocol"]):
    """Has `protocol`."""


class HasReaders(HasParams, params=["readers"]):
    """Has `readers`."""


class HasSteps(HasParams, params=["steps"]):
    """Has `steps`."""


class HasTensorboard(HasParams, params=["tensorboard"]):
    """Has `tensorboard`."""


class HasTFRecordDir(HasParams, params=["tfrecord_dir"]):
    """Has `tfrecord_dir`."""


class HasExportDir(HasParams, params=["export_dir"]):
    """Has `export_dir`."""


class HasSignatureDefKey(HasParams, params=["signature_def_key"]):
    """Has `signature_def_key`."""


class HasTagSet(HasParams, params=["tag_set"]):
    """Has `tag_set`."""


class HasTraining(
    HasParams,
    params=[
        "feed_timeout", "reservation_timeout", "shutdown_timeout", "validation_indicator_col",
        "weight_col", "early_stopping_patience", "early_stopping_monitor",
        "early_stopping_min_delta", "seed", "cache", "num_gpus", "log_dir", "log_to_driver",
        "placement", "max_restarts", "checkpoint_dir",
    ],
):  # fmt: skip
    """Has what training needs beside TensorFlowOnSpark's parameters."""


class HasScoring(HasParams, params=["output_types", "keep", "handle_invalid", "parquet_reader"]):
    """Has what `transform` needs beside TensorFlowOnSpark's parameters."""


class TFParams(HasParams):
    """Has the user's arguments, into which the parameters are merged."""

    args: Namespace

    def merge_args_params(self) -> Namespace:
        """Return the arguments with the parameters: set ones beat arguments, which beat defaults.

        TensorFlowOnSpark let defaults beat arguments.
        """
        defaults = {param.name: value for param, value in self._defaultParamMap.items()}
        chosen = {param.name: value for param, value in self._paramMap.items()}
        return merged(self.args, defaults, chosen)
