"""Horovod's estimators on Spark: DataFrames are fitted and transformed, stages saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql.types import FloatType, IntegerType

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark.common import util
from sparkdl.horovod.spark.common.store import LocalStore
from tests.horovod.spark.common.linear import InThisProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def frame_of(spark: SparkSession) -> DataFrame:
    rows = [(Vectors.dense([i % 2, i % 3]), float(i % 2), i % 2, i % 5 == 0) for i in range(40)]
    frame = spark.createDataFrame(rows, ["x", "y", "n", "is_val"])
    return frame.selectExpr("x", "cast(y as float) y", "cast(n as int) n", "is_val")


def torch_estimator(folder: Path, **where: Any) -> Any:
    import torch

    from sparkdl.horovod.spark.torch import TorchEstimator

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Sigmoid())
    return TorchEstimator(
        **where,
        store=LocalStore(str(folder), save_runs=False),
        model=module,
        optimizer=torch.optim.Adam(module.parameters(), lr=0.2),
        loss=torch.nn.functional.binary_cross_entropy,
        input_shapes=[[-1, 2]],
        feature_cols=["x"],
        label_cols=["y"],
        validation="is_val",
        batch_size=4,
        epochs=4,
        verbose=0,
    )


@pytest.mark.torch
def test_module_is_fitted_in_two_processes_and_scores(
    spark_ml: SparkSession, tmp_path: Path
) -> None:
    frame = frame_of(spark_ml)
    model = torch_estimator(tmp_path / "store", num_proc=2).fit(frame)
    history = model.getHistory()
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"]
    assert history[-1]["validation"]["loss"] < 0.4
    scored = model.transform(frame)
    assert isinstance(scored.schema["y__output"].dataType, FloatType)
    assert all(abs(row.y__output - row.y) < 0.5 for row in scored.collect())
    assert not (tmp_path / "store" / "runs").exists() or not list(
        (tmp_path / "store" / "runs").iterdir()
    )


@pytest.mark.torch
@pytest.mark.deep
def test_estimator_and_model_are_saved_and_loaded(spark_ml: SparkSession, tmp_path: Path) -> None:
    from sparkdl.horovod.spark.torch import TorchModel

    frame = frame_of(spark_ml)
    estimator = torch_estimator(tmp_path / "store", backend=InThisProcess())
    path = str(tmp_path / "saved")
    Pipeline(stages=[estimator]).write().save(path)
    loaded: Any = Pipeline.load(path).getStages()[0]
    model = loaded.setStore(estimator.getStore()).setBackend(InThisProcess()).fit(frame)
    assert model.getHistory()[0]["train"]["loss"] > 0
    scored = model.transform(frame)
    PipelineModel([model]).write().save(f"{path}-model")
    (same,) = PipelineModel.load(f"{path}-model").stages
    assert isinstance(same, TorchModel)
    same.setOutputCols(["p"])
    assert [row.p for row in same.transform(frame).collect()] == [
        row.y__output for row in scored.collect()
    ]
    with pytest.raises(ConfigError, match="two columns 'y'"):
        same.setOutputCols(["y"]).transform(frame)


@pytest.mark.torch
def test_types_of_results_are_those_of_the_labels(spark_ml: SparkSession, tmp_path: Path) -> None:
    import torch

    from sparkdl.horovod.spark.torch import TorchModel

    class Two(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, y: Any) -> Any:
            return x * 2, x.sum(1) + y + 0.3

    frame = frame_of(spark_ml)
    model = TorchModel(
        model=Two(),
        feature_columns=["x", "y"],
        label_columns=["x", "n"],
        _metadata=util._get_metadata(frame),
    )
    found = model.transform(frame)
    assert isinstance(found.schema["x__output"].dataType, VectorUDT)
    assert isinstance(found.schema["n__output"].dataType, IntegerType)
    for row in found.collect():
        assert np.allclose(row.x__output.toArray(), 2 * row.x.toArray())
        assert row.n__output == round(float(row.x.toArray().sum()) + row.y + 0.3)
    model.setOutputCols(["a", "b", "c"]).setLabelColumns(["x", "n", "y"])
    with pytest.raises(ConfigError, match="2 outputs, and needs one for each label: x, n, y"):
        model.transform(frame)


@pytest.mark.tensorflow
@pytest.mark.torch
@pytest.mark.deep
def test_keras_model_is_fitted_in_two_processes_and_scores(
    spark_ml: SparkSession, tmp_path: Path
) -> None:
    import keras

    from sparkdl.horovod.spark.keras import KerasEstimator, KerasModel

    frame = frame_of(spark_ml)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input([2]), keras.layers.Dense(1, activation="sigmoid")]
    estimator = KerasEstimator(
        num_proc=2,
        store=LocalStore(str(tmp_path / "store")),
        model=keras.Sequential(layers),
        optimizer=keras.optimizers.Adam(0.2),
        loss="binary_crossentropy",
        feature_cols=["x"],
        label_cols=["y"],
        validation=0.25,
        batch_size=4,
        epochs=4,
        verbose=0,
    )
    model = estimator.fit(frame)
    assert len(model.getHistory()["val_loss"]) == 4
    assert float(model.getModel().optimizer.learning_rate) == pytest.approx(0.2)
    scored = model.transform(frame)
    assert isinstance(scored.schema["y__output"].dataType, FloatType)
    assert all(abs(row.y__output - row.y) < 0.5 for row in scored.collect())
    path = str(tmp_path / "saved")
    estimator.save(path)
    loaded = KerasEstimator.load(path).setStore(estimator.getStore())
    assert loaded.getOptimizer().get_config() == estimator.getOptimizer().get_config()
    model.save(f"{path}-model")
    same = KerasModel.load(f"{path}-model")
    assert [row.y__output for row in same.transform(frame).collect()] == [
        row.y__output for row in scored.collect()
    ]
