"""Who serves and who trains with parameter servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding, Roles
from sparkdl.node.context import NodeContext
from tests.doubles.frameworks import SERVES
from tests.doubles.gates import Gate
from tests.doubles.map_funs import hang
from tests.doubles.nodes import SOON_S, all_gone, launch, processes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"roles": Roles(ps=1)}, r"Roles\(ps=1\) needs a chief.*chief='chief'.*coordinator=False"),
        ({"roles": Roles(ps=2, chief="chief")}, "leaves no worker.*num_executors"),
        (
            {"roles": Roles(coordinator=True, chief="chief")},
            "coordinator=True.* needs parameter servers",
        ),
        (
            {"framework": "plain", "roles": Roles(coordinator=True, ps=1)},
            "'plain' has no parameter serv",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        sparkdl.launch(None, hang, None, 3, **{"executor": "local", **options})
    assert not processes()


def test_map_fun_runs_on_the_chief_while_ps_and_workers_serve_until_it_returns() -> None:
    def wait_and_name(args: None, ctx: NodeContext) -> str:
        assert sum(len(batch["value"]) for batch in ctx.batches(8)) == 100
        return ctx.job_name

    options: dict[str, Any] = {"framework": SERVES, "roles": Roles(ps=1, chief="chief")}
    with launch(wait_and_name, nodes=4, **options) as cluster:
        them = processes()
        assert cluster.feed(range(100)).rows == {"chief:0": 100}
        assert cluster.results(SOON_S) == ["chief", None, None, None]
        assert all_gone(process.child for process in them.values())


def test_worker_that_dies_has_all_nodes_begin_anew(tmp_path: Path) -> None:
    def wait_once(gate: Gate, ctx: NodeContext) -> int:
        if ctx.generation == 0:
            gate.wait()
        return ctx.generation

    gate = Gate.at(tmp_path / "gate")
    options: dict[str, Any] = {"framework": SERVES, "roles": Roles(ps=1, chief="chief")}
    options |= {"max_restarts": 1, "feeding": Feeding(fed=False)}
    with launch(wait_once, gate, 3, **options) as cluster, gate.wait_until_reached():
        processes()["worker:0"].child.kill()
        assert cluster.results(SOON_S) == [1, None, None]


def test_map_fun_runs_on_all_nodes_without_a_coordinator() -> None:
    def name(args: None, ctx: NodeContext) -> str:
        return ctx.job_name

    options: dict[str, Any] = {"framework": SERVES, "roles": Roles(ps=1, coordinator=False)}
    with launch(name, nodes=3, **options) as cluster:
        assert cluster.results(SOON_S)[:2] == ["worker", "worker"]
