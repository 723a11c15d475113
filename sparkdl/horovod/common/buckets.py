"""The buckets of some megabytes in which gradients travel together, and their order.

Runs in: child

As in PyTorch's DistributedDataParallel (https://dl.acm.org/doi/10.14778/3415478.3415530) a bucket
is reduced during the backward pass, as soon as its gradients are there. The backward pass begins
with the last layers, so buckets are made from the last gradient to the first until their order is
known. The first bucket is small, so that the reduction begins early.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from sparkdl.horovod.common.util import split_list

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


@dataclass(frozen=True)
class Layout:
    """The order in which gradients are reduced, by the numbers of their parameters.

    Attributes:
        buckets: of dense gradients.
        sparse: parameters whose gradients are sparse.
    """

    buckets: tuple[tuple[int, ...], ...]
    sparse: tuple[int, ...]


def plan(
    slots: Sequence[Slot],
    order: Sequence[int] = (),
    sparse: Collection[int] = (),
    groups: Sequence[Sequence[int]] | int = 0,
) -> Layout:
    """Return the layout.

    Args:
        slots: of all parameters.
        order: the order in which gradients became ready; missing parameters come last, in reverse.
        sparse: parameters whose gradients are sparse.
        groups: parameters that are to travel together; or in how many groups to cut all of them,
            0 for groups by size.
    """
    rest = [number for number in reversed(range(len(slots))) if number not in set(order)]
    dense = [number for number in [*order, *rest] if number not in sparse]
    if isinstance(groups, int):
        parts = split_list(dense, groups) if groups else _by_size(slots, dense)
    else:
        place = {number: i for i, number in enumerate(dense)}
        asked = [[n for n in group if n in place] for group in groups]
        grouped = {number for group in asked for number in group}
        others = _by_size(slots, [number for number in dense if number not in grouped])
        # A group is complete with its last gradient.
        parts = sorted(
            [*(group for group in asked if group), *others],
            key=lambda part: max(place[number] for number in part),
        )
    buckets = tuple(bucket for part in parts for bucket in _by_kind(slots, part))
    return Layout(buckets, tuple(sorted(sparse)))


def _by_size(slots: Sequence[Slot], numbers: Sequence[int]) -> list[list[int]]:
    parts: list[list[int]] = []
    open_parts: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    for number in numbers:
        slot = slots[number]
        limit = FIRST_NBYTES if len(parts) == 1 else NBYTES
        if slot.kind not in open_parts or filled[slot.kind] + slot.nbytes > limit:
            open_parts[slot.kind], filled[slot.kind] = [], 0
            parts.append(open_parts[slot.kind])
        open_parts[slot.kind].append(number)
        filled[slot.kind] += slot.nbytes
    return parts


def _by_kind(slots: Sequence[Slot], numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for kind in dict.fromkeys(slots[number].kind for number in numbers):
        yield tuple(number for number in numbers if slots[number].kind == kind)
