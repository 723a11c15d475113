"""Nodes that train models of their own on shares of the same rows are noticed, others are not."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.core.errors import NodeFailedError
from sparkdl.core.options import Roles
from sparkdl.driver.options import LogLine, Observe
from sparkdl.frameworks.framework import advice_about
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch

ROWS = pa.table({"x": pa.array(range(64), pa.float32()), "y": pa.array(range(64), pa.float32())})
WARNING = "they train separate models, each on its share"


def train(how: str, ctx: NodeContext) -> int:
    """Train two epochs, each node for itself unless `how` says otherwise; return the steps."""
    import torch

    model: Any = torch.nn.Linear(1, 1)
    if how == "ddp":
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    steps = 0
    for _ in range(2):
        for x, y in ctx.torch_dataset(8, x="x", y="y"):
            loss = ((model(x[:, None])[:, 0] - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
        if how == "averages":
            ctx.all_gather(float(loss))
    if how == "ddp":
        torch.distributed.destroy_process_group()
    return steps


@pytest.mark.torch
@pytest.mark.parametrize(
    ("how", "options", "is_warned"),
    [
        ("alone", {}, True),
        ("alone", {"roles": Roles(independent_models=True)}, False),
        ("ddp", {}, False),
        pytest.param("averages", {}, False, marks=pytest.mark.deep),
    ],
)
def test_each_node_of_a_loop_that_exchanges_nothing_warns_once(
    how: str, options: dict[str, Any], is_warned: bool
) -> None:
    lines: list[LogLine] = []
    observe = Observe(on_log=lines.append)
    with launch(train, how, framework="torch", observe=observe, **options) as cluster:
        cluster.feed(ROWS, epochs=2)
        assert cluster.results(60) == [8, 8]
    warned = [line.node for line in lines if WARNING in line.text]
    assert sorted(warned) == ["worker:0", "worker:1"] * is_warned


def fit(how: str, ctx: NodeContext) -> int:
    """Fit a model outside of a strategy, or within its scope; return the epochs."""
    import contextlib

    import keras
    import tensorflow as tf

    strategy = None if how == "alone" else tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope() if strategy and how == "together" else contextlib.nullcontext():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = ctx.dataset(8, x="x", y="y")
    return len(model.fit(data, epochs=1, verbose=0).history["loss"])


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "how", ["alone", pytest.param("outside of the scope", marks=pytest.mark.deep)]
)
def test_fit_on_several_nodes_without_a_strategy_is_an_error(how: str) -> None:
    with (
        pytest.raises(NodeFailedError, match="fit outside of a distribution strategy"),
        launch(fit, how, framework="tensorflow") as cluster,
    ):
        cluster.feed(ROWS)
        cluster.results(60)


def test_code_of_another_framework_is_told_which_to_launch_with() -> None:
    error = ValueError("environment variable RANK expected, but not set")
    assert "framework='torch'" in advice_about(error, "tensorflow")
    assert advice_about(error, "torch") == ""
    assert advice_about(ValueError("RANK"), "tensorflow") == ""


def differentiate(how: str, ctx: NodeContext) -> int:
    """Train two epochs with JAX, on global arrays or on the node's own."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = None
    if how == "together":
        sharding = NamedSharding(ctx.mesh(data=-1), PartitionSpec("data"))
    loss_of = jax.jit(lambda weight, x, y: ((weight * x - y) ** 2).mean())
    step_of = jax.jit(jax.value_and_grad(loss_of))
    batches, steps = ctx.jax_batches(8, x="x", y="y", sharding=sharding), 0
    for _ in range(2):
        for x, y, _weight in batches:
            jax.block_until_ready(step_of(0.5, x, y))
            steps += 1
    return steps


@pytest.mark.jax
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "is_warned"),
    [
        ("alone", True),
        pytest.param("together", False, marks=pytest.mark.deep),
    ],
)
def test_loops_of_jax_that_exchange_nothing_are_warned_of_once(how: str, is_warned: bool) -> None:
    lines: list[LogLine] = []
    with launch(
        differentiate, how, framework="jax", observe=Observe(on_log=lines.append)
    ) as cluster:
        cluster.feed(ROWS, epochs=2)
        assert cluster.results(120) == [8, 8]
    assert sum(WARNING in line.text for line in lines) == 2 * is_warned


def prepare(args: None, ctx: NodeContext) -> None:
    import torch

    loader = torch.utils.data.DataLoader(ctx.torch_dataset(8, x="x"), batch_size=None)
    list(import_module("accelerate").Accelerator(cpu=True).prepare(loader))


@pytest.mark.torch
@pytest.mark.deep
def test_accelerate_that_is_imported_too_late_is_refused() -> None:
    pytest.importorskip("accelerate")
    with (
        pytest.raises(NodeFailedError, match=r"import accelerate before the call of ctx\.torch_d"),
        launch(prepare, framework="torch") as cluster,
    ):
        cluster.feed(ROWS)
        cluster.results(60)
