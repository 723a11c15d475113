"""The announcements of members before an operation, and the checks on them.

Why announce? gloo does not compare what members call. If one member reduces more numbers than
another, the other's process is aborted (`op.preamble.length <= op.nbytes` is thrown in a thread of
gloo's), and as many numbers of another kind are added up in silence. A member may therefore enter
gloo only when it knows that all do. A member that has joined also learns the shape of its zeros.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """The kind of operation that a member announces."""

    JOIN = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    BROADCAST = 3
    ALL_TO_ALL = 4
    REDUCE_SCATTER = 5
    BARRIER = 6
    STEP = 7


class Call(NamedTuple):
    """One operation, as a member announces it: whole numbers of 64 bits.

    Attributes:
        digest: of the arguments that must be the same on all members.
        numel: how many numbers to reduce; members that have joined contribute as many zeros.
        dtype: of these, an index into `transport.dtypes()`.
        extra: a number that may differ: rows to gather; for `JOIN`, the operations it has stood in
            for.
        on_device: whether the tensors are a GPU's.
        is_sum: whether zeros from members that have joined leave the result right.
        since_ns: when the member joined, by its own clock.
    """

    kind: int
    digest: int
    numel: int = 0
    dtype: int = 0
    extra: int = 0
    on_device: int = False
    is_sum: int = True
    since_ns: int = 0


def digest(what: str) -> int:
    """Return a number for the arguments of an operation, in words."""
    # Python's own `hash` of a text differs between processes.
    data = hashlib.blake2b(what.encode(), digest_size=8).digest()
    return int.from_bytes(data, "little", signed=True)


WORDS = struct.Struct(f"<{len(Call._fields)}q")


def objection(calls: Sequence[Call]) -> str | None:
    """Return the reason why the members' announcements do not match, or `None` if they do."""
    active = [call for call in calls if call.kind != Kind.JOIN]
    if len({(call.kind, call.digest, call.numel, call.dtype) for call in active}) > 1:
        return "all must call the same, in the same order, with the same shapes and dtypes"
    if not active or len(active) == len(calls):
        return None
    if active[0].kind in (Kind.ALL_REDUCE, Kind.STEP) and all(call.is_sum for call in active):
        return None
    return "only sums and averages can be reduced while a member has joined"


def last_to_join(calls: Sequence[Call]) -> int:
    """Return the rank of the member that joined last; all members compute the same one.

    It has stood in for the fewest operations; among several, it is the last by the clocks.
    """
    return max(range(len(calls)), key=lambda rank: (-calls[rank].extra, calls[rank].since_ns, rank))
