"""A search on Spark: trials on sub-clusters that take turns."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from sparkdl.ml.tuning import search
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
