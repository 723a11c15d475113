"""The life of a cluster as the coordinator sees it. Pure: no sockets, threads, clocks or Spark.

Runs in: driver

    Gathering ──all have offered──▶ Running ──trainers returned──▶ Finished
        ▲  │                          │                               │
        │  └─deadline, launch failed──┼──────────┐                    │
        └──────a port was lost─── Failing ──▶ Failed                  │
                                                 └──stop──▶ Stopping ◀┘ ──agents gone──▶ Stopped

`step(state, event, now_s)` returns the next state and the actions that the controller has to
perform. All transitions are in `TRANSITIONS`; a pair that is not there is a bug and raises
`IllegalTransitionError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.control.messages import (
    Begin,
    ChildFailed,
    ChildReturned,
    ChildRunning,
    Hello,
    NewRound,
    Offer,
    Stop,
    StopChild,
    ToAgent,
)
from sparkdl.core.checkpoint import CheckpointRef, Resume
from sparkdl.core.errors import (
    IllegalTransitionError,
    ReservationTimeoutError,
    SparkdlError,
)
from sparkdl.core.failure import Failure
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import Address, World, build_world
from sparkdl.driver.policy import Retry, decide

SETTLE_S = 0.3
"""After a first failure, how long to wait for others: the one that is told of first need not be
the one that happened first."""


@dataclass(frozen=True)
class Agent:
    """A connected agent and what it has offered."""

    hello: Hello
    offer: Offer | None = None


@dataclass(frozen=True)
class Roster:
    """The connected agents: one per node id, and standbys that wait for a node to be lost."""

    spec: ClusterSpec
    agents: Mapping[int, Agent] = field(default_factory=dict)
    standbys: tuple[Agent, ...] = ()
    port_retries: int = 0
    checkpoint: CheckpointRef | None = None

    def node_of(self, agent_id: str) -> int | None:
        """Return the node that this agent is, or `None` for a standby or a stranger."""
        for node_id, agent in self.agents.items():
            if agent.hello.agent_id == agent_id:
                return node_id
        return None

    def missing(self) -> tuple[str, ...]:
        """Return the names of nodes without an agent."""
        return tuple(node.name for node in self.spec.nodes if node.node_id not in self.agents)


@dataclass(frozen=True)
class Gathering:
    """Waiting until every node has an agent that has offered a child for `generation`."""

    roster: Roster
    generation: int
    deadline_s: float


@dataclass(frozen=True)
class Running:
    """The world has begun. `returned` holds the nodes whose `map_fun` has returned."""

    roster: Roster
    world: World
    in_map_fun: frozenset[int] = frozenset()
    returned: Mapping[int, ChildReturned] = field(default_factory=dict)
    deadline_s: float = math.inf


@dataclass(frozen=True)
class Failing:
    """Something failed a moment ago; other failures are awaited until `deadline_s`."""

    roster: Roster
    world: World
    returned: Mapping[int, ChildReturned]
    failures: tuple[Failure, ...]
    deadline_s: float


@dataclass(frozen=True)
class Finished:
    """Every node that finishes the job has returned. Agents stay for logs until the stop."""

    roster: Roster
    world: World
    returned: Mapping[int, ChildReturned]
    deadline_s: float = math.inf


@dataclass(frozen=True)
class Failed:
    """The cluster has failed. Agents stay for logs until the stop."""

    roster: Roster
    failures: tuple[Failure, ...]
    problem: SparkdlError | None = None
    returned: Mapping[int, ChildReturned] = field(default_factory=dict)
    world: World | None = None
    deadline_s: float = math.inf


@dataclass(frozen=True)
class Stopping:
    """Agents have been told to stop; `before` is the state in which the stop came."""

    roster: Roster
    before: Any
    deadline_s: float


@dataclass(frozen=True)
class Stopped:
    """The end. `left_behind` names nodes whose agents did not go in time."""

    before: Any
    left_behind: tuple[str, ...] = ()
    deadline_s: float = math.inf


State = Gathering | Running | Failing | Finished | Failed | Stopping | Stopped


@dataclass(frozen=True)
class AgentJoined:
    """An agent has connected."""

    hello: Hello


@dataclass(frozen=True)
class AgentLeft:
    """An agent's connection has ended."""

    agent_id: str
    reason: str
    wall_s: float = 0.0


@dataclass(frozen=True)
class AgentOffered:
    """An agent has a child coming up and a port held."""

    agent_id: str
    offer: Offer


@dataclass(frozen=True)
class ChildEntered:
    """A child has entered `map_fun`."""

    agent_id: str
    message: ChildRunning


@dataclass(frozen=True)
class ChildGaveResult:
    """A child's `map_fun` has returned and the child has ended."""

    agent_id: str
    message: ChildReturned


@dataclass(frozen=True)
class ChildBroke:
    """A child has failed."""

    agent_id: str
    message: ChildFailed


@dataclass(frozen=True)
class CheckpointMade:
    """A checkpoint of the world that runs is complete."""

    ref: CheckpointRef


@dataclass(frozen=True)
class LaunchBroke:
    """The job that carries the nodes has failed: nothing will bring more agents."""

    problem: SparkdlError


@dataclass(frozen=True)
class DeadlinePassed:
    """The state's deadline has passed."""


@dataclass(frozen=True)
class StopAsked:
    """The user wants the end: children get `grace_s`, agents `timeout_s`."""

    grace_s: float
    timeout_s: float


Event = (
    AgentJoined
    | AgentLeft
    | AgentOffered
    | ChildEntered
    | ChildGaveResult
    | ChildBroke
    | CheckpointMade
    | LaunchBroke
    | DeadlinePassed
    | StopAsked
)


@dataclass(frozen=True)
class Send:
    """Send `message` to an agent."""

    agent_id: str
    message: ToAgent


@dataclass(frozen=True)
class Report:
    """Tell the log, at INFO."""

    text: str


Action = Send | Report
Step = tuple[State, list[Action]]


def begin(spec: ClusterSpec, now_s: float, checkpoint: CheckpointRef | None = None) -> Gathering:
    """Return the first state, which goes on at `checkpoint`."""
    roster = Roster(spec, checkpoint=checkpoint)
    return Gathering(roster, 0, now_s + spec.settings.reservation_timeout_s)


def step(state: State, event: Event, now_s: float) -> Step:
    """Return the state after `event`, and what has to be done.

    Raises:
        IllegalTransitionError: if the state has no transition for the event.
    """
    handler = TRANSITIONS.get((type(state), type(event)))
    if handler is None:
        raise IllegalTransitionError(f"{type(event).__name__} in {type(state).__name__}")
    return handler(state, event, now_s)


def _stay(state: State, event: Event, now_s: float) -> Step:
    return state, []


def _to_all(roster: Roster, message: ToAgent, standbys: bool = False) -> list[Action]:
    agents = [*roster.agents.values(), *(roster.standbys if standbys else ())]
    return [Send(agent.hello.agent_id, message) for agent in agents]


def _seat(roster: Roster, agent: Agent) -> Roster:
    """Give the agent its node, or make it a standby if the node has a living agent."""
    node_id = agent.hello.node_id
    if node_id in roster.agents or not 0 <= node_id < len(roster.spec.nodes):
        return replace(roster, standbys=(*roster.standbys, agent))
    return replace(roster, agents={**roster.agents, node_id: agent})


def _unseat(roster: Roster, agent_id: str) -> Roster:
    """Remove an agent; a standby for the same node takes its seat."""
    node_id = roster.node_of(agent_id)
    standbys = tuple(a for a in roster.standbys if a.hello.agent_id != agent_id)
    agents = {n: a for n, a in roster.agents.items() if n != node_id}
    successor = next((a for a in standbys if a.hello.node_id == node_id), None)
    if successor is not None and node_id is not None:
        agents[node_id] = successor
        standbys = tuple(a for a in standbys if a is not successor)
    return replace(roster, agents=agents, standbys=standbys)


def _with_offer(roster: Roster, agent_id: str, offer: Offer | None) -> Roster:
    def update(agent: Agent) -> Agent:
        return replace(agent, offer=offer) if agent.hello.agent_id == agent_id else agent

    return replace(
        roster,
        agents={node_id: update(agent) for node_id, agent in roster.agents.items()},
        standbys=tuple(update(agent) for agent in roster.standbys),
    )


def _try_begin(state: Gathering) -> Step:
    """Begin the world if every node has offered a child for this generation."""
    roster = state.roster
    addresses = {}
    for node in roster.spec.nodes:
        agent = roster.agents.get(node.node_id)
        if agent is None or agent.offer is None or agent.offer.generation != state.generation:
            return state, []
        addresses[node] = Address(agent.hello.host, agent.offer.port, agent.hello.data_address)
    world = build_world(state.generation, addresses)
    hosts = len({member.host for member in world.members})
    actions = [Report(f"World {world.generation} begins: {world.size} nodes on {hosts} hosts")]
    begin = Begin(world, Resume(checkpoint=roster.checkpoint))
    return Running(roster, world), [*actions, *_to_all(roster, begin)]


def _gathering_joined(state: Gathering, event: AgentJoined, now_s: float) -> Step:
    """Seat the agent; it brings a child for generation 0, so tell it of a later one."""
    gathering = replace(state, roster=_seat(state.roster, Agent(event.hello)))
    if state.generation == 0:
        return gathering, []
    return gathering, [Send(event.hello.agent_id, NewRound(state.generation))]


def _gathering_left(state: Gathering, event: AgentLeft, now_s: float) -> Step:
    return _try_begin(replace(state, roster=_unseat(state.roster, event.agent_id)))


def _gathering_offered(state: Gathering, event: AgentOffered, now_s: float) -> Step:
    roster = _with_offer(state.roster, event.agent_id, event.offer)
    return _try_begin(replace(state, roster=roster))


def _gathering_broke(state: Gathering, event: ChildBroke, now_s: float) -> Step:
    failure = event.message.failure
    if event.message.generation != state.generation:
        return state, []
    if state.roster.node_of(event.agent_id) is None:
        return _standby_broke(state, event, now_s)
    return Failed(state.roster, (failure,)), _stop_children(state.roster, state.generation)


def _standby_broke(state: Gathering | Running | Failing, event: ChildBroke, now_s: float) -> Step:
    """Forget what a standby offered: it fails nobody, and cannot begin before the next round."""
    return replace(state, roster=_with_offer(state.roster, event.agent_id, None)), []


def _gathering_expired(state: Gathering, event: DeadlinePassed, now_s: float) -> Step:
    roster = state.roster
    total, missing = len(roster.spec.nodes), roster.missing()
    timeout_s = roster.spec.settings.reservation_timeout_s
    problem = ReservationTimeoutError(
        f"{total - len(missing)} of {total} nodes came up within {timeout_s:g} s; missing: "
        f"{', '.join(missing) or 'none, but not all children started'}. Their Spark tasks are "
        "waiting for a free slot or cannot reach the driver; see the Spark UI, free slots or ask "
        "for fewer nodes, or raise reservation_timeout"
    )
    return Failed(roster, (), problem), _stop_children(roster, state.generation)


def _launch_broke(state: Gathering, event: LaunchBroke, now_s: float) -> Step:
    return Failed(state.roster, (), event.problem), _stop_children(state.roster, state.generation)


def _running_entered(state: Running, event: ChildEntered, now_s: float) -> Step:
    node_id = state.roster.node_of(event.agent_id)
    if node_id is None or event.message.generation != state.world.generation:
        return state, []
    return replace(state, in_map_fun=state.in_map_fun | {node_id}), []


def _running_returned(state: Running, event: ChildGaveResult, now_s: float) -> Step:
    node_id = state.roster.node_of(event.agent_id)
    if node_id is None or event.message.generation != state.world.generation:
        return state, []
    returned = {**state.returned, node_id: event.message}
    finishing = {n.node_id for n in state.roster.spec.nodes if n.role.finishes_job}
    if not finishing <= set(returned):
        return replace(state, returned=returned), []
    helpers = [
        Send(agent.hello.agent_id, StopChild(state.world.generation))
        for node, agent in state.roster.agents.items()
        if node not in returned
    ]
    report = Report(f"All {len(finishing)} training nodes have returned")
    return Finished(state.roster, state.world, returned), [report, *helpers]


def _running_broke(state: Running, event: ChildBroke, now_s: float) -> Step:
    if event.message.generation != state.world.generation:
        return state, []
    if state.roster.node_of(event.agent_id) is None:
        return _standby_broke(state, event, now_s)
    return Failing(
        state.roster, state.world, state.returned, (event.message.failure,), now_s + SETTLE_S
    ), []


def _running_left(state: Running, event: AgentLeft, now_s: float) -> Step:
    node_id = state.roster.node_of(event.agent_id)
    roster = _unseat(state.roster, event.agent_id)
    if node_id is None:
        return replace(state, roster=roster), []
    failure = _lost(state.roster, state.world, node_id, event)
    return Failing(roster, state.world, state.returned, (failure,), now_s + SETTLE_S), []


def _failing_broke(state: Failing, event: ChildBroke, now_s: float) -> Step:
    if event.message.generation != state.world.generation:
        return state, []
    if state.roster.node_of(event.agent_id) is None:
        return _standby_broke(state, event, now_s)
    return replace(state, failures=(*state.failures, event.message.failure)), []


def _failing_left(state: Failing, event: AgentLeft, now_s: float) -> Step:
    node_id = state.roster.node_of(event.agent_id)
    roster = _unseat(state.roster, event.agent_id)
    if node_id is None or any(failure.node_id == node_id for failure in state.failures):
        return replace(state, roster=roster), []
    failure = _lost(state.roster, state.world, node_id, event)
    return replace(state, roster=roster, failures=(*state.failures, failure)), []


def _failing_returned(state: Failing, event: ChildGaveResult, now_s: float) -> Step:
    node_id = state.roster.node_of(event.agent_id)
    if node_id is None or event.message.generation != state.world.generation:
        return state, []
    return replace(state, returned={**state.returned, node_id: event.message}), []


def _failing_settled(state: Failing, event: DeadlinePassed, now_s: float) -> Step:
    roster = state.roster
    decision = decide(state.failures, roster.port_retries, roster.spec.settings)
    if isinstance(decision, Retry):
        generation = state.world.generation + 1
        gathering = Gathering(
            replace(roster, port_retries=roster.port_retries + 1),
            generation,
            now_s + roster.spec.settings.reservation_timeout_s,
        )
        return gathering, [Report(decision.reason), *_to_all(roster, NewRound(generation), True)]
    failed = Failed(roster, state.failures, None, state.returned, state.world)
    return failed, _stop_children(roster, state.world.generation)


def _checkpoint_made(
    state: Running | Failing | Finished, event: CheckpointMade, now_s: float
) -> Step:
    if event.ref.generation != state.world.generation:
        return state, []
    return replace(state, roster=replace(state.roster, checkpoint=event.ref)), []


def _ending_joined(state: Failed | Finished, event: AgentJoined, now_s: float) -> Step:
    """A late agent, such as a retried task's, has nothing to do here."""
    return state, [Send(event.hello.agent_id, Stop(0.0))]


def _roster_joined(state: Running | Failing, event: AgentJoined, now_s: float) -> Step:
    return replace(state, roster=_seat(state.roster, Agent(event.hello))), []


def _roster_offered(state: Running | Failing, event: AgentOffered, now_s: float) -> Step:
    return replace(state, roster=_with_offer(state.roster, event.agent_id, event.offer)), []


def _roster_left(state: Failed | Finished, event: AgentLeft, now_s: float) -> Step:
    return replace(state, roster=_unseat(state.roster, event.agent_id)), []


def _stop(state: Any, event: StopAsked, now_s: float) -> Step:
    roster = state.roster
    if not roster.agents and not roster.standbys:
        return Stopped(state), []
    stopping = Stopping(roster, state, now_s + event.timeout_s)
    return stopping, _to_all(roster, Stop(event.grace_s), standbys=True)


def _stopping_joined(state: Stopping, event: AgentJoined, now_s: float) -> Step:
    roster = _seat(state.roster, Agent(event.hello))
    return replace(state, roster=roster), [Send(event.hello.agent_id, Stop(0.0))]


def _stopping_left(state: Stopping, event: AgentLeft, now_s: float) -> Step:
    roster = _unseat(state.roster, event.agent_id)
    if roster.agents or roster.standbys:
        return replace(state, roster=roster), []
    return Stopped(state.before), []


def _stopping_expired(state: Stopping, event: DeadlinePassed, now_s: float) -> Step:
    nodes = state.roster.spec.nodes
    return Stopped(state.before, tuple(nodes[n].name for n in state.roster.agents)), []


def _stop_children(roster: Roster, generation: int) -> list[Action]:
    return _to_all(roster, StopChild(generation), standbys=True)


def _lost(roster: Roster, world: World, node_id: int, event: AgentLeft) -> Failure:
    member, hello = world.member(node_id), roster.agents[node_id].hello
    return Failure(
        node=member.node.name,
        kind="lost",
        message=event.reason,
        time_s=event.wall_s,
        node_id=node_id,
        rank=member.rank,
        host=hello.host,
        pid=hello.pid,
        generation=world.generation,
    )


TRANSITIONS: dict[tuple[type, type], Callable[[Any, Any, float], Step]] = {
    (Gathering, AgentJoined): _gathering_joined,
    (Gathering, AgentLeft): _gathering_left,
    (Gathering, AgentOffered): _gathering_offered,
    (Gathering, ChildBroke): _gathering_broke,
    (Gathering, ChildEntered): _stay,
    (Gathering, ChildGaveResult): _stay,
    (Gathering, CheckpointMade): _stay,
    (Gathering, DeadlinePassed): _gathering_expired,
    (Gathering, LaunchBroke): _launch_broke,
    (Gathering, StopAsked): _stop,
    (Running, AgentJoined): _roster_joined,
    (Running, AgentLeft): _running_left,
    (Running, AgentOffered): _roster_offered,
    (Running, ChildEntered): _running_entered,
    (Running, ChildGaveResult): _running_returned,
    (Running, ChildBroke): _running_broke,
    (Running, CheckpointMade): _checkpoint_made,
    (Running, LaunchBroke): _stay,
    (Running, StopAsked): _stop,
    (Failing, AgentJoined): _roster_joined,
    (Failing, AgentLeft): _failing_left,
    (Failing, AgentOffered): _roster_offered,
    (Failing, ChildEntered): _stay,
    (Failing, ChildGaveResult): _failing_returned,
    (Failing, ChildBroke): _failing_broke,
    (Failing, CheckpointMade): _checkpoint_made,
    (Failing, DeadlinePassed): _failing_settled,
    (Failing, LaunchBroke): _stay,
    (Failing, StopAsked): _stop,
    (Finished, AgentJoined): _ending_joined,
    (Finished, AgentLeft): _roster_left,
    (Finished, AgentOffered): _stay,
    (Finished, ChildEntered): _stay,
    (Finished, ChildGaveResult): _stay,
    (Finished, ChildBroke): _stay,
    (Finished, CheckpointMade): _checkpoint_made,
    (Finished, LaunchBroke): _stay,
    (Finished, StopAsked): _stop,
    (Failed, AgentJoined): _ending_joined,
    (Failed, AgentLeft): _roster_left,
    (Failed, AgentOffered): _stay,
    (Failed, ChildEntered): _stay,
    (Failed, ChildGaveResult): _stay,
    (Failed, ChildBroke): _stay,
    (Failed, CheckpointMade): _stay,
    (Failed, LaunchBroke): _stay,
    (Failed, StopAsked): _stop,
    (Stopping, AgentJoined): _stopping_joined,
    (Stopping, AgentLeft): _stopping_left,
    (Stopping, AgentOffered): _stay,
    (Stopping, ChildEntered): _stay,
    (Stopping, ChildGaveResult): _stay,
    (Stopping, ChildBroke): _stay,
    (Stopping, CheckpointMade): _stay,
    (Stopping, DeadlinePassed): _stopping_expired,
    (Stopping, LaunchBroke): _stay,
    (Stopping, StopAsked): _stay,
    (Stopped, AgentJoined): _ending_joined,
    (Stopped, AgentLeft): _stay,
    (Stopped, AgentOffered): _stay,
    (Stopped, ChildEntered): _stay,
    (Stopped, ChildGaveResult): _stay,
    (Stopped, ChildBroke): _stay,
    (Stopped, CheckpointMade): _stay,
    (Stopped, LaunchBroke): _stay,
    (Stopped, StopAsked): _stay,
}
"""Every legal pair of state and event; `_stay`: the event is expected and means nothing."""
