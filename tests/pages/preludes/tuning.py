"""The library of the search, what its trials reach, and a pipeline."""

import keras
import optuna
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import StandardScaler, VectorAssembler

accuracy = 0.5

# block: A search by Optuna


def make():
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


train, validation = df, df.limit(16)
evaluator = RegressionEvaluator(labelCol="label", metricName="rmse")
pipeline = Pipeline(
    stages=[
        VectorAssembler(inputCols=["x"], outputCol="raw"),
        StandardScaler(inputCol="raw", outputCol="features"),
        sparkdl.KerasEstimator(make, loss="mse", label_col="label"),
    ]
)

# block: A search over an estimator
assert set(study.best_params) == {"learning_rate"}
