"""`import sparkdl.horovod.spark.lightning`: Horovod's estimator for PyTorch Lightning.

Runs in: driver, child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/lightning/estimator.py
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.spark import torch as torch_face
from sparkdl.horovod.spark.common.estimator import Fit, HorovodEstimator, inputs_by_column
from sparkdl.horovod.spark.common.params import row
from sparkdl.horovod.spark.torch import multiply_rates
from sparkdl.lightning import TRAINERS
from sparkdl.ml.estimators import torch_estimator as ml
from sparkdl.ml.scoring.torch import module_signature

__all__ = ["TorchEstimator", "TorchModel"]
__path__: list[str] = []
"""Makes this a package, as Horovod's is, so that imports of its modules raise advice."""
__getattr__ = partial(missing_name, __name__)
# Where Horovod's programs import `MIN_PL_VERSION` from.
sys.modules[f"{__name__}.estimator"] = sys.modules[__name__]

MIN_PL_VERSION = "2.0.0"
"""By which programs for Horovod ask whether Lightning is new enough."""
_TRAINER = ("logger", "log_every_n_steps", "profiler")
"""Parameters that are arguments of the `Trainer`."""


class TorchEstimator(
    HorovodEstimator,
    params=[
        torch_face.SHAPES,
        row("trainer_args", "arguments of Lightning's Trainer"),
        *(row(name, f"the Trainer's {name}") for name in _TRAINER),
    ],
):
    """Fits a `LightningModule` to a DataFrame, by `sparkdl.LightningEstimator`.

    Batches are dicts of tensors by column. Learning rates are multiplied by the number of
    processes. `fit` returns a `TorchModel`, whose history holds the metrics logged last.

    Args:
        kwargs: parameters by name, see `explainParams()`.
    """

    _prefix = "lightning"

    def _check_params(self) -> None:
        super()._check_params()
        if self._package() is None:
            raise ConfigError(
                f"the model is a {type(self.getModel()).__name__}, but must be a LightningModule: "
                "wrap it in one, or use sparkdl.horovod.spark.torch.TorchEstimator"
            )
        for name in ("optimizer", "loss", "loss_weights", "metrics"):
            if self.getOrDefault(name):
                raise ConfigError(
                    f"Parameter `{name}` cannot be specified with a `LightningModule`: it has "
                    "configure_optimizers and training_step"
                )

    def _package(self) -> str | None:
        for kind in type(self.getModel()).__mro__:
            if kind.__name__ == "LightningModule":
                return next((p for p in TRAINERS if kind.__module__.startswith(f"{p}.")), None)
        return None

    def _fitted(self, fit: Fit) -> TorchModel:
        module = copy.deepcopy(self.getModel())
        names = self.getFeatureCols()
        mapping = inputs_by_column(fit.features, module_signature(module), names)
        module.__class__ = stepping(type(module), mapping, fit.labels, self.getSampleWeightCol())
        given = {name: self.getOrDefault(name) for name in _TRAINER if self.isSet(name)}
        settings = dict(fit.settings)
        if len(fit.labels) > 1:
            settings["label_col"] = {name: name for name in fit.labels}
        estimator = ml.LightningEstimator(
            module,
            callbacks=[*self.getCallbacks(), _run(str(self._package()), fit.num_proc)],
            trainer_args={**given, **(self.getTrainerArgs() or {})},
            input_mapping=mapping,
            **settings,
        )
        fitted = estimator.fit(fit.rows)
        trained = fitted.getModel().eval()
        trained.__class__ = type(self.getModel())
        values = {
            name: [value for value in each if value is not None]
            for name, each in fitted.history.items()
        }
        return TorchModel(
            history={name: each[-1] for name, each in values.items() if each},
            model=trained,
            input_shapes=self.getInputShapes(),
            **fit.common,
        )


def stepping(
    kind: type[Any], features: Mapping[str, str], labels: Sequence[str], weight: str | None
) -> type[Any]:
    """Return a subclass of a module's class, whose steps get batches as dicts by column.

    Args:
        features: column to the parameter of `forward`.
    """

    def by_column(batch: Any) -> dict[str, Any]:
        inputs, label, *weights = batch
        found = {
            name: inputs[at] if isinstance(inputs, Mapping) else inputs
            for name, at in features.items()
        }
        found.update(label if isinstance(label, Mapping) else {labels[0]: label})
        return {**found, weight: weights[0]} if weight else found

    def step(name: str) -> Any:
        own = getattr(kind, name)

        def call(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return own(self, by_column(batch), *args, **kwargs)

        return call

    # Lightning validates if the class has a step of its own for it.
    has = [name for name in ("training_step", "validation_step") if _is_own(kind, name)]
    return type(kind.__name__, (kind,), {name: step(name) for name in has})


def _is_own(kind: type[Any], name: str) -> bool:
    home = next(each for each in kind.__mro__ if name in vars(each))
    return home.__module__.split(".")[0] not in ("lightning", "pytorch_lightning")


def _run(package: str, factor: int) -> Any:
    """Return the callback that multiplies the learning rates."""

    class Run(import_module(package).Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for optimizer in trainer.optimizers:
                multiply_rates(optimizer.param_groups, factor)
            for config in trainer.lr_scheduler_configs:
                if (rates := getattr(config.scheduler, "base_lrs", None)) is not None:
                    # Schedulers have noted the rates before they were multiplied.
                    config.scheduler.base_lrs = [rate * factor for rate in rates]

    return Run()


class TorchModel(torch_face.TorchModel):
    """Adds the outputs of a `LightningModule` to a DataFrame; see that of `spark.torch`."""
