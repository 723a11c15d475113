"""Horovod's estimator for Lightning on Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sparkdl.core.errors import ConfigError
from tests.doubles.lazy import Lazy, needs
from tests.horovod.spark.common.linear import WEIGHTS, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.torch, needs("lightning")]
lightning: Any = Lazy("lightning.pytorch")


def linear() -> Any:
    """Return a module that is made here, so that it travels by value."""
    import torch

    class Linear(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = torch.nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"])
            assert set(batch) == {"x", "y", "n", "w"}
            self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = torch.nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"])
            self.log("val_loss", loss, sync_dist=True)

    return Linear()


def estimator(**options: Any) -> Any:
    from sparkdl.horovod.spark.lightning import TorchEstimator

    given = {
        "num_proc": 2,
        "model": options.pop("model", None) or linear(),
        "input_shapes": [[-1, 2]],
        "feature_cols": ["x"],
        "label_cols": ["y", "n"],
        "sample_weight_col": "w",
        "batch_size": 8,
        "epochs": 8,
        "verbose": 0,
        **options,
    }
    return TorchEstimator(**given)


@pytest.mark.deep
def test_module_is_fitted_and_scores(spark_ml: SparkSession) -> None:
    frame = rows_of(spark_ml)
    model = estimator(validation="is_val").fit(frame)
    assert np.allclose(model.getModel().layer.weight.detach().numpy(), WEIGHTS, atol=0.1)
    assert {"train_loss", "val_loss"} <= set(model.getHistory())
    scored = model.setLabelColumns(["y"]).setOutputCols(["p"]).transform(frame)
    assert all(abs(row.p - row.y) < 0.5 for row in scored.collect())


def test_optimizer_beside_a_lightning_module_is_refused(spark_ml: SparkSession) -> None:
    import torch

    frame = rows_of(spark_ml)
    with pytest.raises(ConfigError, match="`loss` cannot be specified with a `LightningModule`"):
        estimator(loss=[len]).fit(frame)
    with pytest.raises(ConfigError, match=r"is a Linear, and no LightningModule: .*TorchEstimator"):
        estimator(model=torch.nn.Linear(2, 1)).fit(frame)
