"""Who waits for whom in real trainings: late feeds, slow feeds, stragglers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparkdl
from sparkdl.core.options import Feeding
from sparkdl.driver import view
from sparkdl.driver.events import Sampled
from sparkdl.driver.history import Clusters, History
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, launch
from tests.doubles.until import until

_SLICE_S = 2.0
"""In the place of ten seconds, so that a minute takes twelve."""
_LOOK_S = 0.2
looked = partial(until, within_s=SOON_S, look_s=_LOOK_S)


def rest(seconds: float) -> None:
    threading.Event().wait(seconds)


def rest_as_users_do(seconds: float) -> None:
    time.sleep(seconds)  # noqa: TID251 (what a straggler does)


def launched(cluster: sparkdl.Cluster) -> History:
    clusters = Clusters()
    for event in cluster._controller.events.present():
        clusters.add(event)
    return clusters.histories[cluster.spec.cluster_id]


def look(cluster: sparkdl.Cluster, history: History) -> list[float]:
    """Take a sample; return the shares of the last minute that nodes have waited for rows."""
    for event in cluster._controller.events.present():
        if isinstance(event, Sampled):
            history.add(event)
    return [row.waits.get("rows", 0.0) for row in history.rows()]


_FEATURES = 1 << 16
"""So that sixteen rows are a record batch, and travel as soon as they are there."""


def slow_rows(pause_s: float, is_over: threading.Event) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch every now and then."""
    features = np.random.default_rng(0).random(_FEATURES, np.float32)
    while not is_over.is_set():
        yield from [{"x": features, "y": np.float32(0)}] * 16
        rest(pause_s)


def read_in_a_thread(_: Any, ctx: NodeContext) -> None:
    """Let a thread fetch the batches that the main thread waits for."""
    fetched: queue.Queue[Any] = queue.Queue(2)

    def fetch() -> None:
        for batch in ctx.batches(8):
            fetched.put(batch)
        fetched.put(None)

    threading.Thread(target=fetch, daemon=True).start()
    while fetched.get() is not None:
        pass


def fit_with_keras(size: int, ctx: NodeContext) -> None:
    """Fit, with products of matrices of some size in each step."""
    import tensorflow as tf

    class Product(tf.keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            product = tf.random.uniform((size, size))
            for _ in range(8):
                product = tf.matmul(product, product) / size
            return x + 0.0 * tf.reduce_sum(product)

    several = ctx.num_workers > 1
    strategy = (
        tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    )
    with strategy.scope():
        layers = [tf.keras.Input((_FEATURES,)), tf.keras.layers.Dense(1), Product()]
        model = tf.keras.Sequential(layers)
        model.compile(tf.keras.optimizers.SGD(1e-6), "mse")
    model.fit(ctx.dataset(8, x="x", y="y"), verbose=0)


def read_with_workers(_: Any, ctx: NodeContext) -> None:
    """Read by a DataLoader, whose workers are processes."""
    from torch.utils.data import DataLoader

    for _ in DataLoader(ctx.torch_dataset(8, x="x", y="y"), batch_size=None, num_workers=1):
        pass


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("framework", "map_fun", "nodes"),
    [
        pytest.param("plain", read_in_a_thread, 1),
        pytest.param("torch", read_with_workers, 1, marks=[pytest.mark.torch, pytest.mark.deep]),
        *(
            pytest.param(
                "tensorflow", fit_with_keras, n, marks=[pytest.mark.tensorflow, pytest.mark.deep]
            )
            for n in (1, 2)
        ),
    ],
)
def test_training_that_the_feed_holds_up_is_said_to_wait_for_it(
    framework: str, map_fun: Any, nodes: int
) -> None:
    is_over = threading.Event()
    with launch(map_fun, 8, nodes, framework=framework) as cluster:
        history = launched(cluster)
        feeding = cluster.feed_async(slow_rows(0.4, is_over))
        try:
            assert looked(lambda: min(look(cluster, history)) > 0.5)
        finally:
            is_over.set()
        feeding.result(SOON_S)


def step_with_torch(ctx: NodeContext, end: Path) -> Iterator[int]:
    """Train until a file is there; yield before each step."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    is_over, step = torch.zeros(1), 0
    while not is_over.item():
        yield step
        optimizer.zero_grad()
        model(torch.rand(64, 256)).square().mean().backward()
        optimizer.step()
        is_over = torch.tensor([float(end.exists())])
        dist.all_reduce(is_over)
        step += 1


def step_with_tensorflow(ctx: NodeContext, end: Path) -> Iterator[int]:
    """Train until a file is there; yield before each step."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = tf.Variable(tf.zeros([256, 256]))

    def of_replica(is_over: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(tf.random.uniform([64, 256]), weights) - 1.0))
        gradient = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, tape.gradient(loss, weights)
        )
        weights.assign_sub(0.01 * gradient)
        is_over = tf.identity(is_over)  # all_reduce refuses arguments: they have no device
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, is_over)

    run = tf.function(lambda is_over: strategy.run(of_replica, (is_over,)))
    is_over, step = False, 0
    while not is_over:
        yield step
        is_over = bool(run(tf.constant(float(end.exists()))) > 0)
        step += 1


def train_in_step(args: tuple[str, str], ctx: NodeContext) -> None:
    """Train together; rank 1 sleeps or computes in each step, or does nothing else."""
    end, delay = args
    framework = ctx._spec.framework
    steps = {"torch": step_with_torch, "tensorflow": step_with_tensorflow}[framework]
    for step in steps(ctx, Path(end)):
        ctx.report(step)
        if ctx.rank == 1 and delay == "sleeps":
            rest_as_users_do(0.1)
        elif ctx.rank == 1 and delay == "computes":
            until_s = time.monotonic() + 0.1
            while time.monotonic() < until_s:
                pass
    ctx.barrier()


IN_STEP: dict[str, Any] = {"feeding": Feeding(fed=False)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("framework", "delay"),
    [
        pytest.param("torch", "sleeps", marks=pytest.mark.torch),
        pytest.param("torch", "computes", marks=[pytest.mark.torch, pytest.mark.deep]),
        pytest.param("tensorflow", "sleeps", marks=[pytest.mark.tensorflow, pytest.mark.deep]),
        pytest.param("tensorflow", "computes", marks=[pytest.mark.tensorflow, pytest.mark.deep]),
    ],
)
def test_node_that_the_others_wait_for_in_each_step_is_named(
    framework: str, delay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "SLICE_S", _SLICE_S)
    end = tmp_path / "end"
    with launch(train_in_step, (str(end), delay), 2, framework=framework, **IN_STEP) as cluster:
        history = launched(cluster)

        def is_named() -> bool:
            look(cluster, history)
            return bool(history.rows()[1].waits.get("lag"))

        assert looked(lambda: is_named() or "Running" not in cluster.status(), within_s=120.0)
        end.touch()
        cluster.results(60)
    fast, slow = history.rows()
    assert fast.waits["others"] > slow.waits["others"] + view.AWAITED
    assert (fast.is_slow, slow.is_slow) == (False, True)
