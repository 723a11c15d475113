"""Nodes get their roles in TensorFlowOnSpark's order, or the request is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Roles
from sparkdl.core.spec import ClusterSpec, chief_named, plan_nodes


def reference_template(
    num_executors: int, num_ps: int, master_node: str | None, eval_node: bool
) -> dict[str, list[int]] | None:
    """TFCluster.run of TensorFlowOnSpark 2.2.5, its assertions as `None`."""
    num_master, num_eval = 1 if master_node else 0, 1 if eval_node else 0
    num_workers = max(num_executors - num_ps - num_eval - num_master, 0)
    if num_ps + num_master + num_eval + num_workers != num_executors:
        return None
    if num_master + num_workers <= 0:
        return None
    executors, template = list(range(num_executors)), {}
    if num_ps > 0:
        template["ps"] = executors[:num_ps]
        del executors[:num_ps]
    if master_node:
        template[master_node] = executors[:1]
        del executors[:1]
    if eval_node:
        template["evaluator"] = executors[:1]
        del executors[:1]
    if num_workers > 0:
        template["worker"] = executors[:num_workers]
    return template


@given(
    st.integers(1, 8), st.integers(0, 8), st.sampled_from([None, "chief", "master"]), st.booleans()
)
def test_plan_is_the_cluster_template_of_tensorflowonspark(
    num_nodes: int, num_ps: int, master_node: str | None, eval_node: bool
) -> None:
    template = reference_template(num_nodes, num_ps, master_node, eval_node)
    if template is None:
        with pytest.raises(ConfigError, match="do not leave room for a worker"):
            plan_nodes(num_nodes, Roles(ps=num_ps, chief=master_node, evaluator=eval_node))
        return
    nodes = plan_nodes(num_nodes, Roles(ps=num_ps, chief=master_node, evaluator=eval_node))
    assert [node.node_id for node in nodes] == list(range(num_nodes))
    planned: dict[str, list[int]] = {}
    for node in nodes:
        planned.setdefault(node.role.name, []).append(node.node_id)
        assert node.index == planned[node.role.name].index(node.node_id)
    assert planned == template


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-3,), "at least one node, not -3"),
        ((2, Roles(ps=2)), r"leave room for a worker beside 2 ps; .*\(num_executors\)"),
        ((2, Roles(ps=2, chief="chief", evaluator=True)), "beside 2 ps, chief, evaluator; raise"),
    ],
)
def test_plan_without_a_trainer_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_nodes(*arguments)


@pytest.mark.parametrize("name", ["worker", "ps", "evaluator", "", "the chief", "7"])
def test_the_chief_cannot_take_another_roles_name(name: str) -> None:
    with pytest.raises(ConfigError, match="use 'chief' or 'master'"):
        chief_named(name)


def test_only_chief_and_workers_train_are_fed_and_finish_the_job() -> None:
    spec = ClusterSpec("c", plan_nodes(5, Roles(ps=1, chief="chief", evaluator=True)))
    assert spec.num_trainers == 3
    for node in spec.nodes:
        trains = node.role.name in ("chief", "worker")
        flags = (node.role.is_trainer, node.role.is_fed, node.role.finishes_job)
        assert flags == (trains,) * 3


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [
        (None, [0, None, 0, None]),
        (0, [0, 0, 0, 0]),
        (2, [0, 2, 0, 2]),
        ({}, [0, None, 0, None]),
        ({"evaluator": 1}, [0, None, 1, None]),
        ({"ps": 1, "worker": 0, "chief": 3}, [1, 3, 0, 0]),
    ],
)
def test_ps_and_evaluator_get_a_gpu_only_by_name(num_gpus: Any, expected: list[int | None]) -> None:
    spec = ClusterSpec(
        "c", plan_nodes(4, Roles(ps=1, chief="chief", evaluator=True)), num_gpus=num_gpus
    )
    assert [spec.gpus_of(node) for node in spec.nodes] == expected


@pytest.mark.parametrize(
    ("num_gpus", "words"),
    [
        (-1, "num_gpus=-1 must be a whole number, 0 or more, or left"),
        ("2", "num_gpus='2' must be a whole"),
        (1.5, "num_gpus=1.5 must be"),
        ({"worker": -1}, "num_gpus={'worker': -1} must be"),
        ({"chief": 1}, "names 'chief': must name roles of the cluster, which are worker"),
    ],
)
def test_gpus_that_no_node_can_have_are_refused(num_gpus: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClusterSpec("c", plan_nodes(2), num_gpus=num_gpus)
