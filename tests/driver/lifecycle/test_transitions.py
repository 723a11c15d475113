"""The cluster's life, step by step: who comes, restarts, worlds that shrink and grow, the end."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from sparkdl.control import messages as msg
from sparkdl.core.errors import IllegalTransitionError, LaunchError, ReservationTimeoutError
from sparkdl.core.failure import Failure, FailureKind
from sparkdl.core.options import Feeding, Recovery, Roles
from sparkdl.core.settings import Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import CheckpointRef, Resume
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.lifecycle.transitions import TRANSITIONS, begin, step
from tests.doubles.machines import Played, declared_steps_only

steps_are_declared = declared_steps_only(TRANSITIONS)

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
        self.say(*(self.joined(i) for i in ids), *(self.ready(i) for i in ids))
        assert isinstance(self.state, states.Running)

    def node_id(self, agent_id: str) -> int:
        return ord(agent_id[0]) - ord("a")

    def joined(self, agent_id: str, task: str = "0.0") -> states.AgentJoined:
        node_id = self.node_id(agent_id)
        return states.AgentJoined(
            msg.Hello(node_id, task, agent_id, f"host-{agent_id}", 1, "x", "task")
        )

    def ready(self, agent_id: str, generation: int = 0, port: int = 80) -> states.AgentReady:
        return states.AgentReady(agent_id, msg.ChildReady(generation, port))

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
    ) -> states.FailureReported:
        return states.FailureReported(
            agent_id, msg.ChildFailed(generation, self.failure(agent_id, generation, kind))
        )

    @property
    def names(self) -> list[str]:
        assert isinstance(self.state, states.Running)
        return [member.node.name for member in self.state.world.members]


def sent(actions: list[states.Action], kind: type) -> list[str]:
    sent = [a for a in actions if isinstance(a, states.Send) and isinstance(a.message, kind)]
    return [a.agent_id for a in sent]


def resumes(actions: list[states.Action]) -> set[Resume]:
    messages = [action.message for action in actions if isinstance(action, states.Send)]
    return {message.resume for message in messages if isinstance(message, msg.Begin)}


def said(actions: list[states.Action]) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, states.Warn))


def test_restart_goes_on_at_the_last_checkpoint_in_the_same_agents() -> None:
    play = Play()
    ref = CheckpointRef("/c/7", 7, 0)
    play.say(states.CheckpointCompleted(ref), play.broke("b"))
    actions = play.expire()
    assert isinstance(play.state, states.Gathering)
    assert sent(actions, msg.NewRound) == ["a", "b", "c"]
    assert "restart 1 of 3 because worker:1" in said(actions)
    assert not [action for action in actions if isinstance(action, states.Relaunch)]
    actions = play.say(*(play.ready(i, 1) for i in "abc"))
    assert sent(actions, msg.Begin) == ["a", "b", "c"]
    assert resumes(actions) == {Resume(1, ref)}


def test_lost_node_is_brought_back_and_told_of_the_round() -> None:
    play = Play()
    play.say(play.left("b"))
    actions = play.expire()
    assert states.Relaunch((play.spec.nodes[1],)) in actions
    play.say(play.ready("a", 1), play.ready("c", 1))
    assert sent(play.say(play.joined("b2")), msg.NewRound) == ["b2"]
    assert sent(play.say(play.ready("b2", 1)), msg.Begin) == ["a", "c", "b2"]


def test_node_that_does_not_come_back_is_the_end_with_the_first_failure_as_cause() -> None:
    play = Play()
    play.say(play.left("b"))
    play.expire()
    play.say(play.ready("a", 1), play.ready("c", 1), states.LaunchFailed(LaunchError("no slot")))
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
    play.say(play.ready("a", 1), play.ready("c", 1))
    actions = play.expire()
    assert sent(actions, msg.Begin) == ["a", "c"]
    assert "(missing: worker:1)" in said(actions)
    assert isinstance(play.state, states.Running)
    assert play.names == ["worker:0", "worker:2"]
    assert [member.index for member in play.state.world.members] == [0, 1]
    assert [len(jobs) for jobs in play.state.world.cluster_spec().values()] == [2]
    # It is asked for again, comes, and takes part at the next checkpoint.
    one, two = CheckpointRef("/c/1", 1, 1), CheckpointRef("/c/2", 2, 1)
    assert play.say(states.CheckpointCompleted(one)) == [states.Relaunch((play.spec.nodes[1],))]
    assert play.say(play.joined("b2"), play.ready("b2")) == []
    assert sent(play.say(states.CheckpointCompleted(two)), msg.NewRound) == ["a", "c", "b2"]
    actions = play.say(*(play.ready(i, 2) for i in ("a", "c", "b2")))
    assert sent(actions, msg.Begin) == ["a", "c", "b2"]
    assert resumes(actions) == {Resume(1, two)}, "growing is no restart"


@pytest.mark.parametrize(
    ("options", "victims"), [({}, "bc"), ({"chief": "chief"}, "a"), ({"ps": 1}, "a")]
)
def test_world_without_enough_nodes_or_a_role_waits(options: dict[str, Any], victims: str) -> None:
    play = Play(3, options, min_nodes=2)
    play.say(*(play.left(victim) for victim in victims))
    play.expire()
    play.say(*(play.ready(i, 1) for i in "abc" if i not in victims))
    play.expire()
    assert isinstance(play.state, states.Failed)


def test_all_run_again_whoever_had_returned() -> None:
    play = Play()
    play.say(states.ResultReported("a", msg.ChildReturned(0, b"1")), play.broke("b"))
    play.expire()
    play.say(*(play.ready(i, 1) for i in "abc"))
    assert isinstance(play.state, states.Running)
    assert play.state.returned == {}
    play.say(*(states.ResultReported(i, msg.ChildReturned(1, b"2")) for i in "abc"))
    assert isinstance(play.state, states.Finished)


# Nodes that are not trainers. Node 0, "a", is the evaluator.

EVALUATED = {"evaluator": True}
SERVED = {"ps": 1, "chief": "chief", "is_coordinated": True}
"""ps:0 is "a", the chief "b", worker:0 and worker:1 "c" and "d"."""


def test_evaluator_that_was_left_takes_part_again_when_all_begin_again() -> None:
    play = Play(3, EVALUATED)
    play.say(play.broke("a"))
    assert play.say(play.left("a"), play.joined("a2"), play.ready("a2")) == []
    play.say(play.broke("b"))
    play.expire()
    play.say(*(play.ready(i, 1) for i in ("a2", "b", "c")))
    assert isinstance(play.state, states.Running)
    assert (play.state.left, play.state.world.member(0).host) == (frozenset(), "host-a2")


@pytest.mark.parametrize("max_restarts", [0, 3])
@pytest.mark.parametrize("happens", ["broke", "left"])
def test_evaluator_that_fails_is_left_behind(happens: str, max_restarts: int) -> None:
    play = Play(3, EVALUATED, max_restarts=max_restarts)
    actions = play.say(getattr(play, happens)("a"))
    assert said(actions).startswith("the training continues without evaluator:0: evaluator:0 (rank")
    assert len(actions) == 1
    assert isinstance(play.state, states.Running)
    assert play.state.left == {0}
    play.say(*(states.ResultReported(i, msg.ChildReturned(0, b"1")) for i in "bc"))
    assert isinstance(play.state, states.Finished)


def test_restart_of_all_does_not_need_the_evaluator() -> None:
    play = Play(3, EVALUATED)
    play.say(play.broke("b"), play.left("a"))
    assert isinstance(play.state, states.Failing)
    assert [failure.node for failure in play.state.failures] == ["worker:0"]
    play.expire()
    play.say(play.ready("b", 1), play.ready("c", 1))
    assert sent(play.expire(), msg.Begin) == ["b", "c"]


@pytest.mark.parametrize("is_fed", [True, False])
@pytest.mark.parametrize("victim", ["a", "c"])
def test_lost_ps_or_worker_of_parameter_servers_restarts_all(victim: str, is_fed: bool) -> None:
    play = Play(4, {**SERVED, "is_fed": is_fed})
    play.say(play.broke(victim))
    assert isinstance(play.state, states.Failing)


# who comes, and the end


def fresh(nodes: int = 3, **settings: Any) -> Play:
    """Return a cluster to which no agent has come."""
    play = Play(nodes, **settings)
    play.state = begin(play.spec, play.now_s)
    return play


def missed(play: Play) -> str:
    actions = play.expire()
    assert isinstance(play.state, states.Failed)
    assert isinstance(play.state.problem, ReservationTimeoutError)
    assert sent(actions, msg.StopChild) == [a.agent_id for a in play.state.registry.agents.values()]
    return str(play.state.problem)


def test_nodes_that_did_not_come_in_time_are_named_those_without_a_child_apart() -> None:
    play = fresh()
    play.say(play.joined("b"))
    text = missed(play)
    assert text.startswith("1 of 3 nodes came up within 600 s; missing: worker:0, worker:2. ")
    assert "Startup(timeout_s=…)" in text
    play = fresh()
    play.say(*(play.joined(i) for i in "abc"))
    assert missed(play).startswith("3 of 3 nodes came up within 600 s; missing: none, but not all")
    missing = "worker:0, worker:1, worker:2, worker:3, worker:4 and 15 more. "
    assert f"0 of 20 nodes came up within 600 s; missing: {missing}" in missed(fresh(20))


def test_an_agent_of_no_node_never_gets_a_seat() -> None:
    play = fresh()
    assert play.say(play.joined("z")) == []
    assert not states.agents_of(play.state)
    assert sent(play.say(states.StopRequested(5.0, 5.0)), msg.Stop) == ["z"]


def test_stop_names_agents_that_stay_and_may_be_hastened() -> None:
    play = Play()
    assert sent(play.say(states.StopRequested(5.0, 15.0)), msg.Stop) == ["a", "b", "c"]
    assert play.say(states.StopRequested(5.0, 99.0)) == []
    assert sent(play.say(states.StopRequested(0.0, 5.0)), msg.Stop) == ["a", "b", "c"]
    assert sent(play.say(play.joined("b2")), msg.Stop) == ["b2"]
    play.say(play.left("a"), play.left("b2"))
    play.expire()
    assert isinstance(play.state, states.Stopped)
    assert play.state.left_behind == ("worker:1", "worker:2")
    assert sent(play.say(play.joined("b3")), msg.Stop) == ["b3"]
    with pytest.raises(IllegalTransitionError, match=r"(?m)^DeadlinePassed in Stopped$"):
        play.say(EXPIRED)


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_cluster_that_is_over_lets_its_agents_go_and_then_its_slots(end: str) -> None:
    play = Play(max_restarts=0)
    if end == "finished":
        play.say(*(states.ResultReported(i, msg.ChildReturned(0, b"")) for i in "abc"))
    else:
        play.say(play.broke("b"))
        assert sent(play.expire(), msg.StopChild) == ["a", "b", "c"]
    assert sent(play.say(play.joined("b2")), msg.Stop) == ["b2"]
    assert sent(play.expire(), msg.Stop) == ["a", "b", "c"]
    assert play.say(play.left("a"), play.left("b")) == []
    assert play.say(play.left("c")) == [states.Release()]
    assert states.is_empty(play.state)


def test_finished_cluster_whose_tensorboard_is_looked_at_stays_until_it_is_stopped() -> None:
    play = Play()
    assert isinstance(play.state, states.Running)
    registry = replace(play.state.registry, spec=replace(play.spec, tensorboard=""))
    play.state = replace(play.state, registry=registry)
    play.say(*(states.ResultReported(i, msg.ChildReturned(0, b"")) for i in "abc"))
    assert isinstance(play.state, states.Finished)
    assert math.isinf(play.state.deadline_s)


def test_finished_cluster_stops_helpers_and_keeps_its_slots_until_its_time_is_over() -> None:
    play = Play(3, EVALUATED)
    play.say(*(states.ResultReported(i, msg.ChildReturned(0, b"")) for i in "bc"))
    assert sent(play.actions, msg.StopChild) == ["a"]
    assert play.say(*(play.left(i) for i in "abc")) == []
    assert play.expire() == [states.Release()]


def test_first_world_is_never_smaller_than_it_was_asked_for() -> None:
    play = fresh(min_nodes=2)
    play.say(*(play.joined(i) for i in "ab"), *(play.ready(i) for i in "ab"))
    assert missed(play).startswith("2 of 3 nodes came up")


def test_late_news_of_the_round_before_changes_nothing() -> None:
    play = Play()
    play.say(play.broke("b"))
    before = play.state
    play.say(play.left("b"))
    assert isinstance(play.state, states.Failing)
    assert play.state.failures == before.failures  # type: ignore[union-attr]
    play.expire()
    late = (
        play.broke("c"),
        states.ResultReported("c", msg.ChildReturned(0, b"")),
        states.ChildEntered("c", msg.ChildRunning(0, 1)),
        states.CheckpointCompleted(CheckpointRef("/c/7", 7, 0)),
        states.NodesBlamed(0, (play.failure("c", 0),)),
    )
    again = (play.joined("b2"), *(play.ready(i, 1) for i in ("a", "b2", "c")))
    for events, kind in (
        ((), states.Gathering),
        (again, states.Running),
        ((play.broke("a", 1),), states.Failing),
    ):
        play.say(*events)
        before = play.state
        assert isinstance(before, kind)
        assert [play.say(each) for each in late] == [[]] * len(late)
        assert play.state == before


def test_lost_port_is_no_failure_of_the_next_round() -> None:
    play = Play()
    play.say(play.broke("b", kind="port"))
    play.expire()
    assert isinstance(play.state, states.Gathering)
    assert play.state.failures == ()


def test_checkpoint_brings_neither_who_was_left_back_nor_a_round_to_who_has_returned() -> None:
    ref = CheckpointRef("/c/1", 1, 0)
    play = Play(3, EVALUATED)
    play.say(play.broke("a"), play.left("a"))
    assert play.say(states.CheckpointCompleted(ref)) == []
    play = Play(min_nodes=2)
    lose(play, "b")
    play.say(play.ready("a", 1), play.ready("c", 1))
    play.expire()
    play.say(states.ResultReported("a", msg.ChildReturned(1, b"")), play.joined("b2"))
    assert play.say(states.CheckpointCompleted(CheckpointRef("/c/2", 2, 1))) == []
    assert isinstance(play.state, states.Running)


# how long other failures are awaited


def broken_link(play: Play, agent_id: str) -> states.FailureReported:
    """Return the event of a child that blames the connection to another node."""
    blames = replace(play.failure(agent_id, 0, "exception"), is_consequence=True)
    return states.FailureReported(agent_id, msg.ChildFailed(0, blames))


def waits_s(play: Play) -> float:
    return play.state.deadline_s - play.now_s


def test_cause_is_awaited_where_all_blame_a_connection() -> None:
    play = Play(max_restarts=0)
    play.say(broken_link(play, "b"))
    settings = play.spec.settings
    assert waits_s(play) == settings.recovery.host_timeout_s + settings.settle_s
    play.say(play.left("c"))
    assert waits_s(play) == pytest.approx(settings.settle_s)
    play.expire()
    assert isinstance(play.state, states.Failed)
    assert min(play.state.failures, key=lambda failure: failure.order).kind == "lost"


def test_no_cause_is_awaited_where_no_node_is_left_to_be_it() -> None:
    play = Play()
    returned = states.ResultReported("a", msg.ChildReturned(0, b""))
    play.say(returned, broken_link(play, "b"), broken_link(play, "c"))
    assert waits_s(play) == pytest.approx(play.spec.settings.settle_s)


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_sigkill_needs_no_other_failure_to_explain_a_restart(max_restarts: int) -> None:
    play = Play(max_restarts=max_restarts)
    play.say(play.broke("b"))
    assert waits_s(play) == pytest.approx(0.0 if max_restarts else play.spec.settings.settle_s)


# slots that nodes give back

DETACHED = {"placement": "detached"}


def released(actions: list[states.Action]) -> list[str]:
    return [action.node.name for action in actions if isinstance(action, states.ForgetTask)]


def lose(play: Play, *agent_ids: str) -> list[states.Action]:
    """Lose agents; return what follows when it has been decided."""
    play.say(*(play.left(agent_id) for agent_id in agent_ids))
    return play.expire()


def come_back(play: Play, *agent_ids: str, generation: int = 1) -> list[states.Action]:
    play.say(*(play.joined(agent_id) for agent_id in agent_ids))
    ready = [play.ready(agent_id, generation) for agent_id in agent_ids]
    return play.say(*ready)


# who gives a slot back, and when


def test_nodes_that_are_waited_for_give_theirs_back_when_the_world_begins() -> None:
    """Until then each slot is to get its one node."""
    play = Play(options=DETACHED)
    assert sent(play.actions, msg.Begin) == sent(play.actions, msg.Detach) == ["a", "b", "c"]
    assert not sent(lose(play, "b"), msg.Detach)
    actions = come_back(play, "b2", "a", "c")
    assert sorted(sent(actions, msg.Detach)) == ["a", "b2", "c"]


def test_node_that_comes_later_does_not_keep_a_slot_until_the_next_checkpoint() -> None:
    play = Play(options=DETACHED, min_nodes=1)
    lose(play, "b")
    play.say(*(play.ready(agent_id, 1) for agent_id in "ac"))
    play.expire()
    assert play.names == ["worker:0", "worker:2"]
    assert sent(play.say(play.joined("b2")), msg.Detach) == ["b2"]
    actions = play.say(states.CheckpointCompleted(CheckpointRef("/c/7", 7, 1)))
    assert sent(actions, msg.NewRound) == ["a", "c", "b2"]


def test_a_task_that_starts_another_agent_has_its_slot_asked_back_too() -> None:
    """Its first agent had not been detached yet."""
    play = Play(options=DETACHED)
    play.say(states.AgentDetached("a"), states.AgentDetached("c"))
    lose(play, "b")
    actions = come_back(play, "b2", "a", "c")
    assert sent(actions, msg.Detach) == ["b2"]


# who brings nodes back then


def test_standby_goes_when_the_node_lives_on_without_its_task() -> None:
    """Not before: Spark would end the node's own attempt with it."""
    play = Play(options=DETACHED)
    assert not sent(play.say(play.joined("b2")), msg.Stop)
    assert sent(play.say(states.AgentDetached("b")), msg.Stop) == ["b2"]
    play.say(play.left("b2"))
    assert sent(play.say(play.joined("b3")), msg.Stop) == ["b3"]
    assert released(play.actions) == ["worker:1"]
    assert not sent(play.say(play.left("b3")), msg.Stop)
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
    assert (sent(actions, msg.Stop), released(actions)) == (["b3"], ["worker:1"])
    play.say(play.left("b3"))
    assert states.agents_of(play.state)[1].agent_id == "b2"


# with fewer nodes


def test_standby_that_takes_a_seat_gives_its_slot_back_too() -> None:
    play = Play(options=DETACHED, min_nodes=1)
    play.say(states.AgentDetached("a"), states.AgentDetached("c"))
    lose(play, "b")
    play.say(*(play.ready(agent_id, 1) for agent_id in "ac"))
    play.expire()
    play.say(play.joined("b2"), play.joined("b3"))
    assert sent(play.say(play.left("b2")), msg.Detach) == ["b3"]


def test_needed_roles_are_asked_for_before_others() -> None:
    play = Play(4, {"ps": 1}, min_nodes=2)
    lose(play, "d", "a")
    asked = [action for action in play.actions if isinstance(action, states.Relaunch)]
    assert [node.name for action in asked for node in action.nodes] == ["ps:0", "worker:2"]


# Whatever happens.

SPECS: list[dict[str, Any]] = [
    {"nodes": 3, "min_nodes": 2},
    {"nodes": 3, "min_nodes": 2, "options": {"placement": "detached"}},
    {"nodes": 4, "options": {"evaluator": True, "ps": 1}, "min_nodes": 3, "max_restarts": 2},
    {"nodes": 4, "options": {**SERVED, "is_fed": False}},
]


class Chance:
    """Draws what happens next to a cluster, and keeps who is there."""

    def __init__(self, data: st.DataObject, play: Play) -> None:
        self.data, self.play = data, play
        self.letters = [chr(ord("a") + node.node_id) for node in play.spec.nodes]
        self.here = set(self.letters)
        self.count = 0

    def next(self, generation: int) -> states.Event:
        kinds = ["ready"] * 6 + ["join"] * 3 + ["break", "leave", "made", "return", "expire"]
        kinds += ["detached", "detached"]
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
            "ready": self.play.ready(agent, mostly),
            "break": self.play.broke(agent, generation),
            "leave": self.play.left(agent),
            "return": states.ResultReported(agent, msg.ChildReturned(generation, b"")),
            "made": states.CheckpointCompleted(CheckpointRef("/c", self.count, generation)),
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
        registry = state.registry
        agents = registry.agents.values()
        holders = {a.agent_id for a in agents if a.holds_slot}
        assert spec.placement == "attached" or holders <= asked
        assert {n.name for n in spec.nodes if not n.role.is_expendable} <= set(play.names)
        assert len(play.names) >= (spec.settings.recovery.min_nodes or len(spec.nodes) - 1)
        for member in state.world.members:
            assert not member.role.is_needed or member.node.node_id in state.registry.agents


@given(st.data())
def test_always_rounds_count_up_and_only_who_is_there_is_spoken_to(data: st.DataObject) -> None:
    play = Play(**data.draw(st.sampled_from(SPECS)))
    chance, generation = Chance(data, play), 0
    asked = set(sent(play.actions, msg.Detach))
    for _ in range(data.draw(st.sampled_from([80, 40]))):
        play.say(chance.next(generation))
        assert {a.agent_id for a in play.actions if isinstance(a, states.Send)} <= chance.here
        before, generation = generation, generation_of(play.state, generation)
        assert before <= generation
        assert len(play.state.registry.history.restarts_s) <= generation  # type: ignore[union-attr]
        asked.update(sent(play.actions, msg.Detach))
        validate(play, asked)
