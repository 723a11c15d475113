"""`TorchEstimator` and `LightningEstimator`: train a module of PyTorch on several nodes."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.feed.reader.batches import SAMPLE_WEIGHT
from sparkdl.ml.estimators.network import NetworkEstimator
from sparkdl.ml.estimators.torch_batch import check_optimizer, loss_of, metrics_of
from sparkdl.ml.estimators.torch_train import (
    ModuleTask,
    TorchTask,
    check_lightning,
    check_trainer_args,
    train,
)
from sparkdl.ml.estimators.training import Inputs, check_fits, check_schema
from sparkdl.ml.model_file import ModelFile
from sparkdl.ml.scoring.model import TorchModel
from sparkdl.ml.scoring.source import NUMBER, Signature, Tensor
from sparkdl.ml.scoring.torch import module_of, module_signature, save_module

_WEIGHT = "the column sample_weight"


def module_file(module: Any) -> ModelFile:
    advice = "Give a function that makes it on each node"
    return ModelFile("module", partial(save_module, module=module, advice=advice))


class ModuleEstimator(NetworkEstimator[TorchModel], params=["input_shapes", "trainer_args"]):
    _hook = "on_train_epoch_end"

    def setModel(self, model: Any) -> Any:
        """Set the model: a module, or a function without arguments that makes one on each node.

        Raises:
            ConfigError: if it is neither, or cannot travel to the nodes.
        """
        if not callable(model):
            raise ConfigError(
                f"model is a {type(model).__name__}; give a torch.nn.Module or a function without "
                "arguments that makes one"
            )
        # Not imported here: the driver may lack it, and then `model` is no module of it.
        torch = sys.modules.get("torch")
        is_module = torch is not None and isinstance(model, torch.nn.Module)
        self._made = module_file(model) if is_module else model
        return self

    def _fitted(self, dataset: DataFrame) -> TorchModel:
        self._check_made()
        task = self._task()
        check_schema(task.columns, dataset.schema, task.sparse)
        check_fits(self._inputs(task), dataset.schema)
        return self._fitted_by(task, dataset)

    def _fitted_by(self, task: ModuleTask, dataset: DataFrame) -> TorchModel:
        if SAMPLE_WEIGHT in (*task.columns.features, *task.columns.labels):
            raise ConfigError(
                f"a column of features or labels is called {SAMPLE_WEIGHT!r}, as are the weights "
                "that batches have: rename it"
            )
        # Batches have a column of weights by this name already.
        if task.columns.weight == SAMPLE_WEIGHT:
            dataset = dataset.withColumnRenamed(SAMPLE_WEIGHT, _WEIGHT)
            task = replace(task, columns=replace(task.columns, weight=_WEIGHT))
        training = self._training(train, task, framework="torch")
        file, signature, summary = self._trained(dataset, training)
        return self._with_values(TorchModel._of(file, signature), summary)

    def _task(self) -> ModuleTask:
        return ModuleTask(**self._task_fields())

    def _task_fields(self) -> dict[str, Any]:
        given = self.getTrainerArgs()
        check_trainer_args(given, () if callable(self._callbacks) else self._callbacks)
        own = {"made": self._made, "shapes": self.getInputShapes(), "trainer_args": given}
        return {**super()._task_fields(), **own}

    def _inputs(self, task: ModuleTask) -> Inputs:
        """Return the input for each column; the inputs are unnamed if nodes make the model."""
        if unknown := [name for name in task.shapes if name not in task.columns.features]:
            raise ConfigError(
                f"input_shapes names {', '.join(map(repr, unknown))}: must name columns of the "
                f"features, which are {', '.join(task.columns.features)}"
            )
        if both := [name for name in task.sparse if name in task.shapes]:
            raise ConfigError(f"input_shapes and sparse= name {both[0]!r}: leave it out of one")
        features = dict.fromkeys(task.columns.features.values())
        signature = Signature(tuple(Tensor(name, NUMBER, None) for name in features), ())
        # Without PyTorch on the driver, the nodes check it.
        if isinstance(task.made, ModelFile) and find_spec("torch"):
            signature = module_signature(module_of(task.made.path, maps=True))
        return task.inputs_of(signature)


class TorchEstimator(ModuleEstimator, params=["optimizer", "loss", "metrics"]):
    """Fits a module of PyTorch on `num_workers` nodes, which train in step.

    `TorchEstimator(model, loss="MSELoss", num_workers=2, epochs=5).fit(df)` returns a `TorchModel`.
    Lightning's `Trainer` trains it, as for `LightningEstimator`. Every row is used once an epoch,
    and a step's gradient is that of the mean over the rows of all nodes. `batch_size` is what one
    node sees in a step. Parameters are those of the table in docs/spark-ml.md. Floats come in the
    dtype of the model's parameters; the label as the loss takes it, see there.

    Args:
        model: a `torch.nn.Module`, or a function without arguments that makes one on each node.
            All nodes begin with the first one's weights.
        callbacks: of Lightning, whose `pl_module.module` is the model; or a function without
            arguments that makes the list. One that sets `trainer.should_stop` ends the training.
        params: parameters by name. `optimizer` may be a name, a class or a function of the
            parameters, `loss` a name, a module or a function of output and label, `trainer_args`
            those of the `Trainer`: `gradient_clip_val`, `precision`, `logger`, `strategy`, …

    Raises:
        ConfigError: if `model` is neither, or a parameter is unknown or its value invalid.
        FrameworkMissingError: by `fit`, without Lightning; nothing was started.
    """

    __module__ = "sparkdl"

    def _task(self) -> TorchTask:
        if self.getLoss() is None:
            raise ConfigError(
                "TorchEstimator has no loss: set loss='CrossEntropyLoss' or another of torch.nn, a "
                "module, or a function of output and label"
            )
        # Without PyTorch on the driver, the nodes check it.
        if find_spec("torch"):
            check_lightning()
        task = TorchTask(
            optimizer=self.getOptimizer(),
            loss=self.getLoss(),
            metrics=self.getMetrics(),
            **self._task_fields(),
        )
        # An early check, without an import of PyTorch: the nodes check again.
        if "torch" in sys.modules:
            check_optimizer(task.optimizer)
            loss_of(task.loss)
            metrics_of(task.metrics)
        return task


class LightningEstimator(ModuleEstimator):
    """Fits a `LightningModule` on `num_workers` nodes, by Lightning's own `Trainer`.

    `LightningEstimator(module, num_workers=2, epochs=5).fit(df)` returns a `TorchModel`, which
    scores by the module's `forward`. The module's steps are given `(features, label)`, with
    `weight_col` `(features, label, weight)`; several features are a dict by input. Floats come in
    the dtype of the module's parameters, others as the column has them. The history holds what the
    module logs.

    Args:
        model: a `LightningModule`, or a function without arguments that makes one on each node.
        callbacks: of Lightning; or a function without arguments that makes the list.
        params: parameters by name. `trainer_args` are the `Trainer`'s: `gradient_clip_val`,
            `precision`, `logger`, `strategy`, …

    Raises:
        ConfigError: if `model` is neither, or a parameter is unknown or its value invalid.
    """

    __module__ = "sparkdl"
