"""`TorchEstimator` and `TorchModel`, as Horovod has them.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/torch/estimator.py
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.ml.param import TypeConverters
from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark.common import util
from sparkdl.horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from sparkdl.horovod.spark.common.params import EstimatorParams as EstimatorParams
from sparkdl.horovod.spark.common.params import Row
from sparkdl.horovod.spark.common.work import Work
from sparkdl.horovod.spark.torch.modules import (
    OptimizerState,
    TorchScoring,
    as_list,
    packed_module,
    save_start,
    unpacked_module,
)
from sparkdl.horovod.spark.torch.remote import TorchTrainer

OWN = (
    Row("input_shapes", None, "shape of a batch of each input, [-1, 28, 28]; as the columns are if "
        "it is not set"),
    Row("loss_constructors", None, "functions that make the losses, instead of loss; they get "
        "keyword arguments, model among them"),
    Row("train_minibatch_fn", None, "what trains on a batch, see remote.train_minibatch"),
)  # fmt: skip
PASSES = Row(
    "backward_passes_per_step", 1, "batches whose gradients are added up", TypeConverters.toInt
)


class _TorchSaved:
    """Modules of TorchScript travel as bytes. Others are pickled together with their optimizer."""

    @classmethod
    def _packed(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {n: packed_module(x) if n == "model" else x for n, x in values.items()}

    @classmethod
    def _unpacked(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {n: unpacked_module(x) if n == "model" else x for n, x in values.items()}


class TorchEstimator(_TorchSaved, HorovodEstimator, params=(*OWN, PASSES)):
    """Fits a PyTorch module to a DataFrame, in processes that average their gradients.

    The optimizer's learning rate is multiplied by the number of processes. `fit` returns a
    `TorchModel`, whose history is a list of `{"epoch": …, "train": {"loss": …, "all_metrics": […]},
    "validation": …}`.

    Args:
        kwargs: parameters by name, see `explainParams()`.

    Raises:
        ConfigError: for `loss` and `loss_constructors` together, or `backward_passes_per_step`
            below 1; a ValueError.
    """

    _prefix = "pytorch"
    _unused: tuple[str, ...] = ("callbacks",)

    def __init__(self, **kwargs: Any) -> None:
        if kwargs.get("loss") is not None and kwargs.get("loss_constructors") is not None:
            raise ConfigError(
                "only one of loss_constructors and loss parameters can be specified: leave one out"
            )
        super().__init__(**kwargs)
        if self.getBackwardPassesPerStep() < 1:
            raise ConfigError(
                f"backward_passes_per_step must be > 0, not {self.getBackwardPassesPerStep()}"
            )

    def getOptimizer(self) -> Any:
        """Return the optimizer, for the parameters of `model`."""
        return _own_optimizer(self)

    def _check_metadata_compatibility(self, metadata: util.Metadata) -> None:
        shapes = self.getInputShapes(), None, self.getLabelShapes()
        util.check_shape_compatibility(
            metadata, self.getFeatureCols(), self.getLabelCols(), *shapes
        )

    def _check_params(self) -> None:
        super()._check_params()
        self._check_training()

    def _check_training(self) -> None:
        if self.getOrDefault("optimizer") is None:
            raise ConfigError("optimizer is not set: give optimizer=SGD(model.parameters(), lr=…)")
        if self.getLoss() is None and self.getLossConstructors() is None:
            raise ConfigError(
                "loss is not set, nor is loss_constructors: give one of them, like "
                "loss=torch.nn.MSELoss()"
            )
        count = len(self.getLabelCols())
        for values in (self.getLoss(), self.getLossConstructors()):
            util.to_list(values, count)
        weights = self.getLossWeights()
        if weights and len(weights) != count:
            raise ConfigError(
                "loss_weights needs to be a list with the same length as the label_columns: "
                f"{len(weights)} were given for {count}"
            )

    def _write_start(self, file: Path, run_id: str) -> None:
        model = self.getModel()
        state = OptimizerState.of(self.getOrDefault("optimizer"), model)
        if self._has_checkpoint(run_id) and (last := self._load_checkpoint(run_id)):
            model = copy.deepcopy(model)
            model.load_state_dict(last["model"])
            state = OptimizerState(state.kind, state.groups, last["optimizer"])
        save_start(file, model=packed_module(model), optimizer=state)

    def _load_checkpoint(self, run_id: str) -> dict[str, Any] | None:
        import torch

        path = self._checkpoint_path(run_id)
        if path is None:
            return None
        if self.getVerbose():
            util.say(f"Resuming training from last checkpoint: {path}")
        content = io.BytesIO(self._store().read(path))
        found: dict[str, Any] = torch.load(content, "cpu", weights_only=False)
        return found

    def _trainer(self, work: Work) -> Callable[[], Any]:
        return TorchTrainer(work)

    def _create_model(self, history: Any, file: Path, run_id: str, metadata: util.Metadata) -> Any:
        import torch

        last = torch.load(file, "cpu", weights_only=False)
        model = copy.deepcopy(self.getModel())
        model.load_state_dict(last["model"])
        model.eval()
        state = OptimizerState.of(self.getOrDefault("optimizer"), self.getModel())
        own = OptimizerState(state.kind, state.groups, last["optimizer"])
        return TorchModel(
            history=history,
            model=model,
            optimizer=own.optimizer_for(model),
            feature_columns=self.getFeatureCols(),
            input_shapes=self.getInputShapes(),
            label_columns=self.getLabelCols(),
            run_id=run_id,
            _metadata=metadata,
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
        )


def _own_optimizer(stage: Any) -> Any:
    optimizer, model = stage.getOrDefault("optimizer"), stage.getModel()
    if optimizer is None or model is None:
        return optimizer
    return OptimizerState.of(optimizer, model).optimizer_for(model)


class TorchModel(
    _TorchSaved,
    HorovodModel,
    params=(*OWN[:2], Row("optimizer", None, "the optimizer"), Row("loss", None, "the loss")),
):
    """Adds the outputs of a PyTorch module to a DataFrame.

    `getModel()` returns the module, `getHistory()` what its training measured.

    Args:
        kwargs: parameters by name, see `explainParams()`.
    """

    def getOptimizer(self) -> Any:
        """Return the optimizer as the training left it, for the parameters of `model`."""
        return _own_optimizer(self)

    def _scoring(self, df: DataFrame) -> tuple[list[int], Callable[[], Callable[..., list[Any]]]]:
        import torch

        model, features = self.getModel(), self.getFeatureColumns()
        about = self._get_metadata() or util._get_metadata(df.select(features))
        sizes = [about.get(name, {}).get("shape") for name in features]
        shapes = self.getInputShapes() or [[-1, n] if n and n > 1 else None for n in sizes]
        scoring = TorchScoring.of(model, shapes)
        # Two rows of zeros show how many numbers the model gives for one.
        columns = [torch.zeros([2, *map(abs, (shape or [-1])[1:])]) for shape in scoring.shapes]
        outputs = as_list(scoring()(*(column.numpy() for column in columns)))
        return [int(output[0].size) for output in outputs], scoring
