"""Hosts that do not reach each other, though the driver reaches both: one of them is given up."""

from __future__ import annotations

from itertools import permutations

import pytest

from sparkdl.control.messages import Hello, NewRound, Stop
from sparkdl.core.errors import NodeLostError
from sparkdl.core.options import Recovery
from sparkdl.driver.lifecycle import state as states
from tests.driver.test_elastic import Play, said, sent

SETTLE_S = Recovery.host_timeout_s / 4


def cut(play: Play, feeder: str, node: str, generation: int = 0) -> states.LinkCut:
    """What a feeder on one host says of a node: hosts are those of the agents, or "only feeds"."""
    return states.LinkCut(generation, play.node_id(node), f"host-{feeder}", 7.0)


def left(actions: list[states.Action]) -> list[str]:
    return [action.host for action in actions if isinstance(action, states.LeaveHost)]


def decide(play: Play, *events: states.LinkCut) -> list[states.Action]:
    """Let feeders speak, and the time pass in which others may; return what follows."""
    play.say(*events)
    return play.expire()


def test_host_is_given_up_and_the_others_begin_again_without_it() -> None:
    play = Play(min_nodes=1, wait_s=5.0)
    assert "worker:1 on host-b cannot be reached from host-a" in said(play.say(cut(play, "a", "b")))
    assert play.state.deadline_s == play.now_s + SETTLE_S
    actions = play.expire()
    assert isinstance(play.state, states.Failing)
    assert (left(actions), sent(actions, Stop)) == (["host-b"], ["b"])
    assert [a.node.name for a in actions if isinstance(a, states.ForgetTask)] == ["worker:1"]
    again = play.expire()
    assert isinstance(play.state, states.Gathering)
    assert (
        "worker:1 (rank 1, pid 1) on host-b cannot be reached from host-a, though the driver "
        "reaches both" in said(again)
    )
    assert not [a for a in again if isinstance(a, states.Relaunch)], "its agent is still there"
    relaunched = play.say(play.left("b"))
    assert [n.name for a in relaunched if isinstance(a, states.Relaunch) for n in a.nodes] == [
        "worker:1"
    ]
    play.say(play.offered("a", 1), play.offered("c", 1))
    play.expire()
    assert isinstance(play.state, states.Running)
    assert play.names == ["worker:0", "worker:2"]


@pytest.mark.parametrize("feeder", ["a", "b", "ab", "ba"])
def test_whoever_says_so_the_same_host_is_given_up(feeder: str) -> None:
    """Both feeders of a cut say so, or one does; the first node's host stays."""
    play = Play(min_nodes=1)
    other = {"a": "b", "b": "a"}
    assert left(decide(play, *(cut(play, one, other[one]) for one in feeder))) == ["host-b"]


@pytest.mark.parametrize("order", [*permutations([("a", "c"), ("b", "a"), ("a", "b")])])
def test_host_that_most_are_cut_off_from_is_given_up(order: tuple[tuple[str, str], ...]) -> None:
    play = Play(min_nodes=1)
    assert left(decide(play, *(cut(play, *pair) for pair in order))) == ["host-a"]


def test_two_cuts_with_no_host_in_common_cost_two_hosts() -> None:
    play = Play(4, min_nodes=1)
    actions = decide(play, cut(play, "a", "b"), cut(play, "c", "d"))
    assert len(left(actions)) == 2
    assert {frozenset("ab"), frozenset("cd")} == {
        frozenset({host[-1], {"a": "b", "b": "a", "c": "d", "d": "c"}[host[-1]]})
        for host in left(actions)
    }


def test_host_that_cannot_be_done_without_stays() -> None:
    """That of the chief, though the worker is the first to say something."""
    play = Play(options={"chief": "chief"}, min_nodes=1)
    chief = next(n for n in play.spec.nodes if n.role.is_chief).node_id
    worker = next(n for n in play.spec.nodes if not n.role.is_chief).node_id
    names = "abc"
    actions = decide(play, cut(play, names[worker], names[chief]))
    assert left(actions) == [f"host-{names[worker]}"]


def test_stranger_on_a_host_that_is_given_up_goes_too_and_no_task_is_forgotten_for_it() -> None:
    play = Play(min_nodes=1)
    play.say(states.AgentJoined(Hello(7, "", "stranger", "host-b", 1, "x", "3", "task")))
    actions = decide(play, cut(play, "a", "b"))
    assert sent(actions, Stop) == ["b", "stranger"]
    assert [a.node.name for a in actions if isinstance(a, states.ForgetTask)] == ["worker:1"]


def test_host_that_only_feeds_costs_no_generation() -> None:
    play = Play(min_nodes=1)
    actions = decide(play, cut(play, "feeds", "b"))
    assert (left(actions), sent(actions, Stop)) == (["host-feeds"], [])
    assert isinstance(play.state, states.Running)
    assert play.state.world.generation == 0
    assert left(play.say(cut(play, "feeds", "b"))) == ["host-feeds"], "Spark started more there"
    play.say(cut(play, "feeds too", "b"))
    assert left(play.expire()) == ["host-b"], "two say so of one"


@pytest.mark.parametrize("settings", [{"max_restarts": 0}, {"min_nodes": 3}])
def test_without_enough_nodes_the_call_fails_and_both_hosts_are_named(
    settings: dict[str, int],
) -> None:
    play = Play(**settings)
    decide(play, cut(play, "a", "b"))
    play.expire()
    if settings.get("max_restarts") != 0:
        play.say(play.left("b"), play.offered("a", 1), play.offered("c", 1))
        play.expire()
    assert isinstance(play.state, states.Failed)
    error = states.failure_of(play.state)
    assert isinstance(error, NodeLostError)
    text = str(error)
    assert "on host-b cannot be reached from host-a, though the driver reaches both" in text
    assert "SPARKDL_NODE_HOST" in text


def test_what_is_said_of_another_generation_or_of_a_node_that_has_gone_means_nothing() -> None:
    play = Play(min_nodes=1)
    before = play.state
    assert play.say(cut(play, "a", "b", generation=1)) == []
    assert play.say(states.LinkCut(0, 7, "host-a")) == []
    assert play.state == before
    decide(play, cut(play, "a", "b"))
    play.expire()
    assert play.say(cut(play, "a", "c"), cut(play, "c", "a")) == []
    assert isinstance(play.state, states.Gathering)


def test_what_is_said_again_does_not_put_off_the_decision() -> None:
    play = Play(min_nodes=1)
    play.say(cut(play, "a", "b"))
    deadline_s = play.state.deadline_s
    assert play.say(cut(play, "a", "b"), cut(play, "c", "b")) != []
    assert play.state.deadline_s == deadline_s


def test_no_agent_comes_back_from_a_host_that_was_given_up() -> None:
    play = Play(min_nodes=1)
    decide(play, cut(play, "a", "b"))
    refused = play.say(play.left("b"), play.joined("b"))
    assert (sent(refused, Stop), left(refused)) == (["b"], ["host-b"])
    play.expire()
    refused = play.say(play.joined("b"))
    assert (sent(refused, Stop), sent(refused, NewRound)) == (["b"], [])
    play.say(play.offered("a", 1), play.offered("c", 1))
    play.expire()
    refused = play.say(play.joined("b"))
    assert isinstance(play.state, states.Running)
    assert sent(refused, Stop) == ["b"]
