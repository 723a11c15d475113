"""The evaluator: it scores the chief's checkpoints on rows of its own, until the job is over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.core.options import Roles
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import all_gone, launch, processes
from tests.doubles.until import until

pytestmark = [pytest.mark.tensorflow, pytest.mark.deep]

SOON_S = 120.0
SAVES = 3


def rows(*x: int) -> pa.Table:
    """Return rows of y = 3 x."""
    return pa.table({"x": [n / 100 for n in x], "y": [3 * n / 100 for n in x]})


def train_or_evaluate(folder: str, ctx: NodeContext) -> list[float] | None:
    """Find the slope, and save it `SAVES` times; return the losses that the evaluator told."""
    import tensorflow as tf

    if ctx.job_name == "evaluator":
        evaluate(folder, ctx)
    train = train_on_ps if "ps" in ctx.cluster_spec else train_in_step
    losses: list[float] = []
    for slope in train(ctx):
        if ctx.is_chief:
            path = tf.train.Checkpoint(slope=slope).save(f"{folder}/{len(losses)}")
            losses.append(float(awaited(Path(f"{path}.loss"))))
    return losses if ctx.is_chief else None


def train_on_ps(ctx: NodeContext) -> Any:
    """Yield the slope after each few steps."""
    import tensorflow as tf

    strategy = ctx.parameter_server_strategy()
    with strategy.scope():
        slope = tf.Variable(0.0)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    fed = ctx.fed_dataset_fn(8, x="x", y="y")
    batches = iter(coordinator.create_per_worker_dataset(fed))

    @tf.function  # type: ignore[untyped-decorator]
    def step(batches: Any) -> None:
        slope.assign_sub(gradient(slope, *next(batches)))

    for _ in range(SAVES):
        for _ in range(6):
            coordinator.schedule(step, args=(batches,))
        coordinator.join()
        yield slope


def train_in_step(ctx: NodeContext) -> Any:
    """Yield the slope after each epoch."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        slope = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> None:
        strategy.run(lambda x, y: slope.assign_sub(gradient(slope, x, y)), (x, y))

    data = ctx.dataset(8, x="x", y="y")
    for _ in range(SAVES):
        for x, y in data:
            step(x, y)
        yield slope


def gradient(slope: Any, x: Any, y: Any) -> Any:
    import tensorflow as tf

    x, y = tf.cast(x, tf.float32), tf.cast(y, tf.float32)
    return tf.reduce_mean(x * (slope * x - y))


def evaluate(folder: str, ctx: NodeContext) -> None:
    """Score each checkpoint that comes up; does not return."""
    import numpy as np
    import tensorflow as tf

    batches = list(ctx.batches(16, feed="evaluation"))
    x, y = (np.concatenate([batch[name] for batch in batches]) for name in "xy")
    assert len(x) == 50
    slope = tf.Variable(0.0)
    for path in tf.train.checkpoints_iterator(folder):
        tf.train.Checkpoint(slope=slope).restore(path).expect_partial()
        partial = Path(f"{path}.partial")
        partial.write_text(repr(float(np.mean((slope.numpy() * x - y) ** 2))))
        os.rename(partial, f"{path}.loss")


def awaited(path: Path) -> str:
    assert until(path.exists), path
    return path.read_text()


@pytest.mark.parametrize(
    "num_ps", [pytest.param(1, id="parameter servers"), pytest.param(0, id="in step")]
)
def test_evaluator_scores_checkpoints_on_rows_of_its_own_and_ends_with_the_job(
    num_ps: int, tmp_path: Path
) -> None:
    roles = Roles(ps=num_ps, chief="chief", evaluator=True)
    with launch(
        train_or_evaluate, str(tmp_path), 3 + num_ps, framework="tensorflow", roles=roles
    ) as cluster:
        evaluator = processes()["evaluator:0"]
        evaluating = cluster.feed_async(
            rows(*range(100, 150)), feed="evaluation", role="evaluator", timeout_s=SOON_S
        )
        report = cluster.feed(rows(*range(100)), SAVES, timeout_s=SOON_S)
        assert evaluating.result(SOON_S).rows == {"evaluator:0": 50}
        losses, *others = cluster.results(SOON_S)
        assert all_gone([evaluator.child])
    assert others == [None] * (2 + num_ps)
    assert len(losses) == SAVES
    assert losses[0] > 2 * losses[-1]
    assert "evaluator:0" not in report.rows
