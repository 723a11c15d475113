"""Four nodes train one model, data and model parallel, and it is what one process would train."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch

pytestmark = pytest.mark.timeout(300)

_SOON_S = 120.0
ROWS, FEATURES, HIDDEN, RATE, EPOCHS = 64, 6, 8, 0.1, 5
NODES = 4
UNEVEN = 37


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, FEATURES)).astype(np.float32)
    return x, (x.sum(1) ** 2).astype(np.float32)


def weights() -> list[np.ndarray]:
    """Return a hidden layer's and the last layer's weights, as `x @ weights`."""
    random = np.random.default_rng(1)
    shapes = ((FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, 1))
    return [random.normal(size=shape).astype(np.float32) / 2 for shape in shapes]


def alone() -> list[float]:
    """Return the losses of one process: gradient descent on all rows, in double precision."""
    x, y = data()
    first, bias, last = (part.astype(np.float64) for part in weights())
    losses = []
    for _ in range(EPOCHS):
        hidden = np.tanh(x @ first + bias)
        error = (hidden @ last)[:, 0] - y
        losses.append(float((error**2).mean()))
        slope = 2 * error[:, None] / ROWS
        back = slope @ last.T * (1 - hidden**2)
        last = last - RATE / 10 * hidden.T @ slope
        first, bias = first - RATE / 10 * x.T @ back, bias - RATE / 10 * back.sum(0)
    return losses


def train_torch(args: None, ctx: NodeContext) -> dict[str, Any]:
    """Train with DTensor's tensor parallelism and FSDP2; tell who gets which rows."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    mesh = ctx.mesh(data=2, model=-1)
    first, bias, last = map(torch.from_numpy, weights())
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1, bias=False)
    )
    model.load_state_dict({"0.weight": first.T, "0.bias": bias, "2.weight": last.T})
    parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), RATE / 10)
    losses = []
    dataset = ctx.torch_dataset(ROWS // 2, x="x", y="y", mesh=mesh)
    for _ in range(EPOCHS):
        for x, y in dataset:
            loss = torch.nn.functional.mse_loss(model(x.float())[:, 0], y.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # Of the rows of all: the groups have equally many.
            total = loss.detach().clone()
            torch.distributed.all_reduce(total, group=mesh["data"].get_group())
            losses.append(float(total) / 2)
    for wrong, says in (
        ({"batch_size": 9}, "batch_size=9 cannot be divided among the 2 nodes"),
        ({"batch_size": 8, "even": False}, "leave it out"),
        ({"batch_size": 8, "data_axis": "rows"}, "no axis 'rows'; it has data, model"),
    ):
        with pytest.raises(ConfigError, match=f"(?i){says}"):
            ctx.torch_dataset(mesh=mesh, **wrong)
    uneven = ctx.torch_dataset(8, columns=["n", "text"], mesh=mesh, feed="uneven")
    batches = DataLoader(uneven, batch_size=None, num_workers=1)
    rows = [(batch["n"].tolist(), batch["text"]) for batch in batches]
    held = list(model[0].weight.to_local().shape)
    return {"losses": losses, "place": list(mesh.get_coordinate()), "rows": rows, "held": held}


def train_jax(args: None, ctx: NodeContext) -> dict[str, Any]:
    """Train with weights that are split over the model's axis; tell who gets which rows."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P

    mesh = ctx.mesh(data=2, model=-1)
    with pytest.raises(ConfigError, match=r"there are 4 devices \(4 nodes that train, 1 devices"):
        ctx.mesh(data=3, model=2)
    specs = [P(None, "model"), P("model"), P("model", None)]
    parts = [
        jax.device_put(part, NamedSharding(mesh, spec))
        for part, spec in zip(weights(), specs, strict=True)
    ]

    def loss_of(parts: Any, x: Any, y: Any) -> Any:
        first, bias, last = parts
        return jnp.mean(((jnp.tanh(x @ first + bias) @ last)[:, 0] - y) ** 2)

    def step(parts: Any, x: Any, y: Any) -> Any:
        loss, slopes = jax.value_and_grad(loss_of)(parts, x, y)
        return loss, [p - RATE / 10 * slope for p, slope in zip(parts, slopes, strict=True)]

    compiled = jax.jit(step)
    losses = []
    by_data = NamedSharding(mesh, P("data"))
    batches = ctx.jax_batches(ROWS // 2, x="x", y="y", sharding=by_data)
    for _ in range(EPOCHS):
        for x, y, _weight in batches:
            loss, parts = compiled(parts, x, y)
            losses.append(float(loss))
    rows: dict[str, list[int]] = {}
    steps: dict[str, list[list[int]]] = {}
    for name, spec in {"data": P("data"), "all": P(("data", "model")), "none": P()}.items():
        for n, weight in ctx.jax_batches(8, x="n", feed=name, sharding=NamedSharding(mesh, spec)):
            steps.setdefault(name, []).append([len(n), int((n * weight).sum())])
            held, there = n.addressable_shards[0].data, weight.addressable_shards[0].data
            rows.setdefault(name, []).extend(np.asarray(held)[np.asarray(there) > 0].tolist())
    place = [int(where[0]) for where in np.nonzero(mesh.devices == jax.local_devices()[0])]
    held = list(parts[0].addressable_shards[0].data.shape)
    return {"losses": losses, "place": place, "rows": rows, "steps": steps, "held": held}


def fed(train: Any, framework: str, *feeds: str) -> list[dict[str, Any]]:
    x, y = data()
    rows = [{"x": a.tolist(), "y": float(b)} for a, b in zip(x, y, strict=True)]
    few = [{"n": n, "text": f"row {n}"} for n in range(UNEVEN)]
    with launch(train, nodes=NODES, framework=framework) as cluster:
        cluster.feed(rows, epochs=EPOCHS, timeout_s=_SOON_S)
        for feed in feeds:
            cluster.feed(few, feed=feed, timeout_s=_SOON_S)
        results = cluster.results(_SOON_S)
    for rank, found in enumerate(results):
        assert found["place"] == [rank // 2, rank % 2], "a model's nodes are neighbours"
        np.testing.assert_allclose(found["losses"], alone(), rtol=1e-5)
    return results


@pytest.mark.torch
@pytest.mark.deep
def test_torch_splits_rows_over_one_axis_and_weights_over_the_other() -> None:
    results = fed(train_torch, "torch", "uneven")
    assert all(found["held"] == [HIDDEN // 4, FEATURES] for found in results)
    first, second, third, fourth = (found["rows"] for found in results)
    assert first == second
    assert third == fourth
    got = [
        pair
        for batches in (first, third)
        for n, text in batches
        for pair in zip(n, text, strict=False)
    ]
    assert sorted(n for n, _ in got) == list(range(UNEVEN)), "each row is in one group's batches"
    assert all(text == f"row {n}" for n, text in got)
    assert [len(n) for n, _ in first] == [8, 8, 3]


@pytest.mark.jax
@pytest.mark.deep
def test_jax_splits_rows_over_one_axis_and_weights_over_the_other() -> None:
    results = fed(train_jax, "jax", "data", "all", "none")
    assert all(found["held"] == [FEATURES, HIDDEN // 2] for found in results)
    every = list(range(UNEVEN))
    first, second, third, fourth = (found["rows"] for found in results)
    assert first["data"] == second["data"]
    assert third["data"] == fourth["data"]
    assert sorted(first["data"] + third["data"]) == every
    assert sorted(n for found in results for n in found["rows"]["all"]) == every
    assert sorted(first["none"]) == every
    assert first["none"] == third["none"]
    for found in results:  # the arrays are global: batch_size for each group of equal rows
        assert {name: {rows for rows, _ in steps} for name, steps in found["steps"].items()} == {
            "data": {16},
            "all": {32},
            "none": {8},
        }
        assert all(sum(s for _, s in steps) == sum(every) for steps in found["steps"].values())
