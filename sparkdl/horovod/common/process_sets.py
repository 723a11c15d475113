"""Process sets: some of the processes, which reduce among themselves.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/common/process_sets.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkdl.collectives.base import Group
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common.exceptions import NotInitializedError
from sparkdl.horovod.common.world import Place, has_place, place


class ProcessSet:
    """Some of the processes; give it to `hvd.init` or `hvd.add_process_set`, then to operations.

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
        """Return how many processes are in it.

        Raises:
            NotInitializedError: if it has not been added, or was removed.
        """
        return len(self._known())

    def rank(self) -> int:
        """Return the order of this process in it, or -1 if it is not in it.

        Raises:
            NotInitializedError: if it has not been added, or was removed.
        """
        ranks, mine = self._known(), place().rank
        return ranks.index(mine) if mine in ranks else -1

    def included(self) -> bool:
        """Whether this process is in it.

        Raises:
            NotInitializedError: if it has not been added, or was removed.
        """
        return place().rank in self._known()

    def _known(self) -> tuple[int, ...]:
        ranks = place().ranks
        if self.process_set_id is None or self.process_set_id not in ranks:
            raise NotInitializedError(
                f"{self} is not known: give it to hvd.init(process_sets=...) or "
                "hvd.add_process_set, on all processes"
            )
        return ranks[self.process_set_id]


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def begin(here: Place) -> None:
    """Fill in the ranks of `global_process_set`."""
    global_process_set.ranks = list(range(here.size))


def end() -> None:
    """Empty `global_process_set` again."""
    global_process_set.ranks = []


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set known; all processes call it, alike, those that are not in it as well.

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
        raise NotInitializedError(
            f"{process_set} is not known: give it to hvd.init(process_sets=...) or "
            "hvd.add_process_set, on all processes"
        )
    group = here.groups[number]
    if group is None:
        raise ConfigError(
            f"rank {here.rank} is not in {process_set}: ask process_set.included() first"
        )
    return group


def is_known(process_set: ProcessSet) -> bool:
    """Whether operations can be done in it."""
    return has_place() and process_set.process_set_id in place().ranks
