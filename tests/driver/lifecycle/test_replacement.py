"""Nodes that come back, wherever and however, leave the slots that feeding needs: step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkdl.control.messages import Begin, Detach, NewRound, Stop
from sparkdl.core.world import CheckpointRef
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.lifecycle.transitions import begin
from tests.driver.test_elastic import Play, sent

DETACHED = {"placement": "detached"}


def relaunched(actions: list[states.Action]) -> list[str]:
    return [node.name for a in actions if isinstance(a, states.Relaunch) for node in a.nodes]


def released(actions: list[states.Action]) -> list[str]:
    return [action.node.name for action in actions if isinstance(action, states.ForgetTask)]


def lose(play: Play, *agent_ids: str) -> list[states.Action]:
    """Lose agents; return what follows when it has been decided."""
    play.say(*(play.left(agent_id) for agent_id in agent_ids))
    return play.expire()


def come_back(play: Play, *agent_ids: str, generation: int = 1) -> list[states.Action]:
    play.say(*(play.joined(agent_id) for agent_id in agent_ids))
    offers = [play.offered(agent_id, generation) for agent_id in agent_ids]
    return play.say(*offers)


# who gives a slot back, and when


def test_nodes_that_are_waited_for_give_theirs_back_when_the_world_begins() -> None:
    """Until then each slot is to get its one node."""
    play = Play(options=DETACHED)
    assert not sent(lose(play, "b"), Detach)
    actions = come_back(play, "b2", "a", "c")
    assert sorted(sent(actions, Detach)) == ["a", "b2", "c"]


def test_node_that_comes_later_does_not_keep_a_slot_until_the_next_checkpoint() -> None:
    play = Play(options=DETACHED, min_nodes=1)
    lose(play, "b")
    play.say(*(play.offered(agent_id, 1) for agent_id in "ac"))
    play.expire()
    assert play.names == ["worker:0", "worker:2"]
    assert sent(play.say(play.joined("b2")), Detach) == ["b2"]
    actions = play.say(states.CheckpointMade(CheckpointRef("/c/7", 7, 1)))
    assert sent(actions, NewRound) == ["a", "c", "b2"]


def test_a_task_that_starts_another_agent_has_its_slot_asked_back_too() -> None:
    """Its first agent had not been detached yet."""
    play = Play(options=DETACHED)
    play.say(states.AgentDetached("a"), states.AgentDetached("c"))
    lose(play, "b")
    actions = come_back(play, "b2", "a", "c")
    assert sent(actions, Detach) == ["b2"]


def test_detached_placement_gives_the_slots_back_when_the_first_world_begins() -> None:
    play = Play()
    play.state = begin(replace(play.spec, placement="detached"), 0.0)
    play.say(*(play.joined(agent_id) for agent_id in "abc"))
    assert not play.actions
    actions = play.say(*(play.offered(agent_id) for agent_id in "abc"))
    assert sent(actions, Begin) == sent(actions, Detach) == ["a", "b", "c"]


# who brings nodes back then


def test_standby_goes_when_the_node_lives_on_without_its_task() -> None:
    """Not before: Spark would end the node's own attempt with it."""
    play = Play(options=DETACHED)
    assert not sent(play.say(play.joined("b2")), Stop)
    assert sent(play.say(states.AgentDetached("b")), Stop) == ["b2"]
    play.say(play.left("b2"))
    assert sent(play.say(play.joined("b3")), Stop) == ["b3"]
    assert released(play.actions) == ["worker:1"]
    assert not sent(play.say(play.left("b3")), Stop)
    assert isinstance(play.state, states.Running)


@pytest.mark.parametrize("is_failing", [False, True])
def test_second_task_of_a_node_goes_at_once_in_order(is_failing: bool) -> None:
    """Spark has repeated a task that had ended in order, and a job of ours brings the node too."""
    play = Play()
    lose(play, "b")
    come_back(play, "b2", "a", "c")
    if is_failing:
        play.say(play.broke("a", 1))
    actions = play.say(play.joined("b3", task="5.0"))
    assert (sent(actions, Stop), released(actions)) == (["b3"], ["worker:1"])
    play.say(play.left("b3"))
    assert states.agents_of(play.state)[1].agent_id == "b2"


# with fewer nodes


def test_standby_that_takes_a_seat_gives_its_slot_back_too() -> None:
    play = Play(options=DETACHED, min_nodes=1)
    play.say(states.AgentDetached("a"), states.AgentDetached("c"))
    lose(play, "b")
    play.say(*(play.offered(agent_id, 1) for agent_id in "ac"))
    play.expire()
    play.say(play.joined("b2"), play.joined("b3"))
    assert sent(play.say(play.left("b2")), Detach) == ["b3"]


def test_needed_roles_are_asked_for_before_others() -> None:
    play = Play(4, {"ps": 1}, min_nodes=2)
    lose(play, "d", "a")
    assert relaunched(play.actions) == ["ps:0", "worker:2"]
