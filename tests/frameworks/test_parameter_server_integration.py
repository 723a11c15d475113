"""Parameter servers fed through their workers: a custom loop and `fit`, every row used once."""

from __future__ import annotations

import math
import os
import signal
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import sparkdl
from sparkdl.core.errors import ConfigError, NodeFailedError
from sparkdl.frameworks.tensorflow_ps import _Steps
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab, lab
from tests.doubles.nodes import all_gone, processes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

SOON_S = 120.0


def tables(*sizes: int) -> list[pa.Table]:
    """Return tables of so many rows: "n" counts through all of them, "y" is 3 x + 1.

    "s" is "n" as a text.
    """
    found, start = [], 0
    for size in sizes:
        numbers = range(start, start + size)
        x = [n % 100 / 100 for n in numbers]
        columns = {"n": list(numbers), "s": [str(n) for n in numbers]}
        found.append(pa.table({**columns, "x": x, "y": [3 * value + 1 for value in x]}))
        start += size
    return found


@cache
def strategy_of(ctx: NodeContext) -> Any:
    """Return the strategy of the chief; a second one would cut the first one's connections."""
    return ctx.parameter_server_strategy()


def sum_up(args: tuple[str, list[str]], ctx: NodeContext) -> dict[str, Any]:
    """Schedule more steps than there are rows; each adds its rows up on the ps."""
    import tensorflow as tf

    feed, columns = args
    strategy = strategy_of(ctx)
    with strategy.scope():
        total = tf.Variable(0, dtype=tf.int64)
        texts = tf.Variable(0, dtype=tf.int64)
        rows = tf.Variable(0, dtype=tf.int64)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    fed = ctx.fed_dataset_fn(8, x=columns, feed=feed)
    iterator = iter(coordinator.create_per_worker_dataset(fed))

    @tf.function  # type: ignore[untyped-decorator]
    def step(iterator: Any) -> None:
        batch = next(iterator)
        total.assign_add(tf.reduce_sum(batch["n"]))
        texts.assign_add(tf.reduce_sum(tf.strings.to_number(batch["s"], tf.int64)))
        rows.assign_add(tf.size(batch["n"], tf.int64))

    has_ended = False
    try:
        for _ in range(1000):
            for _ in range(7):
                coordinator.schedule(step, args=(iterator,))
            coordinator.join()
    except tf.errors.OutOfRangeError:
        has_ended = True
    return {
        "sums": [int(total.numpy()), int(texts.numpy())],
        "rows": int(rows.numpy()),
        "has_ended": has_ended,
        "is_on_ps": all("/job:ps" in variable.device for variable in (total, texts, rows)),
    }


def name_or_hang(args: None, ctx: NodeContext) -> str:
    """Hang on a ps."""
    if ctx.job_name == "ps":
        signal.pause()
    return ctx.job_name


def fit(args: None, ctx: NodeContext) -> dict[str, Any]:
    """Fit a line with tf_keras in fewer steps than there are rows."""
    import tf_keras

    with strategy_of(ctx).scope():
        model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(1,))])
        model.compile(tf_keras.optimizers.legacy.Adam(0.05), "mse")
    creator = tf_keras.utils.experimental.DatasetCreator
    training = ctx.fed_dataset_fn(8, x="x", y="y")
    evaluation = ctx.fed_dataset_fn(8, x="x", y="y", feed="eval")
    history = model.fit(
        creator(training),
        epochs=3,
        steps_per_epoch=60,
        validation_data=creator(evaluation),
        validation_steps=5,
        verbose=0,
    )
    training.terminate()
    evaluation.terminate()
    assert [batch["n"].tolist() for batch in ctx.batches(8, feed="after")] == [[0, 1, 2]]
    return dict(history.history)


def uses_every_row_of_uneven_data_once(made: Lab) -> None:
    """The end of the feed ends the loop."""
    cluster = made.cluster
    made.begin(sum_up, ("sums", ["n", "s"]))
    with pytest.raises(ConfigError, match="workers of parameter servers do not run"):
        cluster.infer_rows([1])
    report = cluster.feed(tables(1, 100, 0, 36), 3, name="sums", timeout_s=SOON_S)
    again = cluster.feed(tables(50), name="sums", timeout_s=SOON_S)
    cluster.feed(tables(2), name="sums", timeout_s=SOON_S)  # of which one worker may have none
    cluster.end_feeds("sums")
    (found,) = made.results()
    expected = 3 * sum(range(137)) + sum(range(50)) + 1
    assert found == {"sums": [expected] * 2, "rows": 463, "has_ended": True, "is_on_ps": True}
    assert (report.rows_used, report.rows_unused, again.rows_used) == (411, 0, 50)
    assert sorted(report.steps) == ["worker:0", "worker:1"]


def fits_with_tf_keras(made: Lab) -> None:
    """Rows that `fit` leaves hold nobody up."""
    cluster = made.cluster
    made.begin(fit, None)
    evaluating = cluster.feed_async(tables(8000), 4, name="eval", timeout_s=SOON_S)
    report = cluster.feed(tables(2000, 1000), 10, timeout_s=SOON_S)
    cluster.feed(tables(3), name="after", to="chief", timeout_s=SOON_S)
    cluster.end_feeds("after")
    (found,) = made.results()
    assert evaluating.result(SOON_S).rows_unused > 0
    assert len(found["loss"]) == len(found["val_loss"]) == 3
    assert found["loss"][-1] < found["loss"][0] / 2
    assert 1200 < report.rows_used < 30000


@pytest.mark.parametrize("fits", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_chief_trains_on_fed_workers_until_one_of_them_lacks_a_column(
    tmp_path: Path, fits: bool
) -> None:
    options: dict[str, Any] = {"num_ps": 1, "master_node": "chief"}
    with (
        pytest.raises(NodeFailedError) as failed,
        lab(tmp_path, "tensorflow", 1, nodes=4, **options) as made,
    ):
        them = processes()
        uses_every_row_of_uneven_data_once(made)
        if fits:
            fits_with_tf_keras(made)
        made.begin(sum_up, ("lacks", ["n", "nope"]))
        made.cluster.feed(tables(100, 100), name="lacks", timeout_s=SOON_S)
        made.cluster.results(SOON_S)
    cause = failed.value.root_cause
    assert cause.node.startswith("worker:")
    assert "the feed has no column 'nope'; its columns are 'n', 's', 'x', 'y'" in cause.message
    assert all_gone([process.child for process in them.values()])


def test_ps_on_the_drivers_machine_takes_no_slot_of_spark(spark_cluster: SparkSession) -> None:
    options: dict[str, Any] = {"input_mode": "own", "framework": "plain", "show_progress": False}
    with sparkdl.launch(
        spark_cluster, name_or_hang, None, 5, num_ps=1, driver_ps_nodes=True, **options
    ) as cluster:  # of four slots
        ps = processes()["ps:0"]
        assert ps.agent.ppid() == os.getpid()
        results = cluster.results(SOON_S)
        assert all_gone([ps.child])
    assert results == [*(["worker"] * 4), None]
    assert all_gone([ps.agent])


def test_epoch_whose_last_step_had_no_row_has_the_metrics_of_the_others() -> None:
    import tensorflow as tf
    from tensorflow.python.distribute.coordinator.values import RemoteValueImpl

    logs = RemoteValueImpl(None, {"loss": tf.TensorSpec((), tf.float32)})
    logs._set_error(tf.errors.OutOfRangeError(None, None, "End of sequence"))
    steps = _Steps()
    assert steps.synced(RemoteValueImpl.fetch, logs) == {}
    steps.finished(lambda: None)
    assert math.isnan(steps.synced(RemoteValueImpl.fetch, logs)["loss"])
    assert steps.synced(RemoteValueImpl.fetch, logs) == {}
    other = RemoteValueImpl(None, {"loss": tf.TensorSpec((), tf.float32)})
    other._set_error(tf.errors.InvalidArgumentError(None, None, "shapes"))
    with pytest.raises(tf.errors.InvalidArgumentError):
        steps.synced(RemoteValueImpl.fetch, other)
