"""The cluster's life, step by step: exactly which state follows, and exactly what is sent."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from sparkdl.control import messages as msg
from sparkdl.core.errors import IllegalTransitionError, LaunchError, ReservationTimeoutError
from sparkdl.core.failure import Failure, FailureKind
from sparkdl.core.options import Roles
from sparkdl.core.settings import Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, CheckpointRef, World, build_world
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.lifecycle.policy import History
from sparkdl.driver.lifecycle.state import Agent, Roster
from sparkdl.driver.lifecycle.transitions import TRANSITIONS, begin, step
from tests.doubles.machines import Row, declared_steps_only, ignored, illegal, name_of, pairs_of

steps_are_declared = declared_steps_only(TRANSITIONS)

SETTINGS = Settings(600.0, max_port_retries=2)
SPEC = ClusterSpec("c", plan_nodes(3, Roles(ps=1)), settings=SETTINGS)
"""ps:0 is node 0 and agent "a", worker:0 is 1 and "b", worker:1 is 2 and "c"."""

EXPIRED = states.DeadlinePassed()
STOP = states.StopAsked(grace_s=5.0, timeout_s=15.0)
PROBLEM = LaunchError("the job has failed")
MADE = states.CheckpointMade(CheckpointRef("/c/step-7", 7))
DRAINS = states.ExecutorsDrain(frozenset({"9"}))


# Words for what happens: agents a, b, c belong to nodes 0, 1, 2; "b2" is a twin of "b".


def hello(agent_id: str) -> msg.Hello:
    node_id = ord(agent_id[0]) - ord("a")
    return msg.Hello(
        node_id, "", agent_id, f"host-{agent_id}", 40 + node_id, "grpc://x", "3", "task"
    )


def agent(agent_id: str, generation: int | None = 0) -> Agent:
    offer = None if generation is None else msg.Offer(generation, 8000 + generation)
    return Agent(hello(agent_id), offer)


def roster(*seated: Agent, standbys: tuple[Agent, ...] = (), port_retries: int = 0) -> Roster:
    seats = {a.hello.node_id: a for a in seated}
    return Roster(SPEC, seats, standbys, History(port_retries))


def world_of(agents: Mapping[int, Agent], generation: int = 0) -> World:
    nodes = {}
    for node_id, a in agents.items():
        assert a.offer is not None
        where = Address(a.hello.host, a.offer.port, a.hello.data_address)
        nodes[SPEC.nodes[node_id]] = where
    return build_world(generation, nodes)


def joined(agent_id: str) -> states.AgentJoined:
    return states.AgentJoined(hello(agent_id))


def offered(agent_id: str, generation: int = 0) -> states.AgentOffered:
    return states.AgentOffered(agent_id, msg.Offer(generation, 8000 + generation))


def left(agent_id: str) -> states.AgentLeft:
    return states.AgentLeft(agent_id, "its connection closed", wall_s=1234.5)


def entered(agent_id: str, generation: int = 0) -> states.ChildEntered:
    return states.ChildEntered(agent_id, msg.ChildRunning(generation, 77))


def returned(agent_id: str, generation: int = 0) -> states.ChildGaveResult:
    return states.ChildGaveResult(agent_id, msg.ChildReturned(generation, agent_id.encode()))


def failure(agent_id: str, kind: FailureKind = "exception", generation: int = 0) -> Failure:
    node = SPEC.nodes[hello(agent_id).node_id]
    return Failure(node.name, kind, "no", 1.0, node_id=node.node_id, generation=generation)


def broke(agent_id: str, kind: FailureKind = "exception", generation: int = 0) -> states.ChildBroke:
    return states.ChildBroke(
        agent_id, msg.ChildFailed(generation, failure(agent_id, kind, generation))
    )


def blamed(agent_id: str, generation: int = 0) -> states.NodesBlamed:
    return states.NodesBlamed(generation, (failure(agent_id),))


def to(message: msg.ToAgent, *agent_ids: str) -> list[states.Action]:
    return [states.Send(agent_id, message) for agent_id in agent_ids]


def results(*agent_ids: str) -> dict[int, msg.ChildReturned]:
    return {hello(a).node_id: returned(a).message for a in agent_ids}


ALL = roster(agent("a"), agent("b"), agent("c"))
WORLD = world_of(ALL.agents)
LOST_B = Failure("worker:0", "lost", "its connection closed", 1234.5, 1, 0, "host-b", 41)

START = states.Gathering(Roster(SPEC), 0, 600.0)
ALMOST = states.Gathering(roster(agent("a"), agent("b"), agent("c", None)), 0, 600.0)
RUNNING = states.Running(ALL, WORLD)
SETTLED_S = 10.0 + SETTINGS.settle_s
FAILING = states.Failing(ALL, WORLD, {}, (failure("b"),), SETTLED_S)
GOES_S = 10.0 + SETTINGS.stay_s
FAILED = states.Failed(ALL, (failure("b"),), None, {}, WORLD, deadline_s=GOES_S)
FINISHED = states.Finished(ALL, WORLD, results("b", "c"), GOES_S)
LEAVE = msg.Stop(SPEC.settings.grace_s, is_patient=True)
STOP_FAILED = msg.StopChild(0, failure("b").describe())
STOPPING = states.Stopping(ALL, FINISHED, 25.0)
STOPPED = states.Stopped(FINISHED)

BEGINS = states.Report("generation 0 started with 3 nodes on 3 hosts")


def with_agents(state: Any, *seated: Agent, standbys: tuple[Agent, ...] = ()) -> Any:
    retries = state.roster.history.port_retries
    return replace(state, roster=roster(*seated, standbys=standbys, port_retries=retries))


A, B, C, B2 = agent("a"), agent("b"), agent("c"), agent("b2")
B_DETACHED = replace(B, is_detached=True)
RELEASE_B: list[states.Action] = [states.ForgetTask(SPEC.nodes[1])]

B2_BARE, C_BARE = agent("b2", None), agent("c", None)  # have not offered yet
ALMOST_TWIN = with_agents(ALMOST, A, B, C_BARE, standbys=(B2,))
ALMOST_BARE = with_agents(ALMOST, A, B, C_BARE, standbys=(B2_BARE,))
RUNNING_TWIN = with_agents(RUNNING, A, B, C, standbys=(B2,))
RUNNING_BARE = with_agents(RUNNING, A, B, C, standbys=(B2_BARE,))
FAILING_TWIN = with_agents(FAILING, A, B, C, standbys=(B2,))
FAILING_BARE = with_agents(FAILING, A, B, C, standbys=(B2_BARE,))
FINISHED_TWIN = with_agents(FINISHED, A, B, C, standbys=(B2,))
ENDLESS = replace(FINISHED, deadline_s=math.inf)

STEPS: list[Row] = [
    # Gathering: seats fill, and the world begins with the last offer.
    (START, joined("b"), with_agents(START, agent("b", None)), []),
    (ALMOST, joined("b2"), ALMOST_BARE, []),
    (ALMOST, offered("c"), RUNNING, [BEGINS, *to(msg.Begin(WORLD), "a", "b", "c")]),
    (ALMOST, offered("c", 1), with_agents(ALMOST, A, B, agent("c", 1)), []),
    (ALMOST, left("b"), with_agents(ALMOST, A, C_BARE), []),
    (ALMOST, broke("b"), states.Failed(ALMOST.roster, (failure("b"),), deadline_s=GOES_S),
     to(STOP_FAILED, "a", "b", "c")),
    (ALMOST, states.LaunchBroke(PROBLEM),
     states.Failed(ALMOST.roster, (), PROBLEM, deadline_s=GOES_S),
     to(msg.StopChild(0), "a", "b", "c")),
    (ALMOST, STOP, states.Stopping(ALMOST.roster, ALMOST, 25.0), to(msg.Stop(5.0), "a", "b", "c")),
    (START, STOP, states.Stopped(START), []),
    *ignored(ALMOST, offered("b2"), left("stranger"), broke("b", generation=1),
             broke("b", generation=-1), entered("a"), returned("a"), blamed("b"), MADE),
    # Running: results are collected, the first failure ends it.
    (RUNNING, joined("b2"), RUNNING_BARE, []),
    (RUNNING, offered("b", 1), with_agents(RUNNING, A, agent("b", 1), C), []),
    (RUNNING, entered("b"), replace(RUNNING, in_map_fun=frozenset({1})), []),
    (RUNNING, returned("b"), replace(RUNNING, returned=results("b")), []),
    (RUNNING, returned("a"), replace(RUNNING, returned=results("a")), []),
    (replace(RUNNING, returned=results("a")), returned("b"),
     replace(RUNNING, returned=results("a", "b")), []),
    (replace(RUNNING, returned=results("b")), returned("c"), FINISHED,
     [states.Report("all 2 training nodes have returned"), *to(msg.StopChild(0), "a")]),
    (replace(RUNNING, returned=results("a", "b")), returned("c"),
     replace(FINISHED, returned=results("a", "b", "c")),
     [states.Report("all 2 training nodes have returned")]),
    (RUNNING, broke("b"), FAILING, []),
    (RUNNING, left("b"), states.Failing(roster(A, C), WORLD, {}, (LOST_B,), SETTLED_S), []),
    (RUNNING, blamed("b"), FAILING, []),
    (RUNNING, MADE, replace(RUNNING, roster=replace(ALL, checkpoint=MADE.ref)), []),
    (RUNNING, STOP, states.Stopping(ALL, RUNNING, 25.0), to(msg.Stop(5.0), "a", "b", "c")),
    *ignored(RUNNING, entered("b", 1), entered("stranger"), returned("b", 1),
             returned("stranger"), broke("b", generation=1), left("stranger"),
             states.LaunchBroke(PROBLEM), blamed("b", 1),
             states.CheckpointMade(CheckpointRef("/c", 7, 1)), states.AgentDetached("stranger")),
    # Failing: what else failed is awaited, then it is decided.
    (FAILING, joined("b2"), FAILING_BARE, []),
    (FAILING, offered("b", 1), with_agents(FAILING, A, agent("b", 1), C), []),
    (FAILING, returned("c"), replace(FAILING, returned=results("c")), []),
    (FAILING, broke("c", "exit"),
     replace(FAILING, failures=(failure("b"), failure("c", "exit"))), []),
    (FAILING, left("b"), with_agents(FAILING, A, C), []),
    (replace(FAILING, failures=(failure("c"),)), left("b"),
     replace(with_agents(FAILING, A, C), failures=(failure("c"), LOST_B)), []),
    (FAILING, EXPIRED, FAILED, to(STOP_FAILED, "a", "b", "c")),
    (FAILING, MADE, replace(FAILING, roster=replace(ALL, checkpoint=MADE.ref)), []),
    (FAILING, STOP, states.Stopping(ALL, FAILING, 25.0), to(msg.Stop(5.0), "a", "b", "c")),
    *ignored(FAILING, entered("c"), returned("c", 1), returned("stranger"),
             broke("c", generation=1), left("stranger"), states.LaunchBroke(PROBLEM),
             blamed("c"), states.CheckpointMade(CheckpointRef("/c", 7, 1))),
    # Finished and Failed: agents stay for a moment; who comes late is sent away.
    (FINISHED, joined("b2"), FINISHED, to(msg.Stop(0.0), "b2")),
    (FINISHED, left("b"), with_agents(FINISHED, A, C), []),
    (FINISHED, EXPIRED, ENDLESS, to(LEAVE, "a", "b", "c")),
    (FINISHED_TWIN, EXPIRED, replace(FINISHED_TWIN, deadline_s=math.inf),
     to(LEAVE, "a", "b", "c", "b2")),
    (with_agents(FINISHED), EXPIRED, with_agents(ENDLESS), [states.Release()]),
    (with_agents(FINISHED, C), left("c"), with_agents(FINISHED), []),
    (with_agents(ENDLESS, C), left("stranger"), with_agents(ENDLESS, C), []),
    (with_agents(ENDLESS, C), left("c"), with_agents(ENDLESS), [states.Release()]),
    (with_agents(ENDLESS), left("stranger"), with_agents(ENDLESS), []),
    (with_agents(ENDLESS), STOP, states.Stopped(with_agents(ENDLESS)), []),
    (FINISHED, STOP, STOPPING, to(msg.Stop(5.0), "a", "b", "c")),
    (FAILED, joined("b2"), FAILED, to(msg.Stop(0.0), "b2")),
    (FAILED, left("b"), with_agents(FAILED, A, C), []),
    (FAILED, EXPIRED, replace(FAILED, deadline_s=math.inf), to(LEAVE, "a", "b", "c")),
    (with_agents(FAILED), EXPIRED, replace(with_agents(FAILED), deadline_s=math.inf),
     [states.Release()]),
    (replace(with_agents(FAILED, B), deadline_s=math.inf), left("b"),
     replace(with_agents(FAILED), deadline_s=math.inf), [states.Release()]),
    (FAILED, STOP, states.Stopping(ALL, FAILED, 25.0), to(msg.Stop(5.0), "a", "b", "c")),
    *ignored(FINISHED, offered("b", 1), entered("a"), returned("a"), broke("a", "signal"),
             blamed("c"), MADE, states.LaunchBroke(PROBLEM)),
    *ignored(FAILED, offered("b", 1), entered("a"), returned("c"), broke("c"), blamed("c"),
             MADE, states.LaunchBroke(PROBLEM)),
    # Stopping: until the last agent has gone, or time is up.
    (STOPPING, joined("b2"),
     with_agents(STOPPING, A, B, C, standbys=(B2_BARE,)), to(msg.Stop(0.0), "b2")),
    (STOPPING, left("b"), with_agents(STOPPING, A, C), []),
    (with_agents(STOPPING, C), left("c"), STOPPED, []),
    (with_agents(STOPPING, B, standbys=(B2,)), left("b"), with_agents(STOPPING, B2), []),
    (with_agents(STOPPING, standbys=(B2,)), left("b2"), STOPPED, []),
    (STOPPING, states.StopAsked(0.0, 10.0), replace(STOPPING, deadline_s=20.0),
     to(msg.Stop(0.0), "a", "b", "c")),
    (with_agents(STOPPING, A, C), EXPIRED, states.Stopped(FINISHED, ("ps:0", "worker:1")), []),
    *ignored(STOPPING, offered("b", 1), entered("b"), returned("b"), broke("b"), blamed("c"),
             MADE, states.LaunchBroke(PROBLEM), STOP),
    # Stopped: only late agents are answered.
    (STOPPED, joined("b2"), STOPPED, to(msg.Stop(0.0), "b2")),
    *ignored(STOPPED, left("b"), offered("b"), entered("b"), returned("b"), broke("b"),
             blamed("c"), MADE, states.LaunchBroke(PROBLEM), STOP),
    # Standbys: a twin of a living agent.
    (ALMOST_TWIN, offered("c"),
     states.Running(roster(A, B, C, standbys=(B2,)), WORLD),
     [BEGINS, *to(msg.Begin(WORLD), "a", "b", "c")]),
    (ALMOST_BARE, offered("b2"),
     ALMOST_TWIN, []),
    (ALMOST_TWIN, left("b"),
     with_agents(ALMOST, A, B2, C_BARE), []),
    (ALMOST_TWIN, left("b2"), ALMOST, []),
    (ALMOST_TWIN, broke("b2"),
     ALMOST_BARE, []),
    (with_agents(ALMOST, A, B, standbys=(B2,)), states.LaunchBroke(PROBLEM),
     states.Failed(roster(A, B, standbys=(B2,)), (), PROBLEM, deadline_s=GOES_S),
     to(msg.StopChild(0), "a", "b", "b2")),
    (RUNNING_TWIN, broke("b2"),
     RUNNING_BARE, []),
    (RUNNING_TWIN, returned("b2"),
     RUNNING_TWIN, []),
    (RUNNING_TWIN, entered("b2"),
     RUNNING_TWIN, []),
    (RUNNING_TWIN, left("b2"), RUNNING, []),
    (RUNNING_TWIN, left("b"),
     states.Failing(roster(A, B2, C), WORLD, {}, (LOST_B,), SETTLED_S), []),
    (FAILING_TWIN, broke("b2"),
     FAILING_BARE, []),
    # Task slots: `test_replacement.py` tells the stories.
    (ALMOST, states.AgentDetached("b"), with_agents(ALMOST, A, B_DETACHED, C_BARE), RELEASE_B),
    (RUNNING, states.AgentDetached("b"), with_agents(RUNNING, A, B_DETACHED, C), RELEASE_B),
    (FAILING, states.AgentDetached("b"), with_agents(FAILING, A, B_DETACHED, C), RELEASE_B),
    *(row for state in (FINISHED, FAILED, STOPPING, STOPPED)
      for row in ignored(state, DRAINS, states.AgentDetached("b"))),
    *((state, DRAINS, replace(state, roster=replace(state.roster, draining=DRAINS.executors)), [])
      for state in (ALMOST, RUNNING, FAILING)),
    (FINISHED_TWIN, STOP,
     states.Stopping(FINISHED_TWIN.roster, FINISHED_TWIN, 25.0),
     to(msg.Stop(5.0), "a", "b", "c", "b2")),
]  # fmt: skip
"""At 10 s: state, what happens, the state after, what is done."""


@pytest.mark.parametrize("row", STEPS, ids=name_of)
def test_step(row: Row) -> None:
    before, event, after, actions = row
    assert step(before, event, 10.0) == (after, actions)


def expired(before: states.Gathering) -> tuple[states.Failed, list[states.Action]]:
    state, actions = step(before, EXPIRED, 600.0)
    assert isinstance(state, states.Failed)
    assert isinstance(state.problem, ReservationTimeoutError)
    return state, actions


def test_nodes_that_did_not_come_in_time_are_named() -> None:
    state, actions = expired(states.Gathering(roster(agent("b", None)), 0, 600.0))
    assert state == states.Failed(
        roster(agent("b", None)), (), state.problem, deadline_s=600.0 + SETTINGS.stay_s
    )
    assert actions == to(msg.StopChild(0), "b")
    text = str(state.problem)
    assert text.startswith("1 of 3 nodes came up within 600 s; missing: ps:0, worker:1. ")
    assert "Startup(timeout_s=…)" in text


def test_many_that_are_missing_are_counted_rather_than_named() -> None:
    spec = replace(roster().spec, nodes=plan_nodes(100))
    state, _ = step(states.Gathering(replace(roster(), spec=spec), 0, 600.0), EXPIRED, 600.0)
    assert isinstance(state, states.Failed)
    missing = "worker:0, worker:1, worker:2, worker:3, worker:4 and 95 more. "
    assert f"0 of 100 nodes came up within 600 s; missing: {missing}" in str(state.problem)


def test_nodes_that_came_without_a_child_are_told_apart_from_missing_ones() -> None:
    state, actions = expired(ALMOST)
    text = str(state.problem)
    assert text.startswith("3 of 3 nodes came up within 600 s; missing: none, but not all children")
    assert actions == to(msg.StopChild(0), "a", "b", "c")


def test_every_legal_pair_is_stepped_through() -> None:
    tried = pairs_of(STEPS)
    assert tried | {(states.Gathering, states.DeadlinePassed)} == set(TRANSITIONS)


def test_only_a_deadline_that_a_state_does_not_have_is_illegal() -> None:
    no_deadline = {(s, states.DeadlinePassed) for s in (states.Running, states.Stopped)}
    assert illegal(states.State, states.Event, TRANSITIONS) == no_deadline
    with pytest.raises(IllegalTransitionError, match=r"(?m)^DeadlinePassed in Stopped$"):
        step(STOPPED, EXPIRED, 0.0)


# Stories of more than one step.


def test_finished_cluster_whose_tensorboard_is_looked_at_stays_until_it_is_stopped() -> None:
    spec = replace(SPEC, tensorboard="")
    before = replace(RUNNING, roster=replace(ALL, spec=spec), returned=results("b"))
    finished, _ = step(before, returned("c"), 10.0)
    assert isinstance(finished, states.Finished)
    assert math.isinf(finished.deadline_s)
    failing = replace(FAILING, roster=replace(ALL, spec=spec))
    assert step(failing, EXPIRED, 10.0)[0].deadline_s == GOES_S


def after(state: states.State, *events: states.Event) -> tuple[states.State, list[states.Action]]:
    """Return the state after the events, at 10 s each, and the actions of the last one."""
    actions: list[states.Action] = []
    for event in events:
        state, actions = step(state, event, 10.0)
    return state, actions


def test_a_world_gathers_in_any_order_and_is_of_those_who_are_there() -> None:
    state, actions = after(
        begin(SPEC, 0.0),
        *(joined("c"), offered("c"), joined("b"), offered("b"), left("c"), joined("a")),
        *(joined("c2"), offered("c2"), offered("a")),
    )
    world = world_of({0: A, 1: B, 2: agent("c2")})
    assert world.member(2).host == "host-c2"
    assert isinstance(state, states.Running)
    assert (state.world, set(state.roster.agents)) == (world, {0, 1, 2})
    assert sorted(str(action) for action in actions) == sorted(
        str(action) for action in [BEGINS, *to(msg.Begin(world), "a", "b", "c2")]
    )


def test_a_standby_that_has_offered_lets_the_world_begin_when_it_is_promoted() -> None:
    state = with_agents(ALMOST, A, agent("b", None), C, standbys=(B2,))
    world = world_of({0: A, 1: B2, 2: C})
    assert step(state, left("b"), 10.0) == (
        states.Running(Roster(SPEC, {0: A, 1: B2, 2: C}), world),
        [BEGINS, *to(msg.Begin(world), "a", "b2", "c")],
    )


@pytest.mark.parametrize("node_id", [-1, 3, 99])
def test_an_agent_of_no_node_never_gets_a_seat(node_id: int) -> None:
    stranger = states.AgentJoined(hello_of("x", node_id))
    state, actions = after(START, stranger)
    assert isinstance(state, states.Gathering)
    assert (dict(state.roster.agents), actions) == ({}, [])
    assert [standby.hello.agent_id for standby in state.roster.standbys] == ["x"]
    assert after(state, STOP)[1] == to(msg.Stop(5.0), "x")


def hello_of(agent_id: str, node_id: int) -> msg.Hello:
    return msg.Hello(node_id, "", agent_id, "h", 1, "", "3", "task")


LOST_PORT = replace(FAILING, failures=(failure("b", "port"),))
RETRY = states.Report("worker:0 lost its port to another process; retry 1 of 2 on new ports")
SECOND = states.Gathering(
    replace(ALL, history=History(1)), 1, 610.0, reason=RETRY.text, world=WORLD
)


def test_a_lost_port_starts_another_round_for_everyone() -> None:
    assert step(LOST_PORT, EXPIRED, 10.0) == (SECOND, [RETRY, *to(msg.NewRound(1), "a", "b", "c")])


def test_ports_may_be_lost_only_so_often() -> None:
    retries = SPEC.settings.max_port_retries
    before = replace(LOST_PORT, roster=replace(ALL, history=History(retries)))
    state, actions = step(before, EXPIRED, 10.0)
    note = "ports were lost to other processes 3 times in a row"
    assert state == states.Failed(before.roster, before.failures, None, {}, WORLD, note, GOES_S)
    assert actions == to(msg.StopChild(0, failure("b", "port").describe()), "a", "b", "c")


def broken_link(agent_id: str) -> states.ChildBroke:
    """Return the event of a child that blames the connection to another node."""
    blames = replace(failure(agent_id), is_consequence=True)
    return states.ChildBroke(agent_id, msg.ChildFailed(0, blames))


def test_cause_is_awaited_where_all_blame_a_connection() -> None:
    state, _ = step(RUNNING, broken_link("b"), 10.0)
    assert state.deadline_s == 10.0 + SPEC.settings.recovery.host_timeout_s + SETTINGS.settle_s
    state, _ = step(state, left("c"), 14.0)
    assert state.deadline_s == 14.0 + SETTINGS.settle_s
    state, _ = step(state, EXPIRED, 15.0)
    assert isinstance(state, states.Failed)
    assert min(state.failures, key=lambda failure: failure.order).kind == "lost"


def test_no_cause_is_awaited_where_no_node_is_left_to_be_it() -> None:
    state, _ = after(RUNNING, returned("a"), broken_link("b"))
    assert state.deadline_s > SETTLED_S
    state, _ = step(state, broken_link("c"), 12.0)
    assert state.deadline_s == 12.0 + SETTINGS.settle_s


@pytest.mark.parametrize(("max_restarts", "wait_s"), [(1, 0.0), (0, SETTINGS.settle_s)])
def test_a_sigkill_needs_no_other_failure_to_explain_a_restart(
    max_restarts: int, wait_s: float
) -> None:
    spec = replace(SPEC, settings=replace(SPEC.settings, max_restarts=max_restarts))
    before = replace(RUNNING, roster=replace(ALL, spec=spec))
    kill = replace(failure("b", "signal"), signal_number=signal.SIGKILL, time_s=2.0)
    killed = states.ChildBroke("b", msg.ChildFailed(0, kill))
    assert step(before, killed, 10.0)[0].deadline_s == 10.0 + wait_s
    state, _ = step(before, broken_link("c"), 10.0)
    assert step(state, killed, 10.1)[0].deadline_s == 10.1 + wait_s
    state, _ = step(before, broke("c"), 10.0)  # which happened first
    assert step(state, killed, 10.1)[0].deadline_s == 10.0 + SETTINGS.settle_s
