"""`KerasEstimator(mode="jobs")`: the nodes' face without nodes, to Spark's tuning."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit
from pyspark.sql import SparkSession

from sparkdl.ml.estimators.keras_estimator import KerasEstimator

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer"),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Spark's pool
@pytest.mark.deep
def test_spark_tunes_a_regression(spark_ml: SparkSession) -> None:
    import keras

    layer = keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((10,)), layer])
    model.compile(keras.optimizers.SGD(1e-6), "mse")
    estimator: Any = KerasEstimator(model, mode="jobs", epochs=10)
    rows = spark_ml.range(40, numPartitions=1).selectExpr(
        "array_repeat(id / 40, 10) as features", "id / 40 as label"
    )
    search: Any = TrainValidationSplit(
        estimator=Pipeline(stages=[estimator]),
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.learning_rate, [0.05]).build(),
        evaluator=RegressionEvaluator(metricName="r2"),
        seed=1,
    )
    tuned = search.fit(rows)
    gc.collect()  # Spark leaves a pool of threads to it
    assert tuned.validationMetrics[0] > 0.5
    assert tuned.transform(rows).dtypes[-1] == ("prediction", "double")
