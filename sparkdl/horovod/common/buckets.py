"""The buckets of some megabytes in which gradients travel together, and their order.

As in PyTorch's DistributedDataParallel (https://dl.acm.org/doi/10.14778/3415478.3415530) a bucket
is reduced during the backward pass, as soon as its gradients are there. The backward pass begins
with the last layers, so buckets are made from the last gradient to the first. The first bucket is
small, so that the reduction begins early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# PyTorch's own sizes, of DistributedDataParallel's first bucket and its others.
FIRST_NBYTES = 1 << 20
NBYTES = 25 << 20


@dataclass(frozen=True)
class Slot:
    """A gradient's place.

    Attributes:
        nbytes: of the gradient.
        kind: dtype and device; gradients of one bucket have the same.
    """

    nbytes: int
    kind: str = ""


def plan(slots: Sequence[Slot]) -> tuple[tuple[int, ...], ...]:
    """Return the buckets in the order in which they are reduced, by the numbers of parameters."""
    buckets: list[list[int]] = []
    unfilled: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    for number in reversed(range(len(slots))):
        slot = slots[number]
        limit = FIRST_NBYTES if len(buckets) == 1 else NBYTES
        if slot.kind not in unfilled or filled[slot.kind] + slot.nbytes > limit:
            unfilled[slot.kind], filled[slot.kind] = [], 0
            buckets.append(unfilled[slot.kind])
        unfilled[slot.kind].append(number)
        filled[slot.kind] += slot.nbytes
    return tuple(map(tuple, buckets))
