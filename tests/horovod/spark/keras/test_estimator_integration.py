"""Horovod's `KerasEstimator` and `KerasModel` on Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark.common.backend import SparkBackend
from tests.horovod.spark.common.linear import rows_of, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch]


def linear() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    x = keras.Input([2])
    return keras.Model(x, keras.layers.Dense(1)(x))


def estimator(**options: Any) -> Any:
    import keras

    from sparkdl.horovod.spark.keras import KerasEstimator

    given = {
        "model": options.get("model") or linear(),
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.5),
        "loss": "mse",
        **options,
    }
    return KerasEstimator(**settings(**given))


@pytest.mark.smoke
def test_what_cannot_work_is_refused_before_anything_starts(spark_ml: SparkSession) -> None:
    from sparkdl.horovod.keras.callbacks import LearningRateWarmupCallback

    frame = rows_of(spark_ml)
    warmup = LearningRateWarmupCallback(0.1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"loss": None}, "Loss parameter is required"),
        ({"optimizer": None}, "Optimizer must be provided"),
        ({"feature_cols": None}, "feature_cols is not set"),
        ({"feature_cols": ["x", "w"]}, "column count 2 must equal model inputs count 1"),
        ({"feature_cols": ["q"]}, "no column 'q'"),
        ({"backend": object(), "num_proc": None}, "must be a SparkBackend"),
        ({"backend": SparkBackend(1)}, 'At most one of parameters "backend" and "num_proc"'),
        ({"validation": 1.5}, r"must be in the range: \[0, 1\)"),
        ({"validation": 3}, 'must be of type "float" or "str"'),
        ({"train_steps_per_epoch": 3}, "train_steps_per_epoch=3 is not supported: an epoch is"),
        ({"data_module": object}, "data_module=.* is not supported: .*transformation_fn"),
        ({"checkpoint_callback": print}, "checkpoint_callback=.* not supported: .*EarlyStopping"),
        ({"callbacks": [warmup]}, "WarmupCallback, which works only in horovod.spark.run"),
    ]
    for options, text in cases:
        with pytest.raises(ConfigError, match=text):
            estimator(**options).fit(frame)
    with pytest.raises(ConfigError, match="store is not set"):
        estimator().fit_on_parquet()
