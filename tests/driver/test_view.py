"""What the events say of what a controller knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkdl.control.messages import ChildReturned, Hello, NodeActive
from sparkdl.core.failure import Failure
from sparkdl.core.options import Roles
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, build_world
from sparkdl.driver.events import Changed, Location
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.lifecycle.policy import History
from sparkdl.driver.lifecycle.state import AgentRegistry, Failed, Finished, Gathering, Running
from sparkdl.driver.view import ClusterView, PublishedState, node_state, sampled

SPEC = ClusterSpec("c", plan_nodes(2))
FED = ClusterSpec("c0ffee", plan_nodes(3, Roles(ps=1)), framework="plain")
WORLD = build_world(0, {node: Address("10.0.0.1", 1, "") for node in FED.nodes})
RUNNING = Running(AgentRegistry(FED), WORLD, frozenset({0, 1}))
FAILURE = Failure("worker:0", "exception", "<b>no</b>", 0.0, node_id=1, rank=0, host="10.0.0.1")
RETURNED = {1: ChildReturned(0, b"")}
AGENTS = {1: states.Agent(Hello(1, "", "agent", "10.0.0.1", 1, "", "task"))}
ADDRESSES = {node: Address("h", 1, "grpc://h:2") for node in SPEC.nodes}


def test_what_was_reported_before_a_restart_is_not_told_after_it() -> None:
    world = build_world(1, ADDRESSES)
    view = ClusterView(Running(AgentRegistry(SPEC), world, frozenset({0, 1})))
    view.activity = {
        0: NodeActive(0, 107, {"loss": 0.5}, watched_s=9.0),
        1: NodeActive(1, 3, {"loss": 0.25}, watched_s=2.0, rows_s=0.5, others_s=1.5),
    }
    sample = sampled(SPEC, 0.0, view)
    assert sample.steps == [-1, 3]
    assert sample.metrics == {"loss": [None, 0.25]}
    assert sample.waits == {"watched": [0.0, 2.0], "rows": [0.0, 0.5], "others": [-1.0, 1.5]}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (RUNNING, ["in map_fun", "in map_fun", "preparing"]),
        (Gathering(AgentRegistry(FED, AGENTS), 0, 0.0), ["starting", "gathering", "starting"]),
        (replace(RUNNING, returned=RETURNED), ["in map_fun", "returned", "preparing"]),
        (Finished(AgentRegistry(FED), WORLD, RETURNED), ["stopped", "returned", "stopped"]),
        (Failed(AgentRegistry(FED), (FAILURE,)), ["stopped", "failed", "stopped"]),
        (states.Stopping(AgentRegistry(FED), RUNNING, 0.0), ["stopping"] * 3),
        (states.Stopped(replace(RUNNING, returned=RETURNED)), ["stopped", "returned", "stopped"]),
    ],
)
def test_node_says_what_it_does(state: Any, words: list[str]) -> None:
    assert [node_state(ClusterView(state), node.node_id) for node in FED.nodes] == words


def told(seen: PublishedState, state: Any) -> list[tuple[str, tuple[Location, ...], str, bool]]:
    found = [event for event in seen.changes(state, 0.0) if isinstance(event, Changed)]
    return [(event.state, event.locations, event.status, event.is_over) for event in found]


def test_state_is_told_once_and_all_of_it_to_who_comes_late() -> None:
    locations = tuple(Location(m.node.node_id, m.rank, m.host) for m in WORLD.members)
    seen, stopped = PublishedState("c"), states.Stopped(replace(RUNNING, returned=RETURNED))
    assert told(seen, Gathering(AgentRegistry(FED, AGENTS), 0, 0.0)) == [
        ("gathering", (), "Gathering", False)
    ]
    assert told(seen, RUNNING) == [("running", locations, "Running", False)]
    assert not told(seen, replace(RUNNING, returned=RETURNED))
    assert told(seen, stopped) == [("stopped", (), "Stopped", True)]
    assert told(PublishedState("c"), stopped) == [("stopped", locations, "Stopped", True)]


def test_generation_that_grows_says_who_came_back_not_the_failure_before_it() -> None:
    registry = AgentRegistry(FED, AGENTS, history=History(cause=FAILURE))
    seen, grown = PublishedState("c"), replace(WORLD, generation=2)
    reason = "worker:1 came back: restarting at step 5"
    assert told(seen, Gathering(registry, 2, 0.0, reason=reason, world=WORLD))
    (changed,) = seen.changes(replace(RUNNING, registry=registry, world=grown), 0.0)
    assert isinstance(changed, Changed)
    assert changed.reason == reason


def test_cluster_that_all_agents_have_left_is_over() -> None:
    seen, finished = PublishedState("c"), Finished(AgentRegistry(FED, AGENTS), WORLD, RETURNED)
    assert [is_over for *_, is_over in told(seen, finished)] == [False]
    left = replace(finished, registry=AgentRegistry(FED))
    assert [is_over for *_, is_over in told(seen, left)] == [True]
