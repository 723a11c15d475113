"""`TorchEstimator` and `TorchModel` for PyTorch Lightning, as Horovod has them.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/lightning/estimator.py
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.ml.param import TypeConverters

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark.common import util
from sparkdl.horovod.spark.common.params import EstimatorParams as EstimatorParams
from sparkdl.horovod.spark.common.params import Row
from sparkdl.horovod.spark.common.work import Work
from sparkdl.horovod.spark.lightning.remote import LightningTrainer
from sparkdl.horovod.spark.torch import estimator as torch_estimator
from sparkdl.horovod.spark.torch.modules import save_start
from sparkdl.lightning import TRAINERS

_int, _bool = TypeConverters.toInt, TypeConverters.toBoolean
_SUFFIX = ".ckpt"
MIN_PL_VERSION = "2.0.0"
"""By which programs for Horovod ask whether Lightning is new enough."""
OWN = (
    Row("trainer_args", None, "arguments of Lightning's Trainer, before those of the estimator"),
    Row("num_gpus", None, "accepted: a process has one GPU, where there are any", _int, "NumGPUs"),
    Row("logger", None, "Lightning's logger; TensorBoard's in the store, if it is not set"),
    Row("log_every_n_steps", 50, "steps between two lines of the log", _int),
    Row("loader_num_epochs", None, "accepted, without effect"),
    Row("terminate_on_nan", False, "whether a loss that is no number ends the training", _bool),
    Row("profiler", None, "Lightning's profiler"),
    Row("debug_data_loader", False, "accepted, without effect", _bool),
    Row("train_async_data_loader_queue_size", None, "accepted, without effect"),
    Row("val_async_data_loader_queue_size", None, "accepted, without effect"),
    Row("transformation_edit_fields", None, "accepted: the columns of transformation_fn decide"),
    Row("transformation_removed_fields", None, "accepted, likewise"),
)


class TorchEstimator(torch_estimator.TorchEstimator, params=OWN):
    """Fits a `LightningModule` to a DataFrame, in processes that average their gradients.

    Batches are dicts of tensors by column. Learning rates are multiplied by the number of
    processes. `fit` returns a `TorchModel`, whose history holds the metrics logged last.

    Args:
        kwargs: parameters by name, see `explainParams()`.
    """

    _unused = (
        *("backward_passes_per_step", "gradient_compression", "loss_constructors", "metrics"),
        "train_minibatch_fn",
    )

    def _check_training(self) -> None:
        if self._package() is None:
            raise ConfigError(
                f"the model is a {type(self.getModel()).__name__}, and no LightningModule: make "
                "one of it, or use sparkdl.horovod.spark.torch.TorchEstimator"
            )
        for name in ("optimizer", "loss", "loss_weights"):
            if self.getOrDefault(name):
                raise ConfigError(
                    f"Parameter `{name}` cannot be specified with a `LightningModule`: it has "
                    "configure_optimizers and training_step"
                )

    def _package(self) -> str | None:
        """Return whose `LightningModule` the model is, None if it is a plain module."""
        for kind in type(self.getModel()).__mro__:
            if kind.__name__ == "LightningModule":
                return next((p for p in TRAINERS if kind.__module__.startswith(f"{p}.")), None)
        return None

    def _has_checkpoint(self, run_id: str) -> bool:
        return bool(self._store().get_checkpoints(run_id, _SUFFIX))

    def _read_checkpoint(self, run_id: str) -> bytes | None:
        paths = self._store().get_checkpoints(run_id, _SUFFIX)
        if not paths:
            return None
        if self.getVerbose():
            util.say(f"Resuming training from last checkpoint: {paths[-1]}")
        return bytes(self._store().fs.cat_file(paths[-1]))

    def _write_start(self, file: Path, run_id: str) -> None:
        import torch

        module = self.getModel()
        states: list[Any] = []
        if self._has_checkpoint(run_id) and (content := self._read_checkpoint(run_id)):
            last = torch.load(io.BytesIO(content), "cpu", weights_only=False)
            module = copy.deepcopy(module)
            module.load_state_dict(last["state_dict"])
            states = last["optimizer_states"]
        save_start(file, model=module, states=states)

    def _trainer(self, work: Work) -> Callable[[], Any]:
        return LightningTrainer(work, str(self._package()))

    def _create_model(self, history: Any, file: Path, run_id: str, metadata: util.Metadata) -> Any:
        import torch

        module = copy.deepcopy(self.getModel())
        module.load_state_dict(torch.load(file, "cpu", weights_only=False))
        return TorchModel(
            history=history,
            model=module.eval(),
            feature_columns=self.getFeatureCols(),
            input_shapes=self.getInputShapes(),
            label_columns=self.getLabelCols(),
            run_id=run_id,
            _metadata=metadata,
        )


class TorchModel(torch_estimator.TorchModel):
    """Adds the outputs of a `LightningModule` to a DataFrame; see that of `spark.torch`."""
