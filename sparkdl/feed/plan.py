"""Who gets how many rows, how many steps that makes, and which offsets are still missing.

Runs in: anywhere. Pure; standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

Range = tuple[int, int]
Tail = Literal["short", "pad", "drop", "carry"]


def level(num_rows: int, totals: Sequence[int], open_nodes: Sequence[bool]) -> list[int]:
    """Share rows out so that the nodes' totals become as even as they can.

    Like water poured into a vessel with an uneven floor: the lowest nodes fill up to the next
    lowest, then those rise together. Rows that do not make a full layer go one each to the
    nodes that were lowest, the lower index first.

    Args:
        num_rows: how many rows there are to share out.
        totals: how many rows each node has had so far.
        open_nodes: whether each node takes rows; a closed node gets none.

    Returns:
        How many rows go to each node; they sum to `num_rows` unless every node is closed.
    """
    if num_rows < 0:
        raise ValueError(f"num_rows is {num_rows}; it cannot be negative")
    shares = [0] * len(totals)
    by_total = sorted(
        (total, node)
        for node, (total, is_open) in enumerate(zip(totals, open_nodes, strict=True))
        if is_open
    )
    if not by_total:
        return shares
    wet, held = 0, num_rows  # how many nodes get water; water plus the floor below it
    for total, _ in by_total:
        if wet and held < total * wet:  # the water stands below this node's floor
            break
        wet, held = wet + 1, held + total
    surface, remainder = divmod(held, wet)
    for position, (total, node) in enumerate(by_total[:wet]):
        shares[node] = surface - total + (position < remainder)
    return shares


def agreed_steps(rows: Sequence[int], batch_size: int, tail: Tail) -> int:
    """Return the number of steps that every node takes in an epoch.

    Args:
        rows: how many rows each node has.
        batch_size: rows per node and step.
        tail: `short` and `pad` use all rows; `drop` and `carry` take full batches only.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if tail in ("short", "pad"):
        return max((-(-count // batch_size) for count in rows), default=0)
    return min((count // batch_size for count in rows), default=0)


def next_share(rows_left: int, steps_left: int, batch_size: int) -> int:
    """Return the size of the next batch, such that rows are left for the steps after it.

    Full batches first; then as many rows as leave one for each later step. Zero only if fewer rows
    are left than steps, for the last of these.
    """
    if rows_left < steps_left:
        return min(1, rows_left)
    return min(batch_size, rows_left - (steps_left - 1))


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Return half-open `ranges` sorted, with those that touch or overlap made one.

    Empty ranges (stop not past start) are left out.
    """
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def first_rows(ranges: Iterable[Range], rows: int) -> list[Range]:
    """Return the first `rows` rows of half-open ranges; all if they have fewer."""
    found: list[Range] = []
    for start, stop in ranges:
        if rows <= 0:
            break
        found.append((start, min(stop, start + rows)))
        rows -= stop - start
    return found


def uncovered(start: int, stop: int, ranges: Sequence[Range]) -> list[Range]:
    """Return the parts of [`start`, `stop`) that no range covers, in order.

    Args:
        start: first offset asked about.
        stop: the offset past the last one asked about.
        ranges: half-open ranges, in any order.
    """
    missing: list[Range] = []
    for covered_start, covered_stop in merge_ranges(ranges):
        if start < min(covered_start, stop):
            missing.append((start, min(covered_start, stop)))
        start = max(start, covered_stop)
    if start < stop:
        missing.append((start, stop))
    return missing
