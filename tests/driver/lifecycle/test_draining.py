"""Nodes on executors that Spark decommissions leave at a checkpoint: the stories, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.control.messages import Begin, Detach, Drain, NewRound, Stop
from sparkdl.core.world import CheckpointRef, Resume
from sparkdl.driver.lifecycle import state as states
from tests.driver.lifecycle.test_replacement import relaunched, released
from tests.driver.test_elastic import Play, resumes, said, sent

MADE = states.CheckpointMade(CheckpointRef("/c/7", 7, 0))


def drains(*agent_ids: str) -> states.ExecutorsDrain:
    return states.ExecutorsDrain(frozenset(f"x-{agent_id}" for agent_id in agent_ids))


def test_notice_asks_all_for_a_checkpoint_and_starts_the_node_elsewhere() -> None:
    play = Play()
    actions = play.say(drains("b"))
    assert sent(actions, Drain) == ["a", "b", "c"]
    assert "executors of worker:1" in said(actions)
    assert released(actions) == relaunched(actions) == ["worker:1"]
    kinds = [type(action) for action in actions]  # or a job would still carry the node
    assert kinds.index(states.ForgetTask) < kinds.index(states.Relaunch)
    assert isinstance(play.state, states.Running)


def test_node_leaves_at_the_checkpoint_once_another_agent_stands_by_for_it() -> None:
    play = Play()
    play.say(drains("b"))
    assert play.say(MADE) == []  # safe, but there is nobody for the node yet
    assert sent(play.say(play.joined("b2", "5.0")), Drain) == ["a", "b", "c"]
    play.say(play.offered("b2"))
    ref = CheckpointRef("/c/9", 9, 0)
    actions = play.say(states.CheckpointMade(ref))
    assert sent(actions, Stop) == ["b"]
    assert {"a", "c", "b2"} <= set(sent(actions, NewRound))
    kinds = [type(action.message) for action in actions if isinstance(action, states.Send)]
    assert kinds[0] is Stop  # else it might offer another child
    play.say(*(play.offered(agent_id, 1) for agent_id in ("a", "c", "b2")))
    assert isinstance(play.state, states.Gathering)  # its process is still there
    actions = play.say(play.left("b"))
    assert sent(actions, Begin) == ["a", "b2", "c"]
    assert resumes(actions) == {Resume(0, ref)}  # and it is no restart


def test_world_shrinks_at_the_checkpoint_and_grows_at_a_later_one() -> None:
    play = Play(min_nodes=2)
    play.say(drains("b"))
    assert sent(play.say(MADE), Stop) == ["b"]
    play.say(play.offered("a", 1), play.left("b"))
    assert sent(play.say(play.offered("c", 1)), Begin) == ["a", "c"]  # no deadline has passed
    assert play.names == ["worker:0", "worker:2"]
    play.say(play.joined("b2", "5.0"), play.offered("b2"))
    actions = play.say(states.CheckpointMade(CheckpointRef("/c/9", 9, 1)))
    assert sent(actions, NewRound) == ["a", "c", "b2"]


@pytest.mark.parametrize("settings", [{"max_restarts": 0}, {}, {"min_nodes": 3}])
def test_node_without_a_successor_trains_on_where_it_cannot_be_done_without(settings: Any) -> None:
    play = Play(**settings)
    actions = play.say(drains("b"))
    assert sent(actions, Drain) == ["a", "b", "c"]
    assert relaunched(actions) == (["worker:1"] if settings != {"max_restarts": 0} else [])
    assert not sent(play.say(MADE), Stop)
    assert isinstance(play.state, states.Running)


def test_chief_leaves_only_for_a_successor() -> None:
    play = Play(3, {"chief": "chief"}, min_nodes=1)
    play.say(drains("a"))
    assert not sent(play.say(MADE), Stop)
    play.say(play.joined("a2", "5.0"), play.offered("a2"))
    assert sent(play.say(MADE), Stop) == ["a"]


def test_executor_that_ends_before_the_checkpoint_is_a_loss_that_its_successor_shortens() -> None:
    play = Play()
    play.say(drains("b"), play.joined("b2", "5.0"), play.offered("b2"), play.left("b"))
    assert isinstance(play.state, states.Failing)
    actions = play.expire()
    assert sent(actions, NewRound) == ["a", "b2", "c"]
    assert not relaunched(actions)


def test_one_successor_is_enough() -> None:
    play = Play()
    play.say(drains("b"), play.joined("b2", "5.0"))
    assert sent(play.say(play.joined("b3", "6.0")), Stop) == ["b3"]


def test_nodes_are_asked_again_in_the_world_after_a_failure() -> None:
    play = Play()
    play.say(drains("b"), play.joined("b2", "5.0"), play.broke("c"))
    play.expire()
    actions = play.say(*(play.offered(agent_id, 1) for agent_id in ("a", "b", "c")))
    assert sent(actions, Begin) == sent(actions, Drain) == ["a", "b", "c"]


def test_node_keeps_a_slot_that_nobody_can_have() -> None:
    """Without a task its executor would end before it has made a checkpoint."""
    play = Play(options={"placement": "detached"})
    play.say(drains("b"), play.broke("c"))
    play.expire()
    assert sent(play.say(*(play.offered(i, 1) for i in "abc")), Detach) == ["a", "c"]
