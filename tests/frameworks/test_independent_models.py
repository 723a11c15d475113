"""Nodes that train models of their own on shares of the same rows are noticed, others are not."""

from __future__ import annotations

from importlib import import_module
from threading import Event
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.core.errors import NodeFailedError
from sparkdl.core.options import Roles
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, build_world
from sparkdl.driver.options import LogLine, Observe
from sparkdl.frameworks.framework import advice_about
from sparkdl.frameworks.independent_models import IndependentModelCheck
from sparkdl.node.context import NodeContext
from sparkdl.node.link import AgentLink
from tests.doubles.nodes import launch

ROWS = pa.table({"x": pa.array(range(64), pa.float32()), "y": pa.array(range(64), pa.float32())})
WARNING = "they train separate models, each on its share"


def train(args: None, ctx: NodeContext) -> int:
    """Train two epochs, each node for itself; return the steps."""
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    steps = 0
    for _ in range(2):
        for x, y in ctx.torch_dataset(8, x="x", y="y"):
            loss = ((model(x[:, None])[:, 0] - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    return steps


@pytest.mark.smoke
@pytest.mark.torch
def test_each_node_of_a_loop_that_exchanges_nothing_warns_once() -> None:
    lines: list[LogLine] = []
    with launch(train, framework="torch", observe=Observe(on_log=lines.append)) as cluster:
        cluster.feed(ROWS, epochs=2)
        assert cluster.results(60) == [8, 8]
    warned = [line.node for line in lines if WARNING in line.text]
    assert sorted(warned) == ["worker:0", "worker:1"]


@pytest.mark.torch
@pytest.mark.parametrize(("size", "is_warned"), [(1, True), (2, False)])
def test_loop_in_a_process_group_of_several_is_not_warned_of(
    caplog: pytest.LogCaptureFixture, size: int, is_warned: bool
) -> None:
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    watch = IndependentModelCheck("torch", 2)
    # The others are not there.
    distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    watch.look()
    watch.epoch_over("input")
    distributed.destroy_process_group()
    for _ in range(2):
        watch.look()
    assert caplog.text.count(WARNING) == is_warned


@pytest.mark.torch
def test_exchange_after_an_epoch_is_soon_enough(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import_module("torch")
    watch = IndependentModelCheck("torch", 2)
    watch.epoch_over("input")
    monkeypatch.setattr("sparkdl.frameworks.independent_models.collective_used", used := Event())
    used.set()
    watch.look()
    assert WARNING not in caplog.text


@pytest.mark.parametrize(
    ("nodes", "roles", "node", "is_watched"),
    [
        (2, Roles(), 1, True),
        (2, Roles(independent_models=True), 1, False),
        (1, Roles(), 0, False),
        (3, Roles(chief="chief", evaluator=True), 1, False),
    ],
)
def test_nodes_that_share_the_rows_of_a_training_are_watched(
    nodes: int, roles: Roles, node: int, is_watched: bool
) -> None:
    planned = plan_nodes(nodes, roles)
    world = build_world(0, {each: Address("h", each.node_id, "") for each in planned})
    spec = ClusterSpec("c", tuple(planned), independent_models=roles.independent_models)
    start: Any = SimpleNamespace(spec=spec, world=world, node_id=node)
    found = AgentLink._watch_training(None, start)  # type: ignore[arg-type]
    assert isinstance(found, IndependentModelCheck) == is_watched


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
@pytest.mark.deep
@pytest.mark.parametrize(("how", "is_warned"), [("alone", True), ("together", False)])
def test_loops_of_jax_that_exchange_nothing_are_warned_of_once(how: str, is_warned: bool) -> None:
    lines: list[LogLine] = []
    observe = Observe(on_log=lines.append)
    with launch(differentiate, how, framework="jax", observe=observe) as cluster:
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
        pytest.raises(NodeFailedError, match=r"import accelerate before calling ctx\.torch_d"),
        launch(prepare, framework="torch") as cluster,
    ):
        cluster.feed(ROWS)
        cluster.results(60)
