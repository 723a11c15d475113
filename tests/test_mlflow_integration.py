"""Models of estimators in MLflow, and Spark ML's searches: on Spark, with real trainings."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

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


def test_what_an_estimator_saved_scores_frames_and_a_search_has_its_fits_below_it(
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
    rate = estimator.getParam("learning_rate")
    search = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=ParamGridBuilder().addGrid(rate, [0.01, 0.1]).build(),
        evaluator=RegressionEvaluator(labelCol="label"),
        numFolds=2,
        parallelism=2,
    )
    monkeypatch.setenv("SPARKDL_KEEP_WARM_S", "0")
    sparkdl.mlflow.autolog()
    try:
        fitted = estimator.fit(frame)
        search.fit(frame)
        assert sparkdl.mlflow.flush(SOON_S)
    finally:
        sparkdl.mlflow.autolog(disable=True)
    found = mlflow.search_runs(output_format="list")
    (parent,) = [run for run in found if run.info.run_name == "sparkdl CrossValidator"]
    fits = [run for run in found if run.info.run_name == "sparkdl KerasEstimator"]
    (alone,) = [run for run in fits if "mlflow.parentRunId" not in run.data.tags]
    nested = [run for run in fits if run is not alone]
    assert {run.data.tags["mlflow.parentRunId"] for run in nested} == {parent.info.run_id}
    rates = sorted(run.data.params["learning_rate"] for run in nested)
    assert rates[:2] == ["0.01", "0.01"]
    assert len(rates) == 5, "two folds of two candidates, and the best one again"
    assert alone.data.metrics["loss"] == fitted.history["loss"][-1]
    assert alone.data.params["epochs"] == "2"

    uri = f"runs:/{alone.info.run_id}/model"
    loaded = mlflow.pyfunc.load_model(uri)
    rows = frame.limit(5).toPandas()
    scored_rows: Any = fitted.transform(frame.limit(5)).toPandas()
    wanted = scored_rows["prediction"].to_numpy()
    np.testing.assert_allclose(loaded.predict(rows)["prediction"], wanted, rtol=1e-5)
    assert loaded.metadata.signature.inputs.input_names() == ["features"]
    assert loaded.metadata.signature.outputs.input_names() == ["prediction"]
    assert len(loaded.input_example) == 5
    score = mlflow.pyfunc.spark_udf(spark_local, uri, env_manager="local")
    scored = [row[0] for row in frame.limit(5).select(score("features")).collect()]
    np.testing.assert_allclose(scored, wanted, rtol=1e-5)
    for engine in SqlAlchemyStore._engine_map.values():
        engine.dispose()
