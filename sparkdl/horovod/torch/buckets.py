"""Which gradients travel together, and in which order.

Runs in: child

As in PyTorch's DistributedDataParallel: buckets of some megabytes in the order in which gradients
become ready, a small one first, so that the reduction begins early in the backward pass.
https://dl.acm.org/doi/10.14778/3415478.3415530
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

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
    kind: str


@dataclass(frozen=True)
class Layout:
    """What is reduced, in this order, by the numbers of the parameters.

    Attributes:
        buckets: of dense gradients.
        sparse: parameters whose gradients are sparse.
    """

    buckets: tuple[tuple[int, ...], ...]
    sparse: tuple[int, ...]


def plan(
    slots: Sequence[Slot],
    order: Sequence[int],
    sparse: Collection[int] = (),
    groups: Sequence[Sequence[int]] | int = 0,
) -> Layout:
    """Return the layout.

    Args:
        slots: of all parameters.
        order: in which gradients became ready; parameters that are missing come last.
        sparse: parameters whose gradients are sparse.
        groups: parameters that are to travel together; or in how many groups to cut all of them,
            0 for groups by size.
    """
    rest = [number for number in reversed(range(len(slots))) if number not in set(order)]
    dense = [number for number in [*order, *rest] if number not in sparse]
    if isinstance(groups, int):
        parts = _by_size(slots, dense) if groups == 0 else _by_count(dense, groups)
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


def _by_count(numbers: Sequence[int], count: int) -> list[list[int]]:
    size, extra = divmod(len(numbers), count)
    parts, start = [], 0
    for i in range(count):
        stop = start + size + (i < extra)
        parts.append(list(numbers[start:stop]))
        start = stop
    return [part for part in parts if part]


def _by_kind(slots: Sequence[Slot], numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for kind in dict.fromkeys(slots[number].kind for number in numbers):
        yield tuple(number for number in numbers if slots[number].kind == kind)
