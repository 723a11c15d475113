"""What members of a group tell each other in 64 bytes before each operation.

Runs in: child
"""

from __future__ import annotations

import hashlib
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
        extra: what may differ: rows to gather.
        on_device: whether the tensors are a GPU's.
        is_sum: whether zeros of those that have joined do no harm.
    """

    kind: Kind
    what: str
    numel: int = 0
    dtype: int = 0
    extra: int = 0
    on_device: bool = False
    is_sum: bool = True

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
            0,
        ]
