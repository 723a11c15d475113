"""`TFEstimator`: trains with the user's `train_fn` on a cluster of nodes, fed from a DataFrame."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from pyspark.ml.base import Estimator
from pyspark.sql import DataFrame, SparkSession

from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Roles
from sparkdl.core.tracking import tracked
from sparkdl.driver.options import OBJECTS, Observe
from sparkdl.ml.estimators.training import Training
from sparkdl.ml.namespace import Namespace
from sparkdl.ml.params import SCORING, TABLE, TRAINING, HasParams, TFParams
from sparkdl.ml.persistence import Contents, Saved, packed_code, unpacked_code
from sparkdl.ml.scoring.model import FittedModel, TFModel

M = TypeVar("M", bound=FittedModel)
TrainFn = Callable[[Any, Any], Any]


class ClusterEstimator(Estimator[M], HasParams, Saved):
    def _fit(self, dataset: DataFrame) -> M:
        with tracked("fit", estimator=self) as note:
            model = self._fitted(dataset)
            note(model=model)
        return model

    @abstractmethod
    def _fitted(self, dataset: DataFrame) -> M: ...


class TFEstimator(
    ClusterEstimator[TFModel],
    TFParams,
    params=[
        *("input_mapping", "cluster_size", "num_ps", "driver_ps_nodes", "input_mode", "framework"),
        *("master_node", "protocol", "grace_secs", "tensorboard", "model_dir", "export_dir"),
        *("tfrecord_dir", "batch_size", "epochs", "readers", "steps", "signature_def_key"),
        *("tag_set", *TRAINING, *SCORING),
    ],
):
    """Runs `train_fn(args, ctx)` on `cluster_size` nodes and feeds them the DataFrame.

    `args` are the user's arguments with all parameters: a set parameter overrides an argument, and
    an argument overrides a parameter's default. `train_fn` reads `ctx.get_data_feed(input_mapping=
    args.input_mapping)` or `ctx.dataset(…)`, saves its model in `args.export_dir`, and may return
    its history: `return model.fit(…).history`.

    The columns of `input_mapping` are fed, in the order of their names; all columns if there is no
    mapping. Rows marked by `validation_indicator_col` are the feed
    `"validation"`. The model inherits the parameters of `transform` (`output_mapping`,
    `output_types`, ...), so that it can score in a pipeline.

    https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/pipeline.py

    Args:
        train_fn: runs on every node.
        tf_args: a dict, an `argparse.Namespace`, or a list of command-line arguments: then
            `train_fn` is given the list as it is.
        export_fn: refused; TensorFlow 2 saves in `train_fn`.
    """

    __module__ = "sparkdl"

    def __init__(self, train_fn: TrainFn, tf_args: Any = None, export_fn: Any = None) -> None:
        super().__init__()
        if export_fn is not None:
            raise ConfigError(
                "export_fn is for TensorFlow 1: save the model at the end of train_fn, for example "
                "`if ctx.is_chief: model.export(args.export_dir)`"
            )
        self.train_fn = train_fn
        self.args = Namespace(tf_args)
        self._set_table_defaults()

    def _fitted(self, dataset: DataFrame) -> TFModel:
        args: Any = self.merge_args_params()
        options = launch_options(args)
        board = (args.model_dir or True) if _value(args, "tensorboard") else False
        options["observe"] = replace(options.get("observe", Observe()), tensorboard=board)
        options["roles"] = Roles(
            ps=_value(args, "num_ps"),
            ps_on_driver=_value(args, "driver_ps_nodes"),
            chief=args.master_node,
        )
        training = Training(
            map_fun=self.train_fn,
            # Programs of TensorFlowOnSpark parse their command line in `train_fn`.
            args=args.argv if args.argv else args,
            nodes=_value(args, "cluster_size"),
            epochs=_value(args, "epochs"),
            # In the order of names, as TensorFlowOnSpark feeds them.
            columns=tuple(sorted(args.input_mapping)),
            validation_col=args.validation_indicator_col,
            options={**options, "framework": args.framework},
        )
        model = self._copyValues(TFModel(self.args))
        model._summary = training.run(dataset)
        return model

    def _contents(self, spark: SparkSession) -> Contents:
        return packed_code(self.train_fn, self.args)

    @classmethod
    def _restored(cls, contents: Contents, metadata: dict[str, Any]) -> TFEstimator:
        return cls(*unpacked_code(contents))


def launch_options(args: Any) -> dict[str, Any]:
    """Return the options of `sparkdl.launch` that are parameters of every estimator.

    Args:
        args: with the parameters of `HasTraining` as attributes.
    """
    names = ("num_gpus", "max_restarts", "checkpoint_dir", *OBJECTS)
    found = {name: _value(args, name) for name in names if name in TABLE}
    return {name: value for name, value in found.items() if value is not None}


def _value(args: Any, name: str) -> Any:
    """Return an argument, converted like the parameter of its name, if there is one."""
    value = getattr(args, name)
    try:
        return None if value is None else TABLE[name].convert(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}={value!r} in tf_args: {error}") from None
