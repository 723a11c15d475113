"""What the driver tells the dashboard of its nodes."""

from __future__ import annotations

from sparkdl.control.messages import NodeActive
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, build_world
from sparkdl.driver.controller import View
from sparkdl.driver.dashboard import sampled
from sparkdl.driver.lifecycle.roster import Roster
from sparkdl.driver.lifecycle.state import Running

SPEC = ClusterSpec("c", plan_nodes(2))
ADDRESSES = {node: Address("h", 1, "grpc://h:2") for node in SPEC.nodes}


def test_what_was_reported_before_a_restart_is_not_told_after_it() -> None:
    world = build_world(1, ADDRESSES)
    view = View(Running(Roster(SPEC), world, frozenset({0, 1})))
    view.activity = {0: NodeActive(0, 107, {"loss": 0.5}), 1: NodeActive(1, 3, {"loss": 0.25})}
    told = sampled(SPEC, 0.0, view)
    assert told.steps == [-1, 3]
    assert told.metrics == {"loss": [None, 0.25]}
