"""Fits of estimators in MLflow: on Spark, with real trainings."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
import sparkdl.mlflow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

if find_spec("mlflow") is None:
    pytest.skip("MLflow is not installed", allow_module_level=True)

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.deep,
    pytest.mark.filterwarnings("ignore"),  # of MLflow, SQLAlchemy and Keras
]
SOON_S = 120.0


def model() -> Any:
    import keras

    return keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(1)])


def test_fit_of_an_estimator_is_a_run(
    spark_local: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "models")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("_MLFLOW_TELEMETRY_SESSION_ID", raising=False)
    frame = spark_local.range(64, numPartitions=2).selectExpr(
        "array_repeat(cast(id / 64 as double), 3) as features", "id / 64 as label"
    )
    estimator = sparkdl.KerasEstimator(model, loss="mse", num_workers=1, epochs=2)
    sparkdl.mlflow.autolog()
    try:
        fitted = estimator.fit(frame)
        assert sparkdl.mlflow.flush(SOON_S)
    finally:
        sparkdl.mlflow.autolog(disable=True)
    found = mlflow.search_runs(output_format="list")
    (alone,) = [run for run in found if run.info.run_name == "sparkdl KerasEstimator"]
    assert alone.data.metrics["loss"] == fitted.history["loss"][-1]
    assert alone.data.params["epochs"] == "2"
    for engine in SqlAlchemyStore._engine_map.values():
        engine.dispose()
