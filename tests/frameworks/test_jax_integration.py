"""Nodes of JAX: they train as one process would, and what ends one of them is known."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.core.errors import NodeFailedError
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch

pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]

_SOON_S = 120.0
EPOCHS, BATCH, BATCHES = 3, 4, 5
RATE = 0.05


def linear(weights: Any, x: Any, y: Any) -> Any:
    """Return the loss of a linear model and its gradient; as numpy, or as JAX computes it."""
    error = x @ weights - y
    return (error * error).mean(), 2 * x.T @ error / len(x)


def train(args: None, ctx: NodeContext) -> dict[str, Any]:
    """Train on global arrays, the weights too; rank 0, the coordinator, dies in the 2nd epoch."""
    import jax
    from jax.experimental import multihost_utils as parts
    from jax.sharding import NamedSharding, PartitionSpec as P

    mesh, split = ctx.mesh(data=-1), P("data")
    sharding = NamedSharding(mesh, split)
    step_of = jax.jit(linear, out_shardings=(None, sharding))
    file = f"weights-{ctx.rank}.npy"
    last = ctx.last_checkpoint
    step = last.step if last else 0
    part = np.load(last.folder / file) if last else np.zeros(1, "f4")
    weights = parts.host_local_array_to_global_array(part, mesh, split)
    losses = []
    for _ in range(EPOCHS):
        for x, y, _weight in ctx.jax_batches(BATCH, x="x", y="y", sharding=sharding):
            assert x.shape == (2 * BATCH, 2)
            loss, slope = step_of(weights, x, y)
            weights = weights - RATE * slope
            losses.append(float(loss))
            step += 1
            if step % 3 == 0:
                with ctx.checkpoint(step) as folder:
                    part = parts.global_array_to_host_local_array(weights, mesh, split)
                    np.save(folder / file, part)
            if step == BATCHES + 3 and not ctx.restarts and ctx.is_chief:
                os.kill(os.getpid(), signal.SIGKILL)
    whole = parts.process_allgather(weights, tiled=True)
    return {"losses": losses, "weights": np.asarray(whole), "resumed": last and last.step}


@pytest.mark.smoke
def test_training_that_lost_the_coordinator_equals_an_undisturbed_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"x": [0.3, 1.0], "y": 1.0}
    options: dict[str, Any] = {"framework": "jax", "max_restarts": 1}
    with launch(train, checkpoint_dir=str(tmp_path), **options) as cluster:
        report = cluster.feed([row] * (2 * BATCH * BATCHES), epochs=EPOCHS, timeout_s=_SOON_S)
        results = cluster.results(_SOON_S)
    assert "worker:0" in caplog.text
    assert "was killed by SIGKILL" in caplog.text
    assert report.rows_unused == 0
    weights = np.zeros(2)
    losses: list[float] = []
    for _ in range(EPOCHS * BATCHES):
        loss, slope = linear(weights, np.array([row["x"]]), np.array([row["y"]]))
        weights, losses = weights - RATE * slope, [*losses, loss]
    for found in results:
        assert found["resumed"] == 6, "the failure was at the eighth step"
        np.testing.assert_allclose(found["losses"], losses[6:], rtol=1e-5)
        np.testing.assert_allclose(found["weights"], weights, rtol=1e-5)


def fail(rank: int, ctx: NodeContext) -> None:
    """Wait for the other node in a collective, which this one never begins."""
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("both are here")
    if ctx.rank == rank:
        raise LookupError("the user's own")
    multihost_utils.sync_global_devices("the other one has failed")


@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=pytest.mark.smoke), pytest.param(1, marks=pytest.mark.deep)]
)
def test_exception_of_one_node_is_the_root_cause(rank: int) -> None:
    with pytest.raises(NodeFailedError) as caught, launch(fail, rank, framework="jax") as cluster:
        cluster.results(_SOON_S)
    assert caught.value.root_cause.rank == rank
    assert caught.value.root_cause.exception_type == "builtins.LookupError"
