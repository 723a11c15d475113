"""Rows of a linear function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.ml.linalg import Vectors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WEIGHTS = np.array([2.0, -1.0])


def rows_of(spark: SparkSession) -> DataFrame:
    """Return rows: a vector, labels as a float and as a whole number, a weight, a mark."""
    x = np.random.default_rng(0).normal(size=(80, 2))
    rows = [
        (Vectors.dense(v), float(v @ WEIGHTS), i % 3, 1.0, int(i % 5 == 0)) for i, v in enumerate(x)
    ]
    frame = spark.createDataFrame(rows, ["x", "y", "n", "w", "is_val"]).coalesce(2)
    return frame.selectExpr("x", "cast(y as float) y", "cast(n as int) n", "w", "is_val")


def settings(**options: Any) -> dict[str, Any]:
    """Return parameters of an estimator of `y`; an option that is None leaves one out."""
    given = {"num_proc": 1, "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8}
    given |= {"epochs": 3, "verbose": 0, "random_seed": 1, **options}
    return {name: value for name, value in given.items() if value is not None}
