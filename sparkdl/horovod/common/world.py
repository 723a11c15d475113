"""The place of this process among all that train, between `hvd.init()` and `hvd.shutdown()`.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkdl.collectives.base import Group
from sparkdl.collectives.group import connect
from sparkdl.core.errors import ConfigError
from sparkdl.core.settings import visible_gpus
from sparkdl.core.world import Member
from sparkdl.horovod.common.exceptions import NotInitializedError

if TYPE_CHECKING:
    from sparkdl.node.context import NodeContext

OPERATION_TIMEOUT_S = 1800.0
"""Until a collective that not all processes have called is an error; as in torch.distributed."""


@dataclass
class Place:
    """Where this process is, and its groups.

    Attributes:
        hosts: of all processes, by rank.
        groups: by the id of the process set; `None` for sets without this process.
        ranks: of the process sets, by their ids.
    """

    rank: int
    hosts: tuple[str, ...]
    world: Group
    groups: dict[int, Group | None] = field(default_factory=dict)
    ranks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    next_id: int = 1

    def __post_init__(self) -> None:
        self.groups[0] = self.world
        self.ranks[0] = tuple(range(self.size))

    @property
    def size(self) -> int:
        """How many processes train."""
        return len(self.hosts)

    @property
    def on_host(self) -> list[int]:
        """The ranks on this process's host."""
        return [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]

    @property
    def local_rank(self) -> int:
        """The order of this process among those on its host."""
        return self.on_host.index(self.rank)

    @property
    def across(self) -> list[int]:
        """The ranks with this process's local rank, one on each host that has so many."""
        found = []
        for host in dict.fromkeys(self.hosts):
            there = [rank for rank, other in enumerate(self.hosts) if other == host]
            found += there[self.local_rank : self.local_rank + 1]
        return found

    def close(self) -> None:
        """Let all connections go."""
        for group in self.groups.values():
            if group is not None:
                group.close()
        self.groups.clear()


@dataclass
class _Process:
    place: Place | None = None


_PROCESS = _Process()


def place() -> Place:
    """Return this process's place.

    Raises:
        NotInitializedError: before `hvd.init()`; a ValueError, as in Horovod.
    """
    if _PROCESS.place is None:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    return _PROCESS.place


def has_place() -> bool:
    """Whether `enter` has been called, and `leave` has not."""
    return _PROCESS.place is not None


def enter(transport: str | None = None) -> Place:
    """Find the other processes and connect with them; alone outside of a node.

    Raises:
        ConfigError: on a node that does not train.
        CollectiveError: if the processes do not reach each other.
    """
    from sparkdl.node.context import current

    ctx = current()
    if ctx is None:
        place = Place(0, ("localhost",), connect(0, 1, lambda value: [value], "", 1.0))
    elif not ctx.member.role.is_trainer:
        raise ConfigError(
            f"{ctx.member.node.name} does not train: call hvd.init() on chief and workers"
        )
    else:
        trainers: Sequence[Member] = ctx.world.trainers
        host, timeout_s = ctx.member.host, OPERATION_TIMEOUT_S
        world = connect(ctx.rank, len(trainers), ctx.all_gather, host, timeout_s, transport)
        place = Place(ctx.rank, _hosts(ctx), world)
    _PROCESS.place = place
    return place


def _hosts(ctx: NodeContext) -> tuple[str, ...]:
    """Return what processes are local to, by rank.

    A node that has GPUs of its own is a host by itself: so a local rank is always the number of a
    GPU that the process sees, as `LOCAL_RANK` is with `framework="torch"`.
    """
    host = ctx.member.host
    on_host = sum(trainer.host == host for trainer in ctx.world.trainers)
    has_own = 0 < len(visible_gpus() or ()) < on_host
    return tuple(ctx.all_gather(f"{host} rank {ctx.rank}" if has_own else host))


def report_step(step: int) -> None:
    """Tell the driver how far the training is, as `ctx.report` does; nothing outside of nodes."""
    from sparkdl.node.context import current

    ctx = current()
    if ctx is not None:
        ctx.report(step)


def leave() -> None:
    """Close all groups."""
    place, _PROCESS.place = _PROCESS.place, None
    if place is not None:
        place.close()
