"""`MirroredStrategyRunner`: nodes in step on Spark, one process on the driver, refusals."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import sparkdl
from sparkdl import distributors
from sparkdl.core.errors import ConfigError, SparkConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.tensorflow


def train(epochs: int) -> dict[str, Any]:
    """Train as the package's example does: no word of a strategy."""
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    x = np.arange(32, dtype=np.float32).reshape(16, 2) / 32
    dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1))).repeat().batch(8)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(loss="mse", optimizer=tf.keras.optimizers.SGD(0.1))
    history = model.fit(
        dataset.with_options(options), epochs=epochs, steps_per_epoch=4, verbose=0
    ).history["loss"]
    kind = type(strategy).__name__
    return {"losses": history, "kind": kind, "size": strategy.num_replicas_in_sync, "model": model}


def place(**kwargs: Any) -> dict[str, Any]:
    import tensorflow as tf

    kind = type(tf.distribute.get_strategy()).__name__
    return {**kwargs, "pid": os.getpid(), "strategy": kind}


@pytest.mark.deep
def test_function_without_strategy_trains_on_two_nodes_as_on_one(spark_local: SparkSession) -> None:
    pair = sparkdl.MirroredStrategyRunner(num_slots=2, use_gpu=False)
    assert pair.get_num_tasks() == 2
    found = pair.run(train, epochs=2)
    assert (found["size"], found["kind"]) == (2, "CollectiveAllReduceStrategy")
    x = np.arange(32, dtype=np.float32).reshape(16, 2) / 32
    kernel, bias, losses = np.zeros(2), 0.0, []
    for step in range(8):
        rows = x[:8] if step % 2 == 0 else x[8:]
        error = rows @ kernel + bias - rows.sum(1)
        losses.append(np.mean(error**2))
        kernel = kernel - 0.1 * 2 * error @ rows / 8
        bias -= 0.1 * 2 * error.mean()
    expected = [np.mean(losses[:4]), np.mean(losses[4:])]
    assert found["losses"] == pytest.approx(expected, rel=1e-4)
    assert found["model"].get_weights()[0][:, 0] == pytest.approx(kernel, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_slots": 0}, "num_slots is set to 0 but cannot be less than or equal to 0"),
        ({"num_slots": 2, "local_mode": True, "use_gpu": False}, "more than 1 CPU machine"),
        ({"num_slots": 1, "gpu_resource_name": "fpga"}, "gpu_resource_name='fpga': must be 'gpu'"),
    ],
)
def test_bad_arguments_are_refused_as_a_value_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        sparkdl.MirroredStrategyRunner(**options)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("amount", "slots", "found"),
    [("1", 3, (3, 1)), ("2", 4, (2, 2)), ("4", 3, (1, 3)), ("0.5", 2, (2, 1)), ("2", 3, "multip")],
)
def test_gpus_are_shared_as_spark_gives_them_to_tasks(amount: str, slots: int, found: Any) -> None:
    spark: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda key, default: amount))
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            distributors._shared_out(spark, slots)
    else:
        assert distributors._shared_out(spark, slots) == found


def test_encrypted_spark_is_refused_unless_allowed(spark_local: SparkSession) -> None:
    runner = sparkdl.MirroredStrategyRunner(num_slots=1, use_gpu=False)
    spark_local.conf.set("spark.ssl.enabled", "true")
    try:
        with pytest.raises(SparkConfigError, match=r"tensorflow.spark.distributor.ignoreSsl=true"):
            runner.run(place)
    finally:
        spark_local.conf.unset("spark.ssl.enabled")
