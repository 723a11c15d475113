"""The live nodes of a cluster, in order, with addresses, and the checkpoint they resume from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from sparkdl.core.spec import NodeSpec, Role


@dataclass(frozen=True)
class Member:
    """A node in a world.

    Attributes:
        rank: order in the world: trainers first, the chief before the workers.
        host: the address under which the other nodes reach it.
        port: reserved for the framework's own traffic.
        data_address: where its agent receives rows, an Arrow Flight URI.
        local_rank: order among the members with the same host.
        index: among the members of the role; less than the node's own where nodes are missing.
    """

    rank: int
    node: NodeSpec
    host: str
    port: int
    data_address: str
    local_rank: int = 0
    index: int = 0

    @property
    def address(self) -> str:
        return host_port(self.host, self.port)

    @property
    def role(self) -> Role:
        return self.node.role


@dataclass(frozen=True)
class World:
    """All members by rank. `generation` counts the worlds of one cluster from 0."""

    generation: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    def member(self, node_id: int) -> Member:
        return self._by_node[node_id]

    def has(self, node_id: int) -> bool:
        return node_id in self._by_node

    @cached_property
    def finishing(self) -> frozenset[int]:
        """The nodes, by id, whose return from `map_fun` ends the job."""
        return frozenset(m.node.node_id for m in self.members if m.role.finishes_job)

    @cached_property
    def _by_node(self) -> dict[int, Member]:
        return {member.node.node_id: member for member in self.members}

    def cluster_spec(self) -> dict[str, list[str]]:
        """Return TensorFlow's cluster spec: `{job: ["host:port", …]}`, by index."""
        by_node = sorted(self.members, key=lambda member: member.node.node_id)
        spec: dict[str, list[str]] = {}
        for member in by_node:
            spec.setdefault(member.role.name, []).append(member.address)
        return spec

    @property
    def trainers(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role.is_trainer)

    @property
    def fed(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role.is_fed)


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    data_address: str


@dataclass(frozen=True)
class CheckpointRef:
    url: str
    step: int
    generation: int = 0

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Resume:
    restarts: int = 0
    checkpoint: CheckpointRef | None = None


FIRST_TIME = Resume()
"""Where a cluster begins that has no past."""


def build_world(generation: int, nodes: dict[NodeSpec, Address]) -> World:
    """Order nodes into a world: chief, workers, then ps and evaluator, each by index."""

    def order(node: NodeSpec) -> tuple[bool, bool, int]:
        # False comes before True, so that trainers are first and the chief is first of all.
        return (not node.role.is_trainer, not node.role.is_chief, node.node_id)

    members: list[Member] = []
    on_host: Counter[str] = Counter()
    of_role: Counter[str] = Counter()
    for rank, node in enumerate(sorted(nodes, key=order)):
        where = nodes[node]
        member = Member(
            *(rank, node, where.host, where.port, where.data_address),
            local_rank=on_host[where.host],
            index=of_role[node.role.name],
        )
        members.append(member)
        on_host[where.host] += 1
        of_role[node.role.name] += 1
    return World(generation, tuple(members))


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
