"""`import sparkdl.horovod.spark.torch`: Horovod's `TorchEstimator` and `TorchModel`.

Runs in: driver, child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/torch/estimator.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.spark.common.estimator import (
    Fit,
    HorovodEstimator,
    HorovodModel,
    inputs_by_column,
)
from sparkdl.horovod.spark.common.params import row
from sparkdl.horovod.spark.torch_modules import (
    Losses,
    OptimizerMaker,
    for_each,
    history_of,
    metrics_by_name,
)
from sparkdl.ml.estimators import torch_estimator as ml
from sparkdl.ml.estimators.torch_module import traced
from sparkdl.ml.scoring import torch_model as scoring
from sparkdl.ml.scoring.torch import module_content, module_signature

__all__ = ["TorchEstimator", "TorchModel"]
__path__: list[str] = []
"""Makes this a package, as Horovod's is, so that imports of its modules raise advice."""
__getattr__ = partial(missing_name, __name__)

SHAPES = row("input_shapes", "shape of a batch of each input, [-1, 28, 28]; the columns' if unset")


class TorchEstimator(HorovodEstimator, params=[SHAPES]):
    """Fits a PyTorch module to a DataFrame, by `sparkdl.TorchEstimator`.

    The learning rate is multiplied by the number of processes. `fit` returns a `TorchModel`, whose
    history is a list of `{"epoch": …, "train": {"loss": …, "all_metrics": […]}, "validation": …}`.

    Args:
        kwargs: parameters by name, see `explainParams()`.
    """

    _prefix = "pytorch"
    _is_float = True

    def _check_params(self) -> None:
        super()._check_params()
        if self.getOptimizer() is None:
            raise ConfigError("optimizer is not set: give optimizer=SGD(model.parameters(), lr=…)")
        if self.getLoss() is None:
            raise ConfigError("loss is not set: give one, like loss=torch.nn.MSELoss()")
        if self.getCallbacks():
            raise ConfigError("callbacks must be empty: Horovod has none for PyTorch")
        count = len(self.getLabelCols())
        for_each(self.getLoss(), count)
        if (weights := self.getLossWeights()) and len(weights) != count:
            raise ConfigError(
                "loss_weights needs to be a list with the same length as the label_columns: "
                f"{len(weights)} were given for {count}"
            )

    def _fitted(self, fit: Fit) -> TorchModel:
        model, labels = self.getModel(), fit.labels
        maker = OptimizerMaker.of(self.getOptimizer(), model)
        metrics = metrics_by_name(self.getMetrics(), labels)
        estimator = ml.TorchEstimator(
            model,
            optimizer=replace(maker, factor=fit.num_proc),
            loss=Losses(
                for_each(self.getLoss(), len(labels)),
                self.getLossWeights(),
                labels,
                "none" if self.getSampleWeightCol() else "mean",
            ),
            metrics=metrics,
            input_mapping=inputs_by_column(
                fit.features, module_signature(model), self.getFeatureCols()
            ),
            input_shapes=rows_by_column(fit.features, self.getInputShapes()),
            **fit.settings,
        )
        fitted = estimator.fit(fit.rows)
        module = fitted.getModel().eval()
        return TorchModel(
            history=history_of(fitted.history, list(metrics)),
            model=module,
            optimizer=maker(module.parameters()),
            loss=self.getLoss(),
            input_shapes=self.getInputShapes(),
            **fit.common,
        )


def rows_by_column(
    columns: Sequence[str], shapes: Sequence[Sequence[int]] | None
) -> dict[str, list[int]]:
    """Return the shape of a row for each column, of shapes of batches or of rows."""
    if shapes is None:
        return {}
    if len(shapes) != len(columns):
        raise ConfigError(
            f"input_shapes has {len(shapes)} shapes, and needs one for each of the "
            f"{len(columns)} columns: {', '.join(columns)}"
        )
    return {
        name: list(shape[1:] if shape and shape[0] == -1 else shape)
        for name, shape in zip(columns, shapes, strict=True)
    }


class TorchModel(
    HorovodModel, params=[SHAPES, row("optimizer", "the optimizer"), row("loss", "the loss")]
):
    """Adds the outputs of a PyTorch module to a DataFrame.

    `getModel()` returns the module, `getHistory()` the metrics of its training.

    Args:
        kwargs: parameters by name, see `explainParams()`.
    """

    _is_float = True

    def _stage(self, inputs: DataFrame) -> Any:
        import torch

        model = self.getModel().eval()
        shapes = rows_by_column(inputs.columns, self.getInputShapes())
        sizes: dict[str, Sequence[int]] = dict(shapes)
        if not shapes:
            first = inputs.first()
            sizes = {name: np.shape(first[name]) for name in inputs.columns} if first else {}
        names = inputs_by_column(inputs.columns, module_signature(model), self.getFeatureColumns())
        # Two rows of zeros show how many numbers the model gives for one.
        sample = {names[name]: torch.zeros([2, *size]) for name, size in sizes.items()}
        signature = traced(model, sample, "")
        stage = scoring.TorchModel._of(module_content(model), signature)
        return stage.setInputShapes(shapes)
