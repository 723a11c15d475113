"""Nodes that come back, wherever and however, leave the slots that feeding needs: step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkdl.control.messages import Begin, Detach, Hello, NewRound, Stop
from sparkdl.core.errors import LaunchError
from sparkdl.core.world import CheckpointRef
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.lifecycle.transitions import begin, step
from sparkdl.driver.slots.placement import Standing
from tests.driver.test_elastic import Play, said, sent

ENOUGH = states.SlotsCounted(Standing(3, False, "6 slots for 3 nodes"))
SHORT = states.SlotsCounted(Standing(3, True, "3 slots for 3 nodes"))
FEWER = states.SlotsCounted(Standing(2, True, "2 slots for 3 nodes"))
NONE = states.SlotsCounted(Standing(0, False, "0 slots for 3 nodes"))


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


def test_attached_nodes_keep_their_slots_while_some_are_left() -> None:
    play = Play()
    actions = play.say(ENOUGH)
    assert [type(action) for action in actions] == [states.Report]
    lose(play, "b")
    actions = come_back(play, "a", "b2", "c")
    assert sent(actions, Begin) == ["a", "c", "b2"]
    assert not sent(actions, Detach)


def test_nodes_that_are_waited_for_give_theirs_back_when_the_world_begins() -> None:
    """Until then each slot is to get its one node."""
    play = Play()
    lose(play, "b")
    assert not sent(play.say(SHORT), Detach)
    actions = come_back(play, "b2", "a", "c")
    assert sorted(sent(actions, Detach)) == ["a", "b2", "c"]


def test_shortage_while_failures_are_collected_is_not_forgotten() -> None:
    play = Play()
    play.say(play.broke("b"))
    assert isinstance(play.state, states.Failing)
    play.say(SHORT)
    play.expire()
    play.say(*(play.offered(agent_id, 1) for agent_id in "abc"))
    assert sent(play.actions, Detach) == ["a", "b", "c"]


def test_node_that_comes_later_does_not_keep_a_slot_until_the_next_checkpoint() -> None:
    play = Play(min_nodes=1)
    play.say(SHORT)
    lose(play, "b")
    play.say(*(play.offered(agent_id, 1) for agent_id in "ac"))
    play.expire()
    assert play.names == ["worker:0", "worker:2"]
    assert sent(play.say(play.joined("b2")), Detach) == ["b2"]
    actions = play.say(states.CheckpointMade(CheckpointRef("/c/7", 7, 1)))
    assert sent(actions, NewRound) == ["a", "c", "b2"]


def test_a_task_that_starts_another_agent_has_its_slot_asked_back_too() -> None:
    """Its first agent had not been detached yet."""
    play = Play()
    play.say(SHORT, states.AgentDetached("a"), states.AgentDetached("c"))
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


def test_local_processes_have_no_slot_to_give_back() -> None:
    play = Play(1)
    hello = Hello(0, "", "a2", "here", 1, "x", "3", "process")
    play.say(play.left("a"))
    play.expire()
    play.say(SHORT, states.AgentJoined(hello))
    assert not sent(play.say(play.offered("a2", 1)), Detach)


# who brings nodes back then


def test_standby_goes_when_the_node_lives_on_without_its_task() -> None:
    """Not before: Spark would end the node's own attempt with it."""
    play = Play()
    play.say(play.joined("b2"))
    assert sent(play.say(SHORT), Detach) == ["a", "b", "c"]
    assert not sent(play.actions, Stop)
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


def test_nodes_that_there_is_no_room_for_go_again_in_order() -> None:
    play = Play(min_nodes=1)
    lose(play, "b")
    assert relaunched(play.actions) == ["worker:1"]
    assert "the cluster continues without lost ones, as min_nodes allows" in said(play.say(FEWER))
    assert relaunched(play.actions) == []
    actions = play.say(play.joined("b2"))
    assert sent(actions, Stop) == ["b2"]
    assert released(actions) == ["worker:1"]
    play.say(play.left("b2"), *(play.offered(agent_id, 1) for agent_id in "ac"))
    play.expire()
    assert play.names == ["worker:0", "worker:2"]
    assert sent(play.say(play.joined("b3")), Stop) == ["b3"]
    assert not relaunched(play.say(states.CheckpointMade(CheckpointRef("/c/7", 7, 1))))


def test_they_are_brought_back_when_there_is_room_again() -> None:
    play = Play(min_nodes=1)
    lose(play, "b")
    play.say(FEWER, *(play.offered(agent_id, 1) for agent_id in "ac"))
    play.expire()
    assert relaunched(play.say(ENOUGH)) == ["worker:1"]
    assert sent(play.say(play.joined("b2")), Detach) == ["b2"]
    assert not sent(play.actions, Stop)


@pytest.mark.parametrize("standing", [FEWER, NONE])
def test_nodes_that_the_cluster_cannot_do_without_may_always_come(
    standing: states.SlotsCounted,
) -> None:
    play = Play()
    lose(play, "b")
    assert "the cluster waits for lost ones until Recovery(wait_s=…)" in said(play.say(standing))
    assert relaunched(play.actions) == ["worker:1"]
    assert not sent(play.say(play.joined("b2")), Stop)


def test_standby_that_takes_a_seat_gives_its_slot_back_too() -> None:
    play = Play(min_nodes=1)
    play.say(SHORT, states.AgentDetached("a"), states.AgentDetached("c"))
    lose(play, "b")
    play.say(*(play.offered(agent_id, 1) for agent_id in "ac"))
    play.expire()
    play.say(play.joined("b2"), play.joined("b3"))
    assert sent(play.say(play.left("b2")), Detach) == ["b3"]


def test_needed_roles_come_before_others() -> None:
    play = Play(4, {"ps": 1}, min_nodes=2)
    play.say(FEWER)
    lose(play, "a", "c", "d")
    assert relaunched(play.actions) == ["ps:0"]
    assert sent(play.say(play.joined("c2")), Stop) == ["c2"]
    assert not sent(play.say(play.joined("a2")), Stop)


def test_before_the_first_world_nobody_is_refused() -> None:
    """Nobody would bring them back."""
    play = Play(min_nodes=1)
    state: Any = begin(play.spec, 0.0)
    events: list[states.Event] = [NONE, *(play.joined(agent_id) for agent_id in "abc")]
    for event in events:
        state, actions = step(state, event, 1.0)
        assert not sent(actions, Stop)
    assert isinstance(state, states.Gathering)


def test_without_restarts_nobody_is_refused() -> None:
    play = Play(max_restarts=0, min_nodes=1)
    play.say(FEWER)
    assert not sent(play.say(play.joined("b2")), Stop)


def test_a_job_of_detached_nodes_that_has_ended_changes_nothing() -> None:
    play = Play()
    play.say(SHORT, *(states.AgentDetached(agent_id) for agent_id in "abc"))
    before = play.state
    assert not play.say(states.LaunchBroke(LaunchError("the job of the nodes has ended")))
    assert play.state == before


def test_words_of_the_log_are_warnings_only_where_something_changes_for_the_worse() -> None:
    play = Play()
    assert isinstance(play.say(SHORT)[0], states.Warn)
    assert isinstance(play.say(SHORT)[0], states.Report)
    assert isinstance(play.say(FEWER)[0], states.Warn)
