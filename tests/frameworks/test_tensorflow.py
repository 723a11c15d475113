"""TF_CONFIG, and which errors say that the port is gone."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.options import Roles
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, Member, World, build_world
from sparkdl.frameworks.tensorflow import TensorFlow


def _world(nodes: int, ps: int = 0, chief: Any = None, evaluator: Any = False) -> World:
    planned = plan_nodes(nodes, Roles(ps=ps, chief=chief, evaluator=evaluator))
    return build_world(0, {node: Address("h", node.node_id, "") for node in planned})


def _config(world: World, member: Member) -> Any:
    spec = ClusterSpec("c", tuple(m.node for m in world.members))
    return json.loads(TensorFlow().environment(world, member, spec)["TF_CONFIG"])


def test_node_that_is_alone_has_no_tf_config() -> None:
    world = _world(1)
    spec = ClusterSpec("c", (world.members[0].node,))
    assert TensorFlow().environment(world, world.members[0], spec) == {}


@pytest.mark.parametrize(
    ("plan", "node", "cluster", "task"),
    [
        ((2,), 1, {"worker": ["h:0", "h:1"]}, ("worker", 1)),
        ((3, 1, "chief"), 0, {"ps": ["h:0"], "chief": ["h:1"], "worker": ["h:2"]}, ("ps", 0)),
        # TensorFlow 1's name for it.
        ((2, 0, "master"), 0, {"chief": ["h:0"], "worker": ["h:1"]}, ("chief", 0)),
    ],
)
def test_nodes_find_each_other(plan: Any, node: int, cluster: Any, task: tuple[str, int]) -> None:
    world = _world(*plan)
    assert _config(world, world.member(node)) == {
        "cluster": cluster,
        "task": {"type": task[0], "index": task[1]},
    }


def test_evaluator_is_listed_for_itself_only() -> None:
    world = _world(3, 0, "chief", True)
    chief, evaluator = _config(world, world.member(0)), _config(world, world.member(1))
    assert chief["cluster"] == {"chief": ["h:0"], "worker": ["h:2"]}
    assert evaluator["cluster"] == {**chief["cluster"], "evaluator": ["h:1"]}
    assert evaluator["task"] == {"type": "evaluator", "index": 0}


def test_errors_of_others_are_not_lost_ports() -> None:
    assert not TensorFlow().is_port_lost(RuntimeError("Could not start gRPC server"))
    assert not TensorFlow().is_port_lost(OSError("address already in use"))


@pytest.mark.tensorflow
def test_port_that_is_taken_is_recognised() -> None:
    import tensorflow as tf

    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        cluster = {"worker": [f"127.0.0.1:{squatter.getsockname()[1]}", "127.0.0.1:1"]}
        with pytest.raises(tf.errors.UnknownError) as raised:
            tf.distribute.Server(cluster, job_name="worker", task_index=0)
    assert TensorFlow().is_port_lost(raised.value)


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("plan", "legacy", "shimmed"),
    [((2,), "", True), ((2,), "1", False), ((2, 1), "", False), ((1,), "", False)],
)
def test_keras_is_shimmed_for_several_trainers_only(
    monkeypatch: pytest.MonkeyPatch, plan: tuple[int, ...], legacy: str, shimmed: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("sparkdl.frameworks.keras.apply_shim", lambda: calls.append("shim"))
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", legacy)
    world = _world(*plan)
    TensorFlow().before_map_fun(world, world.members[0])
    assert bool(calls) is shimmed


@pytest.mark.tensorflow
def test_generated_code_lies_where_the_agent_deletes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tensorflow.python.autograph.pyct import loader

    monkeypatch.setattr(loader, "tempfile", loader.tempfile)  # undone afterwards
    monkeypatch.setattr("sparkdl.core.files._place", tmp_path)
    world = _world(1)
    TensorFlow().before_map_fun(world, world.members[0])
    module, path = loader.load_source("x = 7", delete_on_exit=False)
    assert (module.x, Path(path).parent) == (7, tmp_path)


@pytest.mark.parametrize(
    ("name", "module", "is_lost"),
    [
        ("UnavailableError", "tensorflow.python.framework.errors_impl", True),
        ("DeadlineExceededError", "tensorflow.python.framework.errors_impl", True),
        ("InvalidArgumentError", "tensorflow.python.framework.errors_impl", False),
        ("UnavailableError", "somebody.else", False),
    ],
)
def test_unreachable_node_is_another_nodes_failure(name: str, module: str, is_lost: bool) -> None:
    error = type(name, (Exception,), {"__module__": module})("Collective ops is aborted by: …")
    assert TensorFlow().is_peer_lost(error) is is_lost
