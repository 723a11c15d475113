"""A group of one: nothing moves.

Runs in: anywhere
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkdl.collectives.base import Array, Group, Op, even_splits


class SingleMemberGroup(Group):
    """The only member; needs no framework.

    Args:
        rank: in the world.
    """

    transport = "alone"

    def __init__(self, rank: int = 0) -> None:
        super().__init__(0, (rank,), b"", 0.0)

    def all_reduce(
        self, arrays: Sequence[Array], op: Op = Op.AVERAGE, name: str | None = None
    ) -> list[Array]:
        """Return copies of the arrays."""
        return [np.array(array) for array in arrays]

    def all_gather(self, array: Array, name: str | None = None) -> Array:
        """Return a copy of the array, a scalar as one row."""
        return np.atleast_1d(np.array(array))

    def broadcast(self, array: Array, root: int, name: str | None = None) -> Array:
        """Return a copy of the array."""
        return np.array(array)

    def all_to_all(
        self, array: Array, splits: Sequence[int] | Array | None = None, name: str | None = None
    ) -> tuple[Array, Array]:
        """Return a copy of the array, and the number of its rows."""
        rows = np.atleast_1d(np.array(array))
        return rows, np.array(even_splits(len(rows), 1, splits), np.int32)

    def reduce_scatter(self, array: Array, op: Op = Op.AVERAGE, name: str | None = None) -> Array:
        """Return a copy of the array."""
        return np.atleast_1d(np.array(array))

    def barrier(self) -> None:
        """Return at once."""

    def join(self) -> int:
        """Return this member's rank, 0."""
        return 0

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Return a group of this member."""
        self.members(ranks)
        return SingleMemberGroup(self.ranks[0])

    def all_gather_object(self, value: Any, name: str | None = None) -> list[Any]:
        """Return a list of the value itself."""
        return [value]

    def broadcast_object(self, value: Any, root: int = 0, name: str | None = None) -> Any:
        """Return the value itself."""
        return value
