"""The agents and states of a cluster, its events, and the actions that they lead to. Pure.

The transitions are in `driver/lifecycle/transitions.py`. The functions at the end of this file
interpret a state for callers that wait for the cluster's end, or feed it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from sparkdl.control.messages import (
    ChildFailed,
    ChildReady,
    ChildReturned,
    ChildRunning,
    Hello,
    ToAgent,
)
from sparkdl.core.errors import FeedClosedError, SparkdlError, node_error
from sparkdl.core.failure import Failure, FailureKind
from sparkdl.core.spec import ClusterSpec, NodeSpec
from sparkdl.core.world import Address, CheckpointRef, Resume, World, build_world
from sparkdl.driver.lifecycle.policy import History


@dataclass(frozen=True)
class Agent:
    hello: Hello
    child: ChildReady | None = None
    is_detached: bool = False

    @property
    def agent_id(self) -> str:
        return self.hello.agent_id

    @property
    def holds_slot(self) -> bool:
        """Whether a task of Spark stays with it."""
        return self.hello.owner == "task" and not self.is_detached

    def address(self, generation: int) -> Address | None:
        """Return where its child of this generation can be reached, if it is ready."""
        if self.child is None or self.child.generation != generation:
            return None
        return Address(self.hello.host, self.child.port, self.hello.data_address)


@dataclass(frozen=True)
class AgentRegistry:
    """The connected agents: one per node id, and standbys that wait for a node to be lost.

    Attributes:
        history: of the rounds so far.
        checkpoint: the last one that is complete.
    """

    spec: ClusterSpec
    agents: Mapping[int, Agent] = field(default_factory=dict)
    standbys: tuple[Agent, ...] = ()
    history: History = field(default_factory=History)
    checkpoint: CheckpointRef | None = None

    @property
    def resume(self) -> Resume:
        return Resume(len(self.history.restarts_s), self.checkpoint)

    def node_of(self, agent_id: str) -> int | None:
        """Return the node that this agent is, or `None` for a standby or a stranger."""
        return next((n for n, agent in self.agents.items() if agent.agent_id == agent_id), None)

    def missing(self) -> tuple[NodeSpec, ...]:
        return tuple(node for node in self.spec.nodes if node.node_id not in self.agents)

    @property
    def has_agents(self) -> bool:
        return bool(self.agents or self.standbys)

    def wanted(self) -> tuple[NodeSpec, ...]:
        return tuple(sorted(self.missing(), key=lambda node: node.role.is_expendable))

    def detached(self, agent_id: str) -> AgentRegistry:
        node_id = self.node_of(agent_id)
        if node_id is None:
            return self
        agent = replace(self.agents[node_id], is_detached=True)
        return replace(self, agents={**self.agents, node_id: agent})

    def with_agent(self, agent: Agent) -> AgentRegistry:
        """Give the agent its node, or make it a standby if the node has a living agent."""
        node_id = agent.hello.node_id
        if node_id in self.agents or not 0 <= node_id < len(self.spec.nodes):
            return replace(self, standbys=(*self.standbys, agent))
        return replace(self, agents={**self.agents, node_id: agent})

    def without_agent(self, agent_id: str) -> AgentRegistry:
        """Remove an agent; a standby for the same node takes its node."""
        node_id = self.node_of(agent_id)
        if node_id is None:
            standbys = tuple(a for a in self.standbys if a.agent_id != agent_id)
            return replace(self, standbys=standbys)
        # The standby exists for this case: another attempt of the same task.
        successor = next((a for a in self.standbys if a.hello.node_id == node_id), None)
        standbys = tuple(a for a in self.standbys if a is not successor)
        agents = dict(self.agents)
        if successor is None:
            del agents[node_id]
        else:
            agents[node_id] = successor
        return replace(self, agents=agents, standbys=standbys)

    def with_child(self, agent_id: str, child: ChildReady | None) -> AgentRegistry:
        node_id = self.node_of(agent_id)
        if node_id is not None:
            agent = replace(self.agents[node_id], child=child)
            return replace(self, agents={**self.agents, node_id: agent})
        standbys = (
            replace(agent, child=child) if agent.agent_id == agent_id else agent
            for agent in self.standbys
        )
        return replace(self, standbys=tuple(standbys))

    def world(self, generation: int, may_be_small: bool = False) -> World | None:
        """Return the world of the nodes with a ready child of `generation`.

        Args:
            may_be_small: whether `min_nodes` are enough. A chief and parameter servers cannot be
                done without, and one node has to train.
        """
        addresses: dict[NodeSpec, Address] = {}
        for node in self.spec.nodes:
            agent = self.agents.get(node.node_id)
            address = agent.address(generation) if agent else None
            if address is not None:
                addresses[node] = address
            elif not (may_be_small and node.role.is_expendable):
                return None
        needed = sum(node.role.is_needed for node in self.spec.nodes)
        if len(addresses) < (self.spec.settings.recovery.min_nodes or needed):
            return None
        # Otherwise no node of this world would train, and none would end it.
        if not any(node.role.finishes_job for node in addresses):
            return None
        return build_world(generation, addresses)


@dataclass(frozen=True)
class Gathering:
    """Waiting until every node has an agent with a ready child for `generation`.

    Attributes:
        failures: what this round is to make good; without any it is the first, or has new ports,
            or more nodes.
        reason: why there is another round.
        world: the one before.
        is_growth: whether it begins as soon as all who are there are ready.
        problem: why the last attempt to bring nodes back has failed.
    """

    registry: AgentRegistry
    generation: int
    deadline_s: float
    failures: tuple[Failure, ...] = ()
    reason: str = ""
    world: World | None = None
    is_growth: bool = False
    problem: SparkdlError | None = None


@dataclass(frozen=True)
class Running:
    """The world has begun.

    Attributes:
        returned: the nodes whose `map_fun` has returned.
        left: failed nodes without which the training continues.
    """

    registry: AgentRegistry
    world: World
    in_map_fun: frozenset[int] = frozenset()
    returned: Mapping[int, ChildReturned] = field(default_factory=dict)
    left: frozenset[int] = frozenset()
    deadline_s: float = math.inf


@dataclass(frozen=True)
class Failing:
    """Something failed a moment ago; other failures are awaited until `deadline_s`."""

    registry: AgentRegistry
    world: World
    returned: Mapping[int, ChildReturned]
    failures: tuple[Failure, ...]
    deadline_s: float


@dataclass(frozen=True)
class Finished:
    """Every node that finishes the job has returned. Agents stay until `deadline_s`, then go."""

    registry: AgentRegistry
    world: World
    returned: Mapping[int, ChildReturned]
    deadline_s: float = math.inf


@dataclass(frozen=True)
class Failed:
    """The cluster has failed. Agents stay until `deadline_s`, then go."""

    registry: AgentRegistry
    failures: tuple[Failure, ...]
    problem: SparkdlError | None = None
    returned: Mapping[int, ChildReturned] = field(default_factory=dict)
    world: World | None = None
    note: str = ""
    deadline_s: float = math.inf


@dataclass(frozen=True)
class Stopping:
    """Agents have been asked to stop; `before` is the state in which the stop came."""

    registry: AgentRegistry
    before: Any
    deadline_s: float


@dataclass(frozen=True)
class Stopped:
    """The end. `left_behind` names nodes whose agents did not go in time."""

    before: Any
    left_behind: tuple[str, ...] = ()
    deadline_s: float = math.inf


WithAgents = Gathering | Running | Failing | Finished | Failed | Stopping
State = WithAgents | Stopped


@dataclass(frozen=True)
class AgentJoined:
    hello: Hello


@dataclass(frozen=True)
class AgentLeft:
    agent_id: str
    reason: str
    wall_s: float = 0.0


@dataclass(frozen=True)
class AgentReady:
    """An agent has a child coming up and a port held."""

    agent_id: str
    child: ChildReady


@dataclass(frozen=True)
class AgentDetached:
    """An agent has let go of its Spark task."""

    agent_id: str


@dataclass(frozen=True)
class ChildEntered:
    agent_id: str
    message: ChildRunning


@dataclass(frozen=True)
class ResultReported:
    agent_id: str
    message: ChildReturned


@dataclass(frozen=True)
class FailureReported:
    agent_id: str
    message: ChildFailed


@dataclass(frozen=True)
class NodesBlamed:
    """The hang watch has declared nodes of world `generation` failed."""

    generation: int
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class CheckpointCompleted:
    ref: CheckpointRef


@dataclass(frozen=True)
class LaunchFailed:
    """The job or process that starts nodes has failed: no more agents will come from it."""

    problem: SparkdlError


@dataclass(frozen=True)
class DeadlinePassed:
    """The state's deadline has passed."""


@dataclass(frozen=True)
class StopRequested:
    """The user wants the end: children get `grace_s`, agents `timeout_s`."""

    grace_s: float
    timeout_s: float


Event = (
    AgentJoined
    | AgentLeft
    | AgentReady
    | AgentDetached
    | ChildEntered
    | ResultReported
    | FailureReported
    | NodesBlamed
    | CheckpointCompleted
    | LaunchFailed
    | DeadlinePassed
    | StopRequested
)


@dataclass(frozen=True)
class Send:
    agent_id: str
    message: ToAgent


@dataclass(frozen=True)
class Report:
    text: str


@dataclass(frozen=True)
class Warn:
    text: str


@dataclass(frozen=True)
class Relaunch:
    """Bring new agents for these nodes, unless some are on their way."""

    nodes: tuple[NodeSpec, ...]


@dataclass(frozen=True)
class Release:
    """Release the nodes' jobs and slots: no agent is left."""


@dataclass(frozen=True)
class ForgetTask:
    """Note that the task of this node has ended in order: Spark will not repeat it."""

    node: NodeSpec


Action = Send | Report | Warn | Relaunch | Release | ForgetTask
S = TypeVar("S", bound=State)
R = TypeVar("R", bound=WithAgents)
Step = tuple[S, list[Action]]
"""The return type of handlers: `Step[Running | Failing]` if the next state is one of these."""


def status_of(state: Any) -> str:
    history = getattr(getattr(before_stop(state), "registry", None), "history", None)
    if history is None or history.cause is None:
        return type(state).__name__
    number, cause = len(history.restarts_s), history.cause.headline().splitlines()[0]
    return f"{type(state).__name__} (restart {number} because {cause})"


def left_of(state: Any) -> frozenset[int]:
    return state.left if isinstance(state, Running) else frozenset()


def has_ended(state: Any) -> bool:
    """Whether no `map_fun` is waited for any more."""
    return isinstance(state, (Finished, Failed, Stopping, Stopped))


def is_empty(state: Any) -> bool:
    """Whether the cluster has ended, by itself or not, and its agents with it."""
    is_over = isinstance(state, (Finished, Failed))
    return isinstance(state, Stopped) or (is_over and not state.registry.has_agents)


def before_stop(state: Any) -> Any:
    """Return the state in which the stop came; the state itself if none came."""
    # Stopped holds a state from before the stop, or the Stopping that it followed.
    while isinstance(state, (Stopping, Stopped)):
        state = state.before
    return state


def generation_of(state: Any) -> int | None:
    """Return the number of the world that is or is about to be; `None` after the end."""
    if isinstance(state, Gathering):
        return state.generation
    return state.world.generation if isinstance(state, (Running, Failing, Finished)) else None


def agents_of(state: Any) -> Mapping[int, Agent]:
    registry: AgentRegistry | None = getattr(state, "registry", None)
    return registry.agents if registry else {}


def node_failure(
    state: Running | Failing, node_id: int, kind: FailureKind, message: str, time_s: float
) -> Failure:
    member, agent = state.world.member(node_id), state.registry.agents.get(node_id)
    return Failure(
        node=member.node.name,
        kind=kind,
        message=message,
        time_s=time_s,
        node_id=node_id,
        rank=member.rank,
        host=member.host,
        pid=agent.hello.pid if agent else 0,
        generation=state.world.generation,
    )


def failure_of(state: Any) -> SparkdlError | None:
    """Return the error of a cluster that has failed, whether it has been stopped since or not."""
    last = before_stop(state)
    if isinstance(last, Failed):
        return node_error(last.failures, last.note) if last.failures else last.problem
    if last is not state and isinstance(last, Failing):  # and nothing will be decided any more
        return node_error(last.failures)
    if last is not state and isinstance(last, Gathering) and last.failures:
        return node_error(last.failures, "the cluster was stopped before all nodes had restarted")
    return None


def feed_problem_of(state: Any) -> SparkdlError | None:
    problem = failure_of(state)
    if problem is None and isinstance(state, (Stopping, Stopped)):
        return FeedClosedError("the cluster was shut down while it was being fed")
    return problem
