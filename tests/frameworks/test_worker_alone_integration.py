"""TensorFlow's own coordinator goes on when a worker of its servers dies and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkdl.node.context import NodeContext
from tests.doubles.gates import Gate
from tests.doubles.nodes import launch, processes

pytestmark = [pytest.mark.tensorflow, pytest.mark.deep]

DONE_S = 120.0


def count_up(args: dict[str, Any], ctx: NodeContext) -> list[Any]:
    """Take steps on the one worker: one, and more after the worker has died."""
    import tensorflow as tf

    strategy = ctx.parameter_server_strategy()
    with strategy.scope():
        total = tf.Variable(0, dtype=tf.int64)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        total.assign_add(1)

    coordinator.schedule(step)
    coordinator.join()
    args["gate"].wait()
    for _ in range(20):
        coordinator.schedule(step)
    coordinator.join()
    return [int(total.numpy()), ctx.generation, ctx.cluster_spec["worker"]]


def test_worker_that_dies_comes_back_at_its_address_and_the_chief_goes_on(tmp_path: Path) -> None:
    gate = Gate.at(tmp_path / "gate")
    options: dict[str, Any] = {"framework": "tensorflow", "num_ps": 1, "master_node": "chief"}
    with launch(
        count_up, {"gate": gate}, nodes=3, input_mode="own", max_restarts=2, **options
    ) as cluster:
        address = cluster.world.cluster_spec()["worker"]
        with gate.wait_until_reached():
            before = processes(nodes=3)
            before["worker:0"].child.kill()
        result, *_ = [value for value in cluster.results(DONE_S) if value]
        after = cluster.world.cluster_spec()["worker"]
    assert result[0] >= 21
    assert result[1:] == [0, address]
    assert after == address
