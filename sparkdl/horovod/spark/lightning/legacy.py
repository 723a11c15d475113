"""A plain PyTorch module, its optimizer and its loss as a `LightningModule`.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/lightning/legacy.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkdl.horovod.spark.common.util import to_list
from sparkdl.horovod.spark.torch.modules import OptimizerState, Shape, shaped
from sparkdl.horovod.spark.torch.remote import Loss, matched


class _Steps:
    """The methods of Lightning's, for a module in `_model`."""

    _model: Any
    _state: OptimizerState
    _loss: Loss
    _columns: tuple[Sequence[str], Sequence[str], str | None]
    _shapes: tuple[Sequence[Shape | None], Sequence[Shape] | None]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._model(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, for this copy of the module."""
        return self._state.optimizer_for(self._model)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a batch."""
        return self._logged("train_loss", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a batch."""
        return self._logged("val_loss", batch)

    def _logged(self, name: str, batch: Any) -> Any:
        features, names, weight = self._columns
        input_shapes, label_shapes = self._shapes
        inputs = [
            shaped(batch[column].float(), shape)
            for column, shape in zip(features, input_shapes, strict=True)
        ]
        weights = batch[weight].float() if weight else None
        labels = [batch[name].float() for name in names]
        outputs, labels = matched(self(*inputs), labels, names, label_shapes)  # type: ignore[operator]
        loss = self._calculate_loss(outputs, labels, weights)
        self.log(name, loss, sync_dist=True, on_epoch=True, batch_size=len(inputs[0]))  # type: ignore[attr-defined]
        return loss

    def _calculate_loss(self, outputs: Any, labels: Any, sample_weights: Any = None) -> Any:
        return self._loss(outputs, labels, sample_weights)


def to_lightning_module(  # noqa: PLR0913 (Horovod's arguments, and the shapes)
    model: Any,
    optimizer: Any,
    loss_fns: Any,
    loss_weights: Sequence[float] | None,
    feature_cols: Sequence[str],
    label_cols: Sequence[str],
    sample_weights_col: str | None,
    validation: Any,
    input_shapes: Sequence[Shape | None] | None = None,
    label_shapes: Sequence[Shape] | None = None,
) -> Any:
    """Return a `LightningModule` that trains `model` as Horovod's estimator for PyTorch does.

    Args:
        validation: whether there are validation rows.
        input_shapes, label_shapes: of a batch; as the columns and as the outputs are, if not set.
    """
    from lightning.pytorch import LightningModule

    steps = dict(vars(_Steps))
    if not validation:
        del steps["validation_step"]
    steps = {name: value for name, value in steps.items() if callable(value)}
    module: Any = type("EstimatorModule", (LightningModule,), steps)()
    module._model = model
    module._state = OptimizerState.of(optimizer, model)
    module._loss = Loss(to_list(loss_fns, len(label_cols)) or [], loss_weights, len(label_cols))
    module._columns = tuple(feature_cols), tuple(label_cols), sample_weights_col
    module._shapes = input_shapes or [None] * len(feature_cols), label_shapes
    return module
