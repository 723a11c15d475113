"""The processes that train, as `hvd.init()` has found them, and process sets: some of them.

https://github.com/horovod/horovod/blob/v0.28.1/horovod/common/process_sets.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

from sparkdl.collectives.group import Group, connect
from sparkdl.core.errors import CollectiveError, ConfigError
from sparkdl.core.settings import visible_gpus
from sparkdl.core.world import Member
from sparkdl.node.error_lines import MARK

if TYPE_CHECKING:
    from sparkdl.node.context import NodeContext

OPERATION_TIMEOUT_S = 1800.0
"""Until a collective that not all processes have called is an error; as in torch.distributed."""


HorovodInternalError = CollectiveError
"""A collective failed; Horovod's name. Inside `hvd.elastic.run` it leads to a restart."""


class NotInitializedError(ConfigError):
    """`hvd.init()` has not been called, or `hvd.shutdown()` has."""


@dataclass(frozen=True)
class HostPlacement:
    """This process's rank, and the hosts of all processes by rank."""

    rank: int
    hosts: tuple[str, ...]

    @classmethod
    def of(cls, ctx: NodeContext) -> HostPlacement:
        """Return this node's placement; all nodes that train call it.

        A node with GPUs of its own counts as a host. A local rank is thus always the number of a
        GPU that the process sees, like `LOCAL_RANK` with `framework="torch"`.
        """
        host = ctx.member.host
        on_host = sum(trainer.host == host for trainer in ctx.world.trainers)
        has_own = 0 < len(visible_gpus() or ()) < on_host
        # The rank makes a host of its own of each such node.
        hosts = ctx.all_gather(f"{host} rank {ctx.rank}" if has_own else host)
        return cls(ctx.rank, tuple(hosts))

    @property
    def on_host(self) -> list[int]:
        return [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]

    @property
    def local_rank(self) -> int:
        return self.on_host.index(self.rank)

    @property
    def across(self) -> list[int]:
        """The ranks with this process's local rank, one on each host that has so many."""
        found = []
        for host in dict.fromkeys(self.hosts):
            there = [rank for rank, other in enumerate(self.hosts) if other == host]
            found += there[self.local_rank : self.local_rank + 1]
        return found

    @property
    def variables(self) -> dict[str, str]:
        numbers = {
            "RANK": self.rank,
            "SIZE": len(self.hosts),
            "LOCAL_RANK": self.local_rank,
            "LOCAL_SIZE": len(self.on_host),
            "CROSS_RANK": self.across.index(self.rank),
            "CROSS_SIZE": len(self.across),
        }
        return {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}


@dataclass
class HorovodState:
    """This process's placement, and its process sets.

    Attributes:
        sets: ranks and group by the id of the set; the group is `None` for sets without this
            process.
        next_id: counted by processes outside of a set as well, so that ids are the same on all.
    """

    placement: HostPlacement
    sets: dict[int, tuple[tuple[int, ...], Group | None]]
    next_id: int = 1

    @property
    def world(self) -> Group:
        group = self.sets[0][1]
        assert group is not None, "all processes are in this one"
        return group

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def size(self) -> int:
        return len(self.placement.hosts)


_STATE: list[HorovodState] = []
"""This process's state, at most one: between `hvd.init()` and `hvd.shutdown()`."""


def horovod_state() -> HorovodState:
    """Return this process's state.

    Raises:
        NotInitializedError: before `hvd.init()`; a ValueError, as in Horovod.
    """
    if not _STATE:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init()")
    return _STATE[0]


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` has not."""
    return bool(_STATE)


def connect_processes() -> HorovodState:
    """Find the other processes and connect with them; alone outside of a node."""
    from sparkdl.node.context import current

    ctx = current()
    if ctx is None:
        placement = HostPlacement(0, ("localhost",))
        world = connect(0, 1, lambda value: [value], "", 1.0)
    elif not ctx.member.role.is_trainer:
        raise ConfigError(
            f"{ctx.member.node.name} does not train: call hvd.init() on chief and workers"
        )
    else:
        trainers: Sequence[Member] = ctx.world.trainers
        host, timeout_s = ctx.member.host, OPERATION_TIMEOUT_S
        world = connect(ctx.rank, len(trainers), ctx.all_gather, host, timeout_s)
        placement = HostPlacement.of(ctx)
    _STATE[:] = [HorovodState(placement, {0: (world.ranks, world)})]
    global_process_set.ranks = list(world.ranks)
    return _STATE[0]


def report_step(step: int) -> None:
    """Report the step to the driver, as `ctx.report` does; outside of nodes do nothing."""
    from sparkdl.node.context import current

    ctx = current()
    if ctx is not None:
        ctx.report(step)


def log_to_driver(message: str) -> None:
    """Send a message from a process to the driver, which prints it.

    Where the driver prints all lines this is one of them, of the error output.
    """
    # On the standard output, whose lines are marked by no one else: see `mark_error_lines`.
    for line in str(message).splitlines() or [""]:
        sys.stdout.write(f"{MARK}{line}\n")
    sys.stdout.flush()


def shutdown() -> None:
    """Leave the other processes; `init` may be called again, by all."""
    while _STATE:
        for _, group in _STATE.pop().sets.values():
            if group is not None:
                group.close()
    global_process_set.ranks = []


class ProcessSet:
    """Some of the processes; give it to `hvd.init` or `hvd.add_process_set`, then to operations.

    Args:
        ranks_or_comm: an iterable of ranks in the world, of any integer type. Without MPI there is
            no communicator.

    Attributes:
        process_set_id: 0 for all processes; `None` before the set is added and after its removal.
        ranks: in ascending order.
        mpi_comm: always `None`.

    Raises:
        ConfigError: if they are not whole numbers; a ValueError, as in Horovod.
    """

    process_set_id: int | None = None
    ranks: list[int]
    mpi_comm: None = None

    def __init__(self, ranks_or_comm: Any) -> None:
        try:
            self.ranks = sorted(index(rank) for rank in ranks_or_comm)
        except TypeError as error:
            raise ConfigError(
                f"ProcessSet({ranks_or_comm!r}): must be a list of ranks, which are whole numbers"
            ) from error

    def __repr__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )

    def size(self) -> int | None:
        """Return how many processes are in it; `None` while it has no id."""
        return None if self.process_set_id is None else len(_known(self)[0])

    def rank(self) -> int | None:
        """Return the order of this process in it, -1 outside of it; `None` while it has no id."""
        if self.process_set_id is None:
            return None
        _, group = _known(self)
        return -1 if group is None else group.rank

    def included(self) -> bool:
        """Whether this process is in it."""
        return horovod_state().rank in self.ranks


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set; all processes call it with the same ranks, also those not in the set.

    Raises:
        ConfigError: if its ranks are not the world's, or a set with these ranks exists already.
        NotInitializedError: before `hvd.init()`.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    here = horovod_state()
    ranks = tuple(here.world.members(process_set.ranks))
    for number, (known, _) in here.sets.items():
        if known == ranks:
            raise ConfigError(
                f"Attempted to add a duplicate process set: {process_set}: the set with the id "
                f"{number} has these ranks. Use that one"
            )
    process_set.process_set_id = here.next_id
    here.next_id += 1
    here.sets[process_set.process_set_id] = ranks, here.world.subgroup(ranks)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set and close its connections; all processes call it.

    Returns:
        Whether it was known; False as well for the set of all processes, which stays.
    """
    here = horovod_state()
    number = process_set.process_set_id
    if not number or number not in here.sets:
        return False
    _, group = here.sets.pop(number)
    if group is not None:
        # All have called this then, and none reduces in the set any more.
        group.barrier()
        group.close()
    process_set.process_set_id = None
    return True


def group_of(process_set: ProcessSet | None = None) -> Group:
    """Return the group that reduces for a process set; of all processes by default."""
    process_set = process_set or global_process_set
    _, group = _known(process_set)
    if group is None:
        raise ConfigError(
            f"rank {horovod_state().rank} is not in {process_set}: call process_set.included() "
            "first"
        )
    return group


def join_all() -> int:
    """Join the group of all processes.

    Raises:
        ConfigError: if there is an optimizer of a process set, which would wait for ever.
    """
    world, *sets = (group for _, group in horovod_state().sets.values() if group is not None)
    if any(group.twins for group in sets):
        raise ConfigError(
            "hvd.join() cannot be called with an optimizer of a process set. Give all processes "
            "the same number of batches instead"
        )
    return world.join()


def has_peers(process_set: ProcessSet) -> bool:
    """Whether this process is in a process set, and not alone in it."""
    _, group = _known(process_set)
    return group is not None and group.size > 1


def _known(process_set: ProcessSet) -> tuple[tuple[int, ...], Group | None]:
    number = process_set.process_set_id
    found = horovod_state().sets.get(-1 if number is None else number)
    if found is None:
        raise NotInitializedError(
            f"{process_set} is not known: give it to hvd.init(process_sets=...) or "
            "hvd.add_process_set, on all processes"
        )
    return found


def root_in(group: Group, root_rank: int) -> int:
    """Return the rank within a group of a rank of the world."""
    if root_rank not in group.ranks:
        raise ConfigError(
            f"root_rank={root_rank} is not in this process set: choose one of {list(group.ranks)}"
        )
    return group.ranks.index(root_rank)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of process `root_rank`: anything that can be pickled.

    Args:
        obj: of the root; that of the others is ignored.
        root_rank: in the world.
        name: if given, it must be the same on all processes.

    Raises:
        ConfigError: if `root_rank` is not in the process set.
        CollectiveError: if a process was lost, or did not call this in time.
    """
    group = group_of(process_set)
    return group.broadcast_object(obj, root_in(group, root_rank), name)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all processes by rank: anything that can be pickled.

    Raises:
        CollectiveError: if a process was lost, or did not call this in time.
    """
    return group_of(process_set).all_gather_object(obj, name)
