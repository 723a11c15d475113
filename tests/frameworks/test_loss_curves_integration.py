"""One loss curve on one, two, three and five nodes, and through kills, in each framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.core.options import Feeding, Recovery
from sparkdl.node.context import NodeContext
from tests.doubles.map_funs import die
from tests.doubles.nodes import SOON_S, launch
from tests.doubles.until import until
from tests.driver.test_restart import no_room as no_room

pytestmark = [pytest.mark.deep, pytest.mark.smoke, pytest.mark.timeout(300)]

ROWS, BATCH, EPOCHS = 500, 32, 2
STEPS = EPOCHS * -(-ROWS // BATCH)
X = np.sin(np.arange(ROWS)[:, None] * np.arange(1, 9)).astype("f4")
DATA = pa.table(
    {"x": pa.array([*X], pa.list_(pa.float32())), "y": np.cos(3.0 * np.arange(ROWS)).astype("f4")}
)
Args = dict[str, Any]


def by_torch(args: Args, ctx: NodeContext) -> list[float]:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    # Two nodes' gradients have one sum; of more, DDP's buckets decide in which order they add up.
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9), list[float]()
    if last := ctx.last_checkpoint:
        states, losses = torch.load(last.folder / "state.pt", weights_only=False)
        net.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    while ctx.has_epoch():
        for x, y, weight in ctx.torch_dataset(x="x", y="y", tail=args["tail"]):
            dropped = ctx.generator(len(losses))
            assert torch.rand(1, generator=dropped).item() == args["numbers"](len(losses))
            loss = ((model(x)[:, 0] - y) ** 2 * weight).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach() / ctx.num_workers
            distributed.all_reduce(mean)
            losses.append(mean.item())
            if len(losses) % 5 == 0 and ctx.checkpoint_dir:
                with ctx.checkpoint(len(losses)) as folder:
                    if ctx.is_chief:
                        states = [net.state_dict(), optimizer.state_dict()]
                        torch.save((states, losses), folder / "state.pt")
            if args["deaths"].get(ctx.restarts, ())[:2] == (ctx.rank, len(losses)):
                if no_room := args.get("no_room"):
                    no_room.touch()
                die(args["deaths"][ctx.restarts][2])
    return [*losses, ctx.num_workers]


def by_keras(args: Args, ctx: NodeContext) -> list[float]:
    import keras
    import tensorflow as tf

    import sparkdl

    keras.utils.set_random_seed(1)
    strategy = tf.distribute.get_strategy()
    if ctx.num_workers > 1:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((8,)), *layers])
        model.compile(keras.optimizers.SGD(0.05, 0.9), "mse")
    losses: list[float] = []

    class Notes(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            losses.append(float(logs["loss"]))  # the mean of the epoch so far
            if args["deaths"].get(ctx.restarts, ())[:2] == (ctx.rank, len(losses)):
                # The chief writes it while the training goes on.
                assert until(lambda: [*Path(str(ctx.checkpoint_dir)).glob("step-*")])
                die(args["deaths"][ctx.restarts][2])

    callbacks, first = [Notes()], 0
    if ctx.checkpoint_dir:
        callbacks.append(saving := sparkdl.keras.Checkpoint(ctx, every_epochs=1))
        first = saving.initial_epoch
    # Batches of one size: Keras weighs the losses of steps by it.
    data = ctx.dataset(x="x", y="y", tail="pad")
    model.fit(data, epochs=EPOCHS, callbacks=callbacks, verbose=0, initial_epoch=first)
    return [*losses, ctx.num_workers]


def by_jax(args: Args, ctx: NodeContext) -> list[float]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(ctx.mesh(data=-1), PartitionSpec("data"))
    first, second = jax.random.split(jax.random.key(0))
    net = {"a": 0.3 * jax.random.normal(first, (8, 16)), "b": jax.random.normal(second, (16,))}

    def stepped(net: Any, x: Any, y: Any, weight: Any) -> Any:
        def loss_of(net: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ net["a"]) @ net["b"] - y) ** 2 * weight)

        loss, slopes = jax.value_and_grad(loss_of)(net)
        return jax.tree.map(lambda value, slope: value - 0.05 * slope, net, slopes), loss

    losses, quick = list[float](), jax.jit(stepped)
    while ctx.has_epoch():
        for batch in ctx.jax_batches(x="x", y="y", sharding=sharding):
            net, loss = quick(net, *batch)
            losses.append(float(loss))
    return [*losses, ctx.num_workers]


def curve(
    fun: Any,
    framework: str,
    nodes: int,
    deaths: Any = None,
    folder: Path | None = None,
    **args: Any,
) -> list[float]:
    """Return the losses of all steps, and how many nodes there were in the end."""
    args = {"deaths": deaths or {}, "tail": "short", "numbers": numbers, **args}
    options: dict[str, Any] = {"feeding": Feeding(global_batch_size=BATCH)}
    if folder:
        options |= {"max_restarts": 3, "checkpoint_dir": str(folder)}
        options["recovery"] = Recovery(min_nodes=2, wait_s=1.0)
    with launch(fun, args, nodes, framework=framework, **options) as cluster:
        cluster.feed(DATA, EPOCHS)
        losses: list[float] = cluster.results(8 * SOON_S)[0]
    return losses


def numbers(step: int) -> float:
    """Return the first number of `ctx.generator(step)`."""
    import torch

    mixed = int(np.random.default_rng([0, step]).integers(1 << 62))
    return float(torch.rand(1, generator=torch.Generator().manual_seed(mixed)).item())


@pytest.mark.torch
def test_losses_of_pytorch_are_those_of_one_node(tmp_path: Path, no_room: Path) -> None:
    alone = curve(by_torch, "torch", 1)
    assert len(alone) == STEPS + 1
    for nodes in (2, 3, 5):
        assert curve(by_torch, "torch", nodes)[:-1] == pytest.approx(alone[:-1], rel=1e-5)
    two = curve(by_torch, "torch", 2)
    deaths = {0: (1, 7, "SIGKILL"), 1: (0, 18, "SIGKILL"), 2: (1, 24, "SIGKILL")}
    assert curve(by_torch, "torch", 2, deaths, tmp_path / "two") == two, "bit for bit"
    shrunk = {0: (2, 24, "agent")}  # for good: no agent can be started
    more = {"tail": "pad", "no_room": no_room}
    *losses, left = curve(by_torch, "torch", 3, shrunk, tmp_path / "three", **more)
    assert left == 2, "one is lost for good"
    assert losses == pytest.approx(alone[:-1], rel=1e-5)


@pytest.mark.tensorflow
def test_losses_of_keras_are_those_of_one_node(tmp_path: Path) -> None:
    alone = curve(by_keras, "tensorflow", 1)
    assert len(alone) == STEPS + 1
    for nodes in (2, 3, 5):
        assert curve(by_keras, "tensorflow", nodes)[:-1] == pytest.approx(alone[:-1], rel=1e-5)
    deaths = {0: (1, STEPS - 1, "SIGKILL")}
    losses = curve(by_keras, "tensorflow", 2, deaths, tmp_path)[:-1]
    assert losses == pytest.approx(alone[STEPS // 2 : -1], rel=1e-5), "the second epoch"


@pytest.mark.jax
def test_losses_of_jax_are_those_of_one_node() -> None:
    alone = curve(by_jax, "jax", 1)
    assert len(alone) == STEPS + 1
    for nodes in (2, 3, 5):
        assert curve(by_jax, "jax", nodes)[:-1] == pytest.approx(alone[:-1], rel=1e-5)
