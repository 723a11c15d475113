"""How many of the next rows each node gets, so that all nodes have equally many.

Runs in: anywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence


def level(num_rows: int, totals: Sequence[int]) -> list[int]:
    """Share rows out so that the nodes' totals become as even as they can.

    Like water poured into a vessel with an uneven floor: the lowest nodes fill up to the next
    lowest, then those rise together. Rows that do not make a full layer go one each to the
    nodes that were lowest, the lower index first.

    Args:
        num_rows: how many rows there are to share out.
        totals: how many rows each node has had so far.

    Returns:
        How many rows go to each node; they sum to `num_rows` unless there is no node.
    """
    if num_rows < 0:
        raise ValueError(f"num_rows is {num_rows}; it cannot be negative")
    shares = [0] * len(totals)
    by_total = sorted((total, node) for node, total in enumerate(totals))
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
