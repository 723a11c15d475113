"""A world as columns: how it travels to the agents, which all get all of it.

Runs in: driver, agent

The bytes that the driver sends at the beginning of a world grow with the square of its size. As
JSON a member takes 340 bytes, which deflate to 25. In columns similar values are adjacent and
consecutive numbers become ones, so a member deflates to 8 bytes: 80 kB for each of 10,000 nodes,
nearly all of it port numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

import msgspec

from sparkdl.core.spec import NodeSpec, Role
from sparkdl.core.world import Member, World


class WorldColumns(msgspec.Struct, frozen=True):
    """The members by rank, one entry of each column for each.

    Attributes:
        roles: the distinct roles.
        role: the number of a member's role in `roles`.
        node_id: less the one before, as `node_index` and `index`.
        node_index: of the node in its role.
        data_address: split at the host's name wherever that occurs.
    """

    generation: int
    roles: tuple[Role, ...]
    role: tuple[int, ...]
    node_id: tuple[int, ...]
    node_index: tuple[int, ...]
    host: tuple[str, ...]
    port: tuple[int, ...]
    data_address: tuple[tuple[str, ...], ...]
    local_rank: tuple[int, ...]
    index: tuple[int, ...]

    @classmethod
    def of(cls, world: World) -> WorldColumns:
        """Return the columns of a world."""
        members = world.members
        roles = {role: number for number, role in enumerate(dict.fromkeys(m.role for m in members))}
        return cls(
            world.generation,
            tuple(roles),
            tuple(roles[m.role] for m in members),
            _steps(m.node.node_id for m in members),
            _steps(m.node.index for m in members),
            tuple(m.host for m in members),
            tuple(m.port for m in members),
            tuple(_parts(m) for m in members),
            tuple(m.local_rank for m in members),
            _steps(m.index for m in members),
        )

    def world(self) -> World:
        """Return the world.

        Raises:
            ValueError: if the columns are not of one length.
            IndexError: if there is no such role.
        """
        # `strict` refuses columns of different lengths, which only a damaged message has.
        rows = zip(
            *(self.role, accumulate(self.node_id), accumulate(self.node_index)),
            *(self.host, self.port, self.data_address, self.local_rank, accumulate(self.index)),
            strict=True,
        )
        members = (
            Member(
                rank,
                NodeSpec(node_id, self.roles[role], node_index),
                host,
                port,
                host.join(parts),
                local_rank,
                index,
            )
            for rank, (role, node_id, node_index, host, port, parts, local_rank, index) in (
                enumerate(rows)
            )
        )
        return World(self.generation, tuple(members))


def _parts(member: Member) -> tuple[str, ...]:
    address, host = member.data_address, member.host
    return tuple(address.split(host, 1)) if host else (address,)


def _steps(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(after - before for before, after in pairwise([0, *numbers]))
