"""Restarts, worlds that shrink and grow, nodes that begin anew alone: the stories, step by step."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.control import messages as msg
from sparkdl.core.errors import LaunchError
from sparkdl.core.failure import Failure, FailureKind
from sparkdl.core.options import Feeding, Recovery, Roles
from sparkdl.core.settings import Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import CheckpointRef, Resume
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.lifecycle.policy import MAX_BACKOFF_S
from sparkdl.driver.lifecycle.transitions import begin, step
from tests.doubles.machines import Played

EXPIRED = states.DeadlinePassed()
RECOVERY = {each.name for each in fields(Recovery)}


class Play(Played):
    """A cluster to which things happen; agents are "a", "b", "c" … of nodes 0, 1, 2 …"""

    state: states.State

    def __init__(self, nodes: int = 3, options: Any = None, **settings: Any) -> None:
        plan = dict(options or {})
        feeding = Feeding(fed=plan.pop("is_fed", True))
        is_coordinated = plan.pop("is_coordinated", False)
        placement = plan.pop("placement", "attached")
        recovery = {name: settings.pop(name) for name in RECOVERY & settings.keys()}
        self.spec = ClusterSpec(
            "c",
            plan_nodes(nodes, Roles(**plan), is_coordinated),
            placement=placement,
            settings=Settings(
                **{"max_restarts": 3, **settings}, recovery=Recovery(**recovery), feeding=feeding
            ),
        )
        super().__init__(step, begin(self.spec, 0.0), EXPIRED, tick_s=1.0)
        ids = [chr(ord("a") + node.node_id) for node in self.spec.nodes]
        self.say(*(self.joined(i) for i in ids), *(self.offered(i) for i in ids))
        assert isinstance(self.state, states.Running)

    def node_id(self, agent_id: str) -> int:
        return ord(agent_id[0]) - ord("a")

    def joined(self, agent_id: str, task: str = "0.0") -> states.AgentJoined:
        node_id = self.node_id(agent_id)
        return states.AgentJoined(
            msg.Hello(
                *(node_id, task, agent_id, f"host-{agent_id}", 1, "x", "3", "task"),
                executor=f"x-{agent_id}",
            )
        )

    def offered(self, agent_id: str, generation: int = 0, port: int = 80) -> states.AgentOffered:
        return states.AgentOffered(agent_id, msg.Offer(generation, port))

    def left(self, agent_id: str) -> states.AgentLeft:
        return states.AgentLeft(agent_id, "its connection closed", self.now_s)

    def failure(self, agent_id: str, generation: int, kind: FailureKind = "signal") -> Failure:
        node = self.spec.nodes[self.node_id(agent_id)]
        number = 9 if kind == "signal" else None
        return Failure(
            *(node.name, kind, "", self.now_s, node.node_id),
            signal_number=number,
            generation=generation,
        )

    def broke(
        self, agent_id: str, generation: int = 0, kind: FailureKind = "signal"
    ) -> states.ChildBroke:
        return states.ChildBroke(
            agent_id, msg.ChildFailed(generation, self.failure(agent_id, generation, kind))
        )

    @property
    def names(self) -> list[str]:
        assert isinstance(self.state, states.Running)
        return [member.node.name for member in self.state.world.members]


def sent(actions: list[states.Action], kind: type) -> list[str]:
    return [
        a.agent_id for a in actions if isinstance(a, states.Send) and isinstance(a.message, kind)
    ]


def resumes(actions: list[states.Action]) -> set[Resume]:
    messages = [action.message for action in actions if isinstance(action, states.Send)]
    return {message.resume for message in messages if isinstance(message, msg.Begin)}


def said(actions: list[states.Action]) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, states.Warn))


def test_restart_goes_on_at_the_last_checkpoint_in_the_same_agents() -> None:
    play = Play()
    ref = CheckpointRef("/c/7", 7, 0)
    play.say(states.CheckpointMade(ref), play.broke("b"))
    actions = play.expire()
    assert isinstance(play.state, states.Gathering)
    assert sent(actions, msg.NewRound) == ["a", "b", "c"]
    assert "restart 1 of 3 because worker:1" in said(actions)
    assert not [action for action in actions if isinstance(action, states.Relaunch)]
    actions = play.say(*(play.offered(i, 1) for i in "abc"))
    assert sent(actions, msg.Begin) == ["a", "b", "c"]
    assert resumes(actions) == {Resume(1, ref)}


def test_second_restart_in_a_row_is_held_back_and_children_come_up_meanwhile() -> None:
    play = Play(restart_backoff_s=5.0)
    play.say(play.broke("b"))
    play.expire()
    play.say(*(play.offered(i, 1) for i in "abc"), play.broke("c", 1))
    play.expire()
    assert play.say(*(play.offered(i, 2) for i in "abc")) == []
    assert isinstance(play.state, states.Gathering)
    assert sent(play.expire(), msg.Begin) == ["a", "b", "c"]


def test_lost_node_is_brought_back_and_told_of_the_round() -> None:
    play = Play()
    play.say(play.left("b"))
    actions = play.expire()
    assert states.Relaunch((play.spec.nodes[1],)) in actions
    play.say(play.offered("a", 1), play.offered("c", 1))
    assert sent(play.say(play.joined("b2")), msg.NewRound) == ["b2"]
    assert sent(play.say(play.offered("b2", 1)), msg.Begin) == ["a", "c", "b2"]


def test_node_that_does_not_come_back_is_the_end_with_the_first_failure_as_cause() -> None:
    play = Play()
    play.say(play.left("b"))
    play.expire()
    play.say(play.offered("a", 1), play.offered("c", 1), states.LaunchBroke(LaunchError("no slot")))
    assert sent(play.expire(), msg.StopChild) == ["a", "c"]
    assert isinstance(play.state, states.Failed)
    assert play.state.failures[0].node == "worker:1"
    text = str(states.failure_of(play.state))
    assert "worker:1 (rank 1, pid 1) on host-b was lost" in text
    assert "Recovery(wait_s=60)" in text
    assert text.endswith("The last attempt: no slot.")


def test_world_goes_on_with_fewer_nodes_and_grows_at_a_checkpoint() -> None:
    play = Play(min_nodes=2)
    play.say(play.left("b"))
    play.expire()
    play.say(play.offered("a", 1), play.offered("c", 1))
    actions = play.expire()
    assert sent(actions, msg.Begin) == ["a", "c"]
    assert "(missing: worker:1)" in said(actions)
    assert isinstance(play.state, states.Running)
    assert play.names == ["worker:0", "worker:2"]
    assert [member.index for member in play.state.world.members] == [0, 1]
    assert [len(jobs) for jobs in play.state.world.cluster_spec().values()] == [2]
    # It is asked for again, comes, and takes part at the next checkpoint.
    one, two = CheckpointRef("/c/1", 1, 1), CheckpointRef("/c/2", 2, 1)
    assert play.say(states.CheckpointMade(one)) == [states.Relaunch((play.spec.nodes[1],))]
    assert play.say(play.joined("b2"), play.offered("b2")) == []
    assert sent(play.say(states.CheckpointMade(two)), msg.NewRound) == ["a", "c", "b2"]
    actions = play.say(*(play.offered(i, 2) for i in ("a", "c", "b2")))
    assert sent(actions, msg.Begin) == ["a", "c", "b2"]
    assert resumes(actions) == {Resume(1, two)}, "growing is no restart"


@pytest.mark.parametrize(
    ("options", "victims"),
    [({}, "bc"), ({"chief": "chief"}, "a"), ({"ps": 1, "coordinator": False}, "a")],
)
def test_world_without_enough_nodes_or_a_role_does_not_begin(
    options: dict[str, Any], victims: str
) -> None:
    options.pop("coordinator", None)
    play = Play(3, options, min_nodes=2)
    play.say(*(play.left(victim) for victim in victims))
    play.expire()
    play.say(*(play.offered(i, 1) for i in "abc" if i not in victims))
    play.expire()
    assert isinstance(play.state, states.Failed)


def test_all_run_again_whoever_had_returned() -> None:
    play = Play()
    play.say(states.ChildGaveResult("a", msg.ChildReturned(0, b"1")), play.broke("b"))
    play.expire()
    play.say(*(play.offered(i, 1) for i in "abc"))
    assert isinstance(play.state, states.Running)
    assert play.state.returned == {}
    play.say(*(states.ChildGaveResult(i, msg.ChildReturned(1, b"2")) for i in "abc"))
    assert isinstance(play.state, states.Finished)


def test_stop_during_a_restart_ends_it() -> None:
    play = Play()
    play.say(play.broke("b"))
    play.expire()
    play.say(states.StopAsked(1.0, 1.0), *(play.left(i) for i in "abc"))
    assert isinstance(play.state, states.Stopped)
    assert "stopped before all nodes had restarted" in str(states.failure_of(play.state))


# Nodes that are not trainers. Node 0, "a", is the evaluator.

EVALUATED = {"evaluator": True}
SERVED = {"ps": 1, "chief": "chief", "is_coordinated": True}
"""ps:0 is "a", the chief "b", worker:0 and worker:1 "c" and "d"."""


def test_evaluator_that_was_left_takes_part_again_when_all_begin_again() -> None:
    play = Play(3, EVALUATED)
    play.say(play.broke("a"))
    assert play.say(play.left("a"), play.joined("a2"), play.offered("a2")) == []
    play.say(play.broke("b"))
    play.expire()
    play.say(*(play.offered(i, 1) for i in ("a2", "b", "c")))
    assert isinstance(play.state, states.Running)
    assert (play.state.left, play.state.world.member(0).host) == (frozenset(), "host-a2")


@pytest.mark.parametrize("max_restarts", [0, 3])
@pytest.mark.parametrize("happens", ["broke", "left"])
def test_evaluator_that_fails_is_left_behind(happens: str, max_restarts: int) -> None:
    play = Play(3, EVALUATED, max_restarts=max_restarts)
    actions = play.say(getattr(play, happens)("a"))
    assert said(actions).startswith("the training goes on without evaluator:0: evaluator:0 (rank")
    assert len(actions) == 1
    assert isinstance(play.state, states.Running)
    assert play.state.left == {0}
    play.say(*(states.ChildGaveResult(i, msg.ChildReturned(0, b"1")) for i in "bc"))
    assert isinstance(play.state, states.Finished)


def test_restart_of_all_does_not_need_the_evaluator() -> None:
    play = Play(3, EVALUATED)
    play.say(play.broke("b"), play.left("a"))
    assert isinstance(play.state, states.Failing)
    assert [failure.node for failure in play.state.failures] == ["worker:0"]
    play.expire()
    play.say(play.offered("b", 1), play.offered("c", 1))
    assert sent(play.expire(), msg.Begin) == ["b", "c"]


@pytest.mark.parametrize("is_fed", [True, False])
@pytest.mark.parametrize("victim", ["a", "c"])
def test_lost_ps_or_worker_of_parameter_servers_restarts_all(victim: str, is_fed: bool) -> None:
    play = Play(4, {**SERVED, "is_fed": is_fed})
    play.say(play.broke(victim))
    assert isinstance(play.state, states.Failing)


# Whatever happens.

SPECS: list[dict[str, Any]] = [
    {"nodes": 3, "min_nodes": 2},
    {"nodes": 3, "min_nodes": 2, "options": {"placement": "detached"}},
    {"nodes": 4, "options": {"evaluator": True, "ps": 1}, "min_nodes": 3, "max_restarts": 2},
    {"nodes": 4, "options": {**SERVED, "is_fed": False}, "restart_backoff_s": 0.0},
]


class Chance:
    """Draws what happens next to a cluster, and keeps who is there."""

    def __init__(self, data: st.DataObject, play: Play) -> None:
        self.data, self.play = data, play
        self.letters = [chr(ord("a") + node.node_id) for node in play.spec.nodes]
        self.here = set(self.letters)
        self.count = 0

    def next(self, generation: int) -> states.Event:
        kinds = ["offer"] * 6 + ["join"] * 3 + ["break", "leave", "made", "return", "expire"]
        kinds += ["detached", "detached", "drains"]
        kind = self.data.draw(st.sampled_from(kinds)) if self.here else "join"
        self.count += 1
        if kind == "join":
            agent = f"{self.data.draw(st.sampled_from(self.letters))}{self.count}"
            self.here.add(agent)
            return self.play.joined(agent)
        agent = self.data.draw(st.sampled_from(sorted(self.here)))
        if kind == "leave":
            self.here.discard(agent)
        if kind == "expire" and self.play.state.deadline_s < math.inf:
            self.play.now_s = self.play.state.deadline_s
            return EXPIRED
        mostly = self.data.draw(st.sampled_from([generation] * 4 + [0]))
        events: dict[str, states.Event] = {
            "detached": states.AgentDetached(agent),
            "drains": states.ExecutorsDrain(frozenset({f"x-{agent}"})),
            "offer": self.play.offered(agent, mostly),
            "break": self.play.broke(agent, generation),
            "leave": self.play.left(agent),
            "return": states.ChildGaveResult(agent, msg.ChildReturned(generation, b"")),
            "made": states.CheckpointMade(CheckpointRef("/c", self.count, generation)),
        }
        return events.get(kind, events["made"])


def generation_of(state: states.State, before: int) -> int:
    if isinstance(state, states.Gathering):
        return state.generation
    return state.world.generation if isinstance(state, (states.Running, states.Failing)) else before


def validate(play: Play, asked: set[str]) -> None:
    state, spec = play.state, play.spec
    assert not isinstance(state, states.Stopped)
    if isinstance(state, states.Running):
        roster = state.roster
        seats = roster.agents.values()
        holders = {a.agent_id for a in seats if a.holds_slot and not roster.drains(a)}
        assert spec.placement == "attached" or holders <= asked
        assert {n.name for n in spec.nodes if not n.role.is_expendable} <= set(play.names)
        assert len(play.names) >= (spec.settings.recovery.min_nodes or len(spec.nodes) - 1)
        for member in state.world.members:
            assert not member.role.is_needed or member.node.node_id in state.roster.agents
    if isinstance(state, states.Gathering) and state.is_held:
        assert state.deadline_s - play.now_s <= MAX_BACKOFF_S


@given(st.data())
def test_whatever_happens_rounds_count_up_and_only_who_is_there_is_spoken_to(
    data: st.DataObject,
) -> None:
    play = Play(**data.draw(st.sampled_from(SPECS)))
    chance, generation = Chance(data, play), 0
    asked = set(sent(play.actions, msg.Detach))
    for _ in range(data.draw(st.sampled_from([80, 40]))):
        play.say(chance.next(generation))
        assert {a.agent_id for a in play.actions if isinstance(a, states.Send)} <= chance.here
        before, generation = generation, generation_of(play.state, generation)
        assert before <= generation
        assert len(play.state.roster.history.restarts_s) <= generation  # type: ignore[union-attr]
        asked.update(sent(play.actions, msg.Detach))
        validate(play, asked)
