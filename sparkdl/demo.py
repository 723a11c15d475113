"""`sparkdl demo`: a small training and a scoring, which show that the installation works.

Runs in: driver
"""

from __future__ import annotations

import os
import sys


def demo() -> str:
    """Fit a PyTorch model on two nodes, and return how well it scores other rows."""
    from pyspark.sql import SparkSession
    from torch import nn

    from sparkdl.ml.estimators.torch_estimator import TorchEstimator

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark takes python3 of the path
    spark = SparkSession.builder.master("local[2]").appName("sparkdl demo").getOrCreate()
    columns = ("array(float(id % 7), float(id % 11)) x", "id % 7 < id % 11 y")
    train, test = spark.range(20_000).selectExpr(*columns).randomSplit([0.9, 0.1], seed=0)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    estimator = TorchEstimator(net, loss="CrossEntropyLoss", features_col="x", label_col="y")
    scored = estimator.setEpochs(5).setNumWorkers(2).fit(train).transform(test)
    (right,) = scored.selectExpr("avg(int(prediction = int(y)))").head()
    spark.stop()
    return f"sparkdl demo: accuracy {right:.2f} on rows it has not seen, trained on 2 nodes"
