"""What members of a process set can do together: the interface of all transports.

Runs in: child

All members call the same methods in the same order; each call returns when this member's part is
done, or raises within the group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from sparkdl.collectives.objects import open_sealed, sealed
from sparkdl.collectives.queue import InOrder
from sparkdl.core.errors import ConfigError

T = TypeVar("T")
Array = np.ndarray[Any, Any]


class Op(Enum):
    """How values of the members become one."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


class Group:
    """Members of one process set. Subclasses move the bytes.

    Arrays are numpy's, on the CPU, of numbers, booleans, or `ml_dtypes.bfloat16`. Results are
    new arrays; arguments are not changed.

    Args:
        rank: of this member, within the group.
        ranks: of all members, in the world; in ascending order.
        key: a secret of the members, which seals the objects that they send each other.
        timeout_s: until an operation that not all members have joined is an error.
    """

    transport = ""

    def __init__(self, rank: int, ranks: Sequence[int], key: bytes, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.timeout_s = timeout_s
        self._key = key
        self._queue = InOrder(f"sparkdl-collectives-{self.ranks}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, ranks={self.ranks})"

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    def run(self, work: Callable[[], T], name: str | None = None) -> T:
        """Call `work` after all that was submitted; return what it returns.

        Args:
            name: nothing else of this name can be given until it is done.

        Raises:
            ConfigError: if something of this name is under way.
        """
        return self._queue.run(work, name)

    def submit(self, work: Callable[[], T], name: str | None = None) -> Future[T]:
        """Call `work` in the group's own thread, after all that was submitted before.

        For what is to go on beside the training: members submit alike, in the same order.

        Args:
            name: see `run`.

        Raises:
            ConfigError: see `run`.
        """
        return self._queue.submit(work, name)

    def all_reduce(
        self, arrays: Sequence[Array], op: Op = Op.AVERAGE, name: str | None = None
    ) -> list[Array]:
        """Return the arrays reduced over all members, element by element.

        Arrays of one dtype travel as one.

        Args:
            arrays: any number, of the same shapes and dtypes on all members.
            op: `AVERAGE` of whole numbers is rounded towards zero.
            name: if given, members with another name at this call are an error.

        Raises:
            CollectiveError: if not all members came in time, a member was lost, or members called
                something else.
        """
        raise NotImplementedError

    def all_gather(self, array: Array, name: str | None = None) -> Array:
        """Return the rows of all members, by rank.

        Args:
            array: `[rows, …]`; the rows may differ between members, what follows may not.

        Raises:
            CollectiveError: see `all_reduce`.
        """
        raise NotImplementedError

    def broadcast(self, array: Array, root: int, name: str | None = None) -> Array:
        """Return the array of member `root`.

        Args:
            array: of the same shape and dtype on all members.
            root: a rank within the group.

        Raises:
            CollectiveError: see `all_reduce`.
        """
        raise NotImplementedError

    def all_to_all(
        self, array: Array, splits: Sequence[int] | Array | None = None, name: str | None = None
    ) -> tuple[Array, Array]:
        """Send a part of the rows to each member.

        Args:
            array: `[rows, …]`.
            splits: how many rows each member gets, by rank; by default the same number.

        Returns:
            The rows received, by rank of the sender, and how many came from each, int32 `[size]`.

        Raises:
            ConfigError: if the splits do not fit the rows.
            CollectiveError: see `all_reduce`.
        """
        raise NotImplementedError

    def reduce_scatter(self, array: Array, op: Op = Op.AVERAGE, name: str | None = None) -> Array:
        """Return this member's share of the rows, reduced over all members.

        Args:
            array: `[rows, …]`, of one shape; if they cannot be shared out evenly, the first
                members get one more.

        Raises:
            CollectiveError: see `all_reduce`.
        """
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait until all members have called this.

        Raises:
            CollectiveError: see `all_reduce`.
        """
        raise NotImplementedError

    def join(self) -> int:
        """Take part with zeros in what the others reduce, until all have called this.

        Returns:
            The rank of the member that called it last.

        Raises:
            CollectiveError: see `all_reduce`. Who calls something else than sums and averages
                while others have joined gets it, and those that have joined wait on.
        """
        raise NotImplementedError

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Return the group of some members; all members call it, with the same ranks.

        Args:
            ranks: within this group.

        Returns:
            `None` for those that are not in it.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let the connections go. Operations of other members that wait for this one fail."""
        self._queue.close()

    def all_gather_object(self, value: Any, name: str | None = None) -> list[Any]:
        """Return the values of all members by rank; anything that can be pickled.

        Raises:
            CollectiveError: see `all_reduce`; also if the bytes were not a member's.
        """
        data = np.frombuffer(sealed(value, self._key), np.uint8)
        sizes = self.all_gather(np.array([data.size], np.int64), name)
        whole = self.all_gather(data, name)
        parts = np.split(whole, np.cumsum(sizes)[:-1])
        return [open_sealed(part.tobytes(), self._key) for part in parts]

    def broadcast_object(self, value: Any, root: int = 0, name: str | None = None) -> Any:
        """Return the value of member `root`; anything that can be pickled.

        Raises:
            CollectiveError: see `all_gather_object`.
        """
        is_root = self.rank == root
        data = np.frombuffer(sealed(value, self._key) if is_root else b"", np.uint8)
        (size,) = self.broadcast(np.array([data.size], np.int64), root, name)
        data = self.broadcast(data if is_root else np.zeros(int(size), np.uint8), root, name)
        return value if is_root else open_sealed(data.tobytes(), self._key)

    def members(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks of a subgroup in order, if they can be one.

        Raises:
            ConfigError: for none, for one that is there twice, or one that is no member.
        """
        wanted = sorted(ranks)
        if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= {*range(self.size)}:
            raise ConfigError(
                f"ranks={list(ranks)}: name some of the ranks 0 to {self.size - 1}, each once"
            )
        return wanted


def shares(rows: int, size: int) -> list[int]:
    """Return how many of the rows each member gets; the first ones get one more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def even_splits(rows: int, size: int, splits: Sequence[int] | Array | None) -> list[int]:
    """Return how many rows each member is sent.

    Raises:
        ConfigError: if they do not make up the rows, or there is not one for each member.
    """
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ConfigError(
                f"{rows} rows cannot be shared out evenly among {size} members: give splits"
            )
        return [rows // size] * size
    counts = [int(count) for count in splits]
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise ConfigError(
            f"splits={counts}: there must be one for each of {size} members, 0 or more, and "
            f"{rows} in all"
        )
    return counts
