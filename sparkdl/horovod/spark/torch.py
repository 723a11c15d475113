"""`import sparkdl.horovod.spark.torch`: Horovod's `TorchEstimator` and `TorchModel`.

Runs in: driver, child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/torch/estimator.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

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
from sparkdl.ml.estimators import torch_estimator as ml
from sparkdl.ml.estimators.torch_batch import Loss, fitted_label, loss_of
from sparkdl.ml.estimators.torch_train import traced
from sparkdl.ml.model_file import ModelFile
from sparkdl.ml.scoring import model as scoring
from sparkdl.ml.scoring.torch import module_signature, save_module

if TYPE_CHECKING:
    import torch

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
        file = ModelFile("module", partial(save_module, module=model))
        stage = scoring.TorchModel._of(file, signature)
        return stage.setInputShapes(shapes)


@dataclass(frozen=True)
class OptimizerMaker:
    """Makes an optimizer again, of another copy of the parameters.

    Attributes:
        groups: for each parameter group the places of its parameters among the model's.
        factor: of the learning rates.
    """

    kind: type[torch.optim.Optimizer]
    groups: list[list[int]]
    state: dict[str, Any]
    factor: float = 1.0

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> OptimizerMaker:
        params = list(model.parameters())
        indices = {id(param): index for index, param in enumerate(params)}
        own = [group["params"] for group in optimizer.param_groups]
        if all(id(param) in indices for group in own for param in group):
            groups = [[indices[id(param)] for param in group] for group in own]
        elif len(own) == 1 and [p.shape for p in own[0]] == [p.shape for p in params]:
            groups = [list(range(len(params)))]  # made of a copy of the model
        else:
            raise ConfigError(
                "the optimizer's parameters are not the model's: make it of the model that the "
                "estimator is given, optimizer=SGD(model.parameters(), …)"
            )
        return cls(type(optimizer), groups, optimizer.state_dict())

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        params = list(parameters)
        # In PyTorch's state the groups have numbers in the place of parameters.
        saved: list[dict[str, Any]] = self.state["param_groups"]
        groups = [
            {
                **{n: x for n, x in group.items() if n != "params"},
                "params": [params[i] for i in own],
            }
            for group, own in zip(saved, self.groups, strict=True)
        ]
        rate = {"lr": saved[0]["lr"]} if "lr" in saved[0] else {}  # some classes demand one
        made = self.kind(groups, **rate)
        # Momenta and counts of steps, so that the training goes on and does not begin.
        made.load_state_dict(self.state)
        multiply_rates(made.param_groups, self.factor)
        return made


def multiply_rates(groups: Sequence[dict[str, Any]], factor: float) -> None:
    for group in groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * factor


@dataclass(frozen=True)
class Losses:
    """The sum of the losses of all labels, by default with equal weights of the sum 1.

    Attributes:
        reduction: `mean`, or `none` for the losses of the rows.
    """

    functions: Sequence[Callable[..., Any]]
    weights: Sequence[float] | None
    names: Sequence[str]
    reduction: str = "mean"

    def __call__(self, output: Any, label: Any) -> Any:
        weights = self.weights or [1.0 / len(self.names)] * len(self.names)
        pairs = matched(output, label, self.names)
        terms = zip(weights, self.functions, pairs, self.names, strict=True)
        return sum(weight * self._loss(loss_of(f), *pair, n) for weight, f, pair, n in terms)

    def to(self, device: Any) -> Losses:
        for each in self.functions:
            if hasattr(each, "to"):
                each.to(device)
        return self

    def _loss(self, loss: Loss, output: Any, label: Any, name: str) -> Any:
        label = fitted_label(loss, output, label, name)
        if self.reduction == "mean":
            return loss.of(output, label, None)
        # A function of the user's takes it, too, as under Horovod.
        by_row: Any = loss.by_row or partial(loss.call, **{"reduction": self.reduction})
        found = by_row(output, label)
        return found.reshape(len(found), -1).mean(1)


@dataclass(frozen=True)
class LabelMetric:
    function: Callable[..., Any]
    index: int
    names: Sequence[str]

    def __call__(self, output: Any, label: Any) -> Any:
        return self.function(*matched(output, label, self.names)[self.index])


def metrics_by_name(metrics: Sequence[Any], names: Sequence[str]) -> dict[str, LabelMetric]:
    """Return metrics by `group_<number>_<label>`.

    Args:
        metrics: functions; or lists with one for all labels, or one for each.
    """
    found = {}
    for number, group in enumerate(metrics):
        for index, function in enumerate(for_each(group, len(names))):
            found[f"group_{number}_{names[index]}"] = LabelMetric(function, index, names)
    return found


def history_of(found: Mapping[str, Sequence[float]], metrics: Sequence[str]) -> list[Any]:
    groups: dict[str, list[str]] = {}
    for name in metrics:
        groups.setdefault(name.split("_")[1], []).append(name)

    def part(prefix: str, epoch: int) -> dict[str, Any]:
        own = [{n: found[f"{prefix}{n}"][epoch] for n in names} for names in groups.values()]
        return {"loss": found[f"{prefix}loss"][epoch], "all_metrics": own}

    parts = {"train": "", **({"validation": "val_"} if "val_loss" in found else {})}
    return [
        {"epoch": epoch, **{name: part(prefix, epoch) for name, prefix in parts.items()}}
        for epoch in range(len(found["loss"]))
    ]


def matched(output: Any, label: Any, names: Sequence[str]) -> list[tuple[Any, Any]]:
    """Return output and label for each name, labels in the outputs' shapes where these fit."""
    outputs = list(output) if isinstance(output, list | tuple) else [output]
    labels = list(label) if isinstance(label, list | tuple) else [label]
    if len(outputs) < len(names):
        raise ConfigError(
            f"the model has {len(outputs)} outputs, and needs one for each label: "
            f"{', '.join(names)}"
        )
    return [
        (output, label.reshape(output.shape) if output.numel() == label.numel() else label)
        for output, label in zip(outputs, labels, strict=False)
    ]


def for_each(value: Any, count: int) -> list[Any]:
    """Return a value for each of `count` labels: one for all of them, or a list."""
    found = list(value) if isinstance(value, list | tuple) else [value]
    if len(found) == 1:
        return found * count
    if len(found) != count:
        raise ConfigError(f"List {found} must be length {count} (found: {len(found)})")
    return found
