"""Nodes that train models of their own on shares of the same rows are noticed, others are not."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.core.errors import NodeFailedError
from sparkdl.frameworks.framework import advice_about
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch

ROWS = pa.table({"x": pa.array(range(64), pa.float32()), "y": pa.array(range(64), pa.float32())})
WARNING = "the nodes train models of their own: 2 of 2 so far"


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
            if how != "scores":
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
        ("alone", {"independent_models": True}, False),
        ("ddp", {}, False),
        ("averages", {}, False),
        ("scores", {}, False),
    ],
)
def test_loops_that_exchange_nothing_are_warned_of_once(
    how: str, options: dict[str, Any], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with launch(train, how, framework="torch", **options) as cluster:
        cluster.feed(ROWS, epochs=2)
        assert cluster.results(60) == [8, 8]
    assert caplog.text.count(WARNING) == is_warned


def fit(how: str, ctx: NodeContext) -> int:
    """Fit a model without a strategy, on all nodes or on the first one; return the epochs."""
    import keras

    if how == "first" and ctx.rank:
        return sum(1 for _ in ctx.batches(8, even=False)) * 0
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = ctx.dataset(8, x="x", y="y", even=False)
    return len(model.fit(data, epochs=1, verbose=0).history["loss"])


@pytest.mark.tensorflow
def test_fit_on_several_nodes_without_a_strategy_is_an_error() -> None:
    with (
        pytest.raises(NodeFailedError, match="fit outside of a distribution strategy"),
        launch(fit, "all", framework="tensorflow") as cluster,
    ):
        cluster.feed(ROWS)
        cluster.results(60)


@pytest.mark.tensorflow
def test_fit_on_one_of_several_nodes_is_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    with launch(fit, "first", framework="tensorflow") as cluster:
        cluster.feed(ROWS)
        assert cluster.results(60) == [1, 0]
    assert WARNING not in caplog.text


def test_code_of_another_framework_is_told_which_to_launch_with() -> None:
    error = ValueError("environment variable RANK expected, but not set")
    assert "framework='torch'" in advice_about(error, "tensorflow")
    assert advice_about(error, "torch") == ""
    assert advice_about(ValueError("RANK"), "tensorflow") == ""


def prepare(args: Any, ctx: NodeContext) -> list[float]:
    """Return what a loader gives that Accelerate has prepared."""
    import torch

    accelerator = import_module("accelerate").Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(ctx.torch_dataset(8, x="x"), batch_size=None)
    return [value for x in accelerator.prepare(loader) for value in x.tolist()]


@pytest.mark.torch
@pytest.mark.deep
def test_accelerate_reads_each_row_once() -> None:
    pytest.importorskip("accelerate")
    with launch(prepare, framework="torch") as cluster:
        cluster.feed(ROWS)
        first, second = cluster.results(60)
    assert sorted(first + second) == ROWS["x"].to_pylist()
