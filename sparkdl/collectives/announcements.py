"""What members of a group tell each other in 64 bytes before each operation, and what follows.

Runs in: child
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

HEAD_WORDS = 8
"""Whole numbers of 64 bits in an announcement."""


class Kind(IntEnum):
    """What a member is about to do."""

    JOIN = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    BROADCAST = 3
    ALL_TO_ALL = 4
    REDUCE_SCATTER = 5
    BARRIER = 6
    STEP = 7


@dataclass(frozen=True)
class Call:
    """One operation as a member is about to do it.

    Attributes:
        what: all that must be the same on all members, in words.
        numel: numbers to reduce, of which those that have joined give as many zeros.
        dtype: of these, an index into `dtypes()`.
        extra: what may differ: rows to gather; for `JOIN`, how many operations it has stood in for.
        on_device: whether the tensors are a GPU's.
        is_sum: whether zeros of those that have joined do no harm.
        since_ns: when the member joined, by its own clock.
    """

    kind: Kind
    what: str
    numel: int = 0
    dtype: int = 0
    extra: int = 0
    on_device: bool = False
    is_sum: bool = True
    since_ns: int = 0

    def words(self) -> list[int]:
        """Return it as `HEAD_WORDS` whole numbers."""
        digest = hashlib.blake2b(self.what.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little", signed=True)
        return [
            self.kind,
            number,
            self.numel,
            self.dtype,
            self.extra,
            self.on_device,
            self.is_sum,
            self.since_ns,
        ]


def objection(heads: Sequence[Sequence[int]]) -> str | None:
    """Return why members cannot do together what they have announced, or `None`.

    Args:
        heads: the words of all members, by rank.
    """
    active = [head for head in heads if head[0] != Kind.JOIN]
    if len({tuple(head[:4]) for head in active}) > 1:
        return "all must call the same, in the same order, with the same shapes and dtypes"
    if not active or len(active) == len(heads):
        return None
    if active[0][0] in (Kind.ALL_REDUCE, Kind.STEP) and all(head[6] for head in active):
        return None
    return "only sums and averages can be reduced while a member has joined"


def last_to_join(heads: Sequence[Sequence[int]]) -> int:
    """Return the rank of the member that joined last; the same on all, who know the same words.

    That is who has stood in for the fewest operations; among several, who came last by the clocks.
    """
    return max(range(len(heads)), key=lambda rank: (-heads[rank][4], heads[rank][7], rank))
