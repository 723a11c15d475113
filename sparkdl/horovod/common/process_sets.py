"""The processes that train, as `hvd.init()` has found them, and process sets: some of them.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/common/process_sets.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.collectives.group import Group, connect
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


_PLACE: list[Place] = []
"""This process's place, at most one: between `hvd.init()` and `hvd.shutdown()`."""


def place() -> Place:
    """Return this process's place.

    Raises:
        NotInitializedError: before `hvd.init()`; a ValueError, as in Horovod.
    """
    if not _PLACE:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    return _PLACE[0]


def has_place() -> bool:
    """Whether `enter` has been called, and `leave` has not."""
    return bool(_PLACE)


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
    _PLACE[:] = [place]
    global_process_set.ranks = list(range(place.size))
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
    """Report the step to the driver, as `ctx.report` does; outside of nodes do nothing."""
    from sparkdl.node.context import current

    ctx = current()
    if ctx is not None:
        ctx.report(step)


def leave() -> None:
    """Close all groups."""
    while _PLACE:
        _PLACE.pop().close()
    global_process_set.ranks = []


class ProcessSet:
    """Some of the processes; give it to `hvd.init` or `hvd.add_process_set`, then to operations.

    Until it has been added, and after it was removed, its methods raise `NotInitializedError`.

    Args:
        ranks_or_comm: ranks in the world. There is no MPI, and so no communicator.

    Attributes:
        process_set_id: 0 for all processes; `None` until it is added.
        ranks: in ascending order; `None` when it has been removed.

    Raises:
        ConfigError: if they are not whole numbers.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None

    def __init__(self, ranks_or_comm: Any) -> None:
        if not isinstance(ranks_or_comm, (list, tuple, range, set, frozenset)) or any(
            not isinstance(rank, int) for rank in ranks_or_comm
        ):
            raise ConfigError(f"ProcessSet({ranks_or_comm!r}): give a list of ranks")
        self.ranks = sorted(ranks_or_comm)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def size(self) -> int:
        """Return how many processes are in it."""
        return len(self._known())

    def rank(self) -> int:
        """Return the order of this process in it, or -1 if it is not in it."""
        ranks, mine = self._known(), place().rank
        return ranks.index(mine) if mine in ranks else -1

    def included(self) -> bool:
        """Whether this process is in it."""
        return place().rank in self._known()

    def _known(self) -> tuple[int, ...]:
        ranks = place().ranks
        if self.process_set_id is None or self.process_set_id not in ranks:
            raise _unknown(self)
        return ranks[self.process_set_id]


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set; all processes call it with the same ranks, also those not in the set.

    Returns:
        The set, with its id; that of an equal one that is known already.

    Raises:
        ConfigError: if its ranks are not the world's.
        NotInitializedError: before `hvd.init()`.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    here = place()
    ranks = tuple(here.world.members(process_set.ranks or ()))
    for number, known in here.ranks.items():
        if known == ranks:
            process_set.process_set_id = number
            return process_set
    number = here.next_id
    here.next_id += 1
    here.groups[number] = here.world.subgroup(ranks)
    here.ranks[number] = ranks
    process_set.process_set_id, process_set.ranks = number, list(ranks)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set and close its connections; all processes call it.

    Returns:
        Whether it was known; False as well for the set of all processes, which stays.
    """
    here = place()
    number = process_set.process_set_id
    if not number or number not in here.ranks:
        return False
    del here.ranks[number]
    group = here.groups.pop(number)
    if group is not None:
        group.barrier()
        group.close()
    process_set.process_set_id, process_set.ranks = None, None
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of all process sets by their ids."""
    return {number: list(ranks) for number, ranks in place().ranks.items()}


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """Return a process set that is known.

    Raises:
        ConfigError: if there is none with this id.
    """
    if process_set_id == 0:
        return global_process_set
    ranks = place().ranks
    if process_set_id not in ranks:
        raise ConfigError(f"there is no process set with the id {process_set_id}")
    process_set = ProcessSet(ranks[process_set_id])
    process_set.process_set_id = process_set_id
    return process_set


def process_sets() -> list[ProcessSet]:
    """Return all process sets, by their ids."""
    return [process_set_by_id(number) for number in sorted(place().ranks)]


def group_of(process_set: ProcessSet | None = None) -> Group:
    """Return the group that reduces for a process set; of all processes by default.

    Raises:
        NotInitializedError: before `hvd.init()`, or if the set is not known.
        ConfigError: if this process is not in it.
    """
    here = place()
    number = 0 if process_set is None else process_set.process_set_id
    if number is None or number not in here.ranks:
        raise _unknown(process_set)
    group = here.groups[number]
    if group is None:
        raise ConfigError(
            f"rank {here.rank} is not in {process_set}: ask process_set.included() first"
        )
    return group


def _unknown(process_set: ProcessSet | None) -> NotInitializedError:
    return NotInitializedError(
        f"{process_set} is not known: give it to hvd.init(process_sets=...) or "
        "hvd.add_process_set, on all processes"
    )


def root_in(group: Group, root_rank: int) -> int:
    """Return the rank within a group of a rank of the world.

    Raises:
        ConfigError: if it is not in the group.
    """
    if root_rank not in group.ranks:
        raise ConfigError(f"root_rank={root_rank} is not in this process set: {list(group.ranks)}")
    return group.ranks.index(root_rank)
