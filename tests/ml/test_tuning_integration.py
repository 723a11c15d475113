"""Searches on Spark: trials on sub-clusters that take turns, and over a pipeline of stages."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.regression import LinearRegression
from pyspark.sql import SparkSession

from sparkdl.core.errors import ResultError
from sparkdl.ml.tuning import search, search_estimator
from tests.ml.train_fns import distance

optuna = pytest.importorskip("optuna")


def whole(trial: Any) -> dict[str, Any]:
    return {"x": trial.suggest_int("x", 0, 9)}


def test_trials_on_sub_clusters_of_spark_take_turns(spark_ml: SparkSession) -> None:
    study = optuna.create_study(direction="minimize")
    for x in (1, 2, 4):
        study.enqueue_trial({"x": x})
    found = search(spark_ml, distance, whole, trials=3, parallelism=3, nodes=2, study=study)
    assert [trial.value for trial in found.trials] == [2.0, 1.0, 1.0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_pipeline_is_searched_over_parameters_of_its_stages(spark_ml: SparkSession) -> None:
    data = spark_ml.createDataFrame([(float(n), 2.0 * n) for n in range(20)], "x double, y double")
    stages: Any = [
        VectorAssembler(inputCols=["x"], outputCol="features"),
        LinearRegression(labelCol="y", solver="normal"),
    ]
    evaluator = RegressionEvaluator(labelCol="y", metricName="rmse")
    pipeline = Pipeline(stages=stages)

    def space(trial: Any, name: str = "1.regParam") -> dict[str, Any]:
        return {name: trial.suggest_categorical(name, [0.0, 100.0])}

    sampler = optuna.samplers.GridSampler({"1.regParam": [0.0, 100.0]})
    study = optuna.create_study(sampler=sampler)
    found = search_estimator(pipeline, evaluator, data, data, space, trials=9, study=study)
    assert len(found.trials) == 2  # the grid has no more
    assert found.best_params == {"1.regParam": 0.0}
    assert found.best_value == pytest.approx(0.0, abs=1e-6)
    wrong = partial(space, name="2.regParam")
    with pytest.raises(ResultError, match=r"'2\.regParam', which is no parameter of Pipeline"):
        search_estimator(pipeline, evaluator, data, data, wrong, trials=1)
