"""Programs written for Horovod's estimators, as its examples are; only the import is sparkdl's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.linalg import Vectors
from pyspark.sql.functions import udf
from pyspark.sql.types import DoubleType

from sparkdl.horovod.spark.common.backend import SparkBackend
from sparkdl.horovod.spark.common.store import Store
from tests.doubles.lazy import Lazy, needs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

nn: Any = Lazy("torch.nn")
functional: Any = Lazy("torch.nn.functional")


def images(spark: SparkSession) -> DataFrame:
    """Return images of 4 x 4 as sparse vectors, of three classes; some are to validate with."""
    draws = np.random.default_rng(0)
    rows = []
    for number in range(120):
        label = number % 3
        places = sorted({label * 5, *map(int, draws.integers(0, 16, 2))})
        values = [1.0 if place == label * 5 else 0.2 for place in places]
        rows.append((float(label), Vectors.sparse(16, places, values), number % 5 // 4))
    return spark.createDataFrame(rows, ["label", "features", "is_val"]).coalesce(2)


def backend(num_proc: int) -> SparkBackend:
    return SparkBackend(
        num_proc=num_proc, stdout=sys.stdout, stderr=sys.stderr, prefix_output_with_timestamp=True
    )


def accuracy(scored: DataFrame) -> float:
    argmax = udf(lambda vector: float(np.argmax(vector)), returnType=DoubleType())
    scored = scored.withColumn("label_pred", argmax(scored.label_prob))
    evaluator = MulticlassClassificationEvaluator(
        predictionCol="label_pred", labelCol="label", metricName="accuracy"
    )
    return evaluator.evaluate(scored)


@pytest.mark.smoke
@pytest.mark.torch
def test_pytorch_program_of_two_labels_and_a_lambda(spark_ml: SparkSession, tmp_path: Path) -> None:
    import torch
    from torch import optim

    import sparkdl.horovod.spark.torch as hvd

    torch.manual_seed(1)
    frame = images(spark_ml)

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, kernel_size=2)
            self.last = nn.Linear(36, 3)

        def forward(self, features: Any, label: Any) -> Any:
            x = functional.relu(self.conv(features.float()))
            scores = functional.log_softmax(self.last(x.view(-1, 36)), -1)
            return scores, torch.stack([label, label + 1], 1)

    model = Net()
    loss = nn.NLLLoss()
    torch_estimator = hvd.TorchEstimator(
        backend=backend(2),
        store=Store.create(str(tmp_path)),
        model=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        loss=[lambda input, target: loss(input, target.long()), nn.L1Loss()],
        input_shapes=[[-1, 1, 4, 4], [-1]],
        feature_cols=["features", "label"],
        label_cols=["label", "pair"],
        batch_size=16,
        epochs=6,
        validation="is_val",
        transformation_fn=lambda rows: rows.assign(pair=[np.array([x, x]) for x in rows["label"]]),
        metrics=[[lambda input, target: loss(input, target.long()), nn.L1Loss()]],
        backward_passes_per_step=1,
        verbose=1,
    )
    Pipeline(stages=[torch_estimator]).write().save(f"{tmp_path}/estimator")
    loaded: Any = Pipeline.load(f"{tmp_path}/estimator").getStages()[0]
    torch_model = loaded.setBackend(backend(2)).fit(frame).setOutputCols(["label_prob", "next"])
    PipelineModel([torch_model]).write().save(f"{tmp_path}/model")
    scored = PipelineModel.load(f"{tmp_path}/model").transform(frame)
    assert accuracy(scored) > 0.9
    assert all(list(row.next) == [row.label, row.label + 1] for row in scored.collect())
    last = torch_model.getHistory()[-1]
    assert last["epoch"] == 5
    (metrics,) = last["validation"]["all_metrics"]
    assert metrics["group_0_pair"] == pytest.approx(0.5)
    sums = sum(metrics.values())
    assert sums / 2 == pytest.approx(last["validation"]["loss"], rel=1e-4)
    assert metrics["group_0_label"] < 1


@pytest.mark.deep
@pytest.mark.torch
@needs("pytorch_lightning")
def test_lightning_program_with_callbacks(spark_ml: SparkSession, tmp_path: Path) -> None:
    import torch
    from pytorch_lightning import LightningModule
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.callbacks.early_stopping import EarlyStopping
    from pytorch_lightning.callbacks.model_checkpoint import ModelCheckpoint
    from sparkdl.horovod.spark.lightning.estimator import MIN_PL_VERSION  # type: ignore[import-not-found]
    from torch import optim

    import sparkdl.horovod.spark.lightning as hvd

    assert MIN_PL_VERSION
    torch.manual_seed(1)
    frame = images(spark_ml)

    class Net(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(16, 3)

        def forward(self, x: Any) -> Any:
            return functional.log_softmax(self.last(x.float().reshape((-1, 16))), -1)

        def configure_optimizers(self) -> Any:
            return optim.SGD(self.parameters(), lr=0.2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = functional.nll_loss(self(batch["features"]), batch["label"].long())
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = functional.nll_loss(self(batch["features"]), batch["label"].long())
            self.log("val_loss", loss)

    class Worsens(Callback):  # type: ignore[misc]
        """Spoils the weights after the third epoch: an earlier epoch is the best one."""

        def on_train_epoch_start(self, trainer: Any, model: Any) -> None:
            if trainer.current_epoch >= 3:
                torch.nn.init.constant_(model.last.bias, 50.0 * trainer.current_epoch)
                model.last.bias.data[1:] = 0

    torch_estimator = hvd.TorchEstimator(
        backend=backend(2),
        store=Store.create(str(tmp_path)),
        model=Net(),
        input_shapes=[[-1, 1, 4, 4]],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=8,
        epochs=12,
        validation=0.2,
        verbose=1,
        callbacks=[
            Worsens(),
            ModelCheckpoint(monitor="val_loss", mode="min", save_top_k=1),
            EarlyStopping(monitor="val_loss", min_delta=0.001, patience=3, mode="min"),
        ],
        profiler=None,
    )
    torch_model = torch_estimator.fit(frame).setOutputCols(["label_prob"])
    assert accuracy(torch_model.transform(frame)) > 0.9
    assert abs(torch_model.getModel().last.bias[0].item()) < 10
    assert {"train_loss", "val_loss"} <= set(torch_model.getHistory())
