"""Which agents are connected, and what survives the rounds of children. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sparkdl.control.messages import Hello, Offer
from sparkdl.core.spec import ClusterSpec, NodeSpec
from sparkdl.core.world import Address, CheckpointRef, Resume, World, build_world
from sparkdl.driver.lifecycle.policy import History


@dataclass(frozen=True)
class Agent:
    """A connected agent, its offer of a child, and whether it is detached."""

    hello: Hello
    offer: Offer | None = None
    is_detached: bool = False

    @property
    def agent_id(self) -> str:
        """Which connection this is."""
        return self.hello.agent_id

    @property
    def holds_slot(self) -> bool:
        """Whether a task of Spark stays with it."""
        return self.hello.owner == "task" and not self.is_detached

    def address(self, generation: int) -> Address | None:
        """Return where its child of this generation can be reached, if it has offered one."""
        if self.offer is None or self.offer.generation != generation:
            return None
        return Address(self.hello.host, self.offer.port, self.hello.data_address)


@dataclass(frozen=True)
class Roster:
    """The connected agents: one per node id, and standbys that wait for a node to be lost.

    Attributes:
        history: of the rounds so far.
        checkpoint: the last one that is complete.
        draining: Spark's ids of executors that it decommissions.
        drain_notices: how often the nodes were asked for a checkpoint for their sake.
    """

    spec: ClusterSpec
    agents: Mapping[int, Agent] = field(default_factory=dict)
    standbys: tuple[Agent, ...] = ()
    history: History = field(default_factory=History)
    checkpoint: CheckpointRef | None = None
    draining: frozenset[str] = frozenset()
    drain_notices: int = 0

    @property
    def resume(self) -> Resume:
        """Where the next world resumes."""
        return Resume(len(self.history.restarts_s), self.checkpoint)

    def node_of(self, agent_id: str) -> int | None:
        """Return the node that this agent is, or `None` for a standby or a stranger."""
        return next((n for n, agent in self.agents.items() if agent.agent_id == agent_id), None)

    def drains(self, agent: Agent) -> bool:
        """Whether the agent's executor is about to end."""
        return agent.hello.executor in self.draining

    def missing(self) -> tuple[NodeSpec, ...]:
        """Return the nodes without an agent."""
        return tuple(node for node in self.spec.nodes if node.node_id not in self.agents)

    @property
    def is_anybody_there(self) -> bool:
        """Whether there are agents."""
        return bool(self.agents or self.standbys)

    def wanted(self) -> tuple[NodeSpec, ...]:
        """Return the missing nodes to bring back, needed ones first."""
        return tuple(sorted(self.missing(), key=lambda node: node.role.is_expendable))

    def detached(self, agent_id: str) -> Roster:
        """Note that an agent has let go of its task."""
        node_id = self.node_of(agent_id)
        if node_id is None:
            return self
        agent = replace(self.agents[node_id], is_detached=True)
        return replace(self, agents={**self.agents, node_id: agent})

    def seated(self, agent: Agent) -> Roster:
        """Give the agent its node, or make it a standby if the node has a living agent."""
        node_id = agent.hello.node_id
        if node_id in self.agents or not 0 <= node_id < len(self.spec.nodes):
            return replace(self, standbys=(*self.standbys, agent))
        return replace(self, agents={**self.agents, node_id: agent})

    def without(self, agent_id: str) -> Roster:
        """Remove an agent; a standby for the same node takes its seat."""
        node_id = self.node_of(agent_id)
        if node_id is None:
            standbys = tuple(a for a in self.standbys if a.agent_id != agent_id)
            return replace(self, standbys=standbys)
        # The standby exists for this case: another attempt of the same task, or the agent to which
        # a node on a draining executor moves.
        successor = next((a for a in self.standbys if a.hello.node_id == node_id), None)
        standbys = tuple(a for a in self.standbys if a is not successor)
        agents = dict(self.agents)
        if successor is None:
            del agents[node_id]
        else:
            agents[node_id] = successor
        return replace(self, agents=agents, standbys=standbys)

    def offering(self, agent_id: str, offer: Offer | None) -> Roster:
        """Note what an agent offers."""
        node_id = self.node_of(agent_id)
        if node_id is not None:
            agent = replace(self.agents[node_id], offer=offer)
            return replace(self, agents={**self.agents, node_id: agent})
        standbys = (
            replace(agent, offer=offer) if agent.agent_id == agent_id else agent
            for agent in self.standbys
        )
        return replace(self, standbys=tuple(standbys))

    def world(self, generation: int, may_be_small: bool = False) -> World | None:
        """Return the world of the nodes that have offered a child of `generation`.

        Args:
            may_be_small: whether `min_nodes` are enough. A chief and parameter servers cannot be
                done without, and one node has to train.

        Returns:
            `None` if a node is missing.
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
