"""How many of the next rows each node gets, so that all nodes have equally many.

Runs in: agent

`level` and `transfers` are pure; the driver calls the latter. All feeders ask the first node of a
group before they send to it, see `groups.py`. Rows in flight
from other feeders count too; a single node cannot see them. What a feeder had in flight when it
broke stays counted: two pieces for each node at most.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType


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


def transfers(totals: Mapping[int, int], movable: Mapping[int, int]) -> dict[int, dict[int, int]]:
    """Return how many rows nodes pass on, and to whom, so that their totals differ by one at most.

    Args:
        totals: rows by node id.
        movable: how many of them a node can pass on; where these are too few, it keeps more.

    Returns:
        Rows by the node that gives and the node that gets; fewer entries than nodes. Empty if the
        totals are level.
    """
    if not totals or max(totals.values()) - min(totals.values()) <= 1:
        return {}
    least, more = divmod(sum(totals.values()), len(totals))
    highest = sorted(totals, key=lambda node_id: (-totals[node_id], node_id))
    aims = {node_id: least + (place < more) for place, node_id in enumerate(highest)}
    over = [(n, min(totals[n] - aims[n], movable.get(n, 0))) for n in highest]
    under = [(n, aims[n] - totals[n]) for n in reversed(highest) if totals[n] < aims[n]]
    found: dict[int, dict[int, int]] = {}
    for giver, left in over:
        while left > 0 and under:
            getter, missing = under.pop()
            rows = min(left, missing)
            found.setdefault(giver, {})[getter] = rows
            left -= rows
            if missing > rows:
                under.append((getter, missing - rows))
    return found


class RowBalancer:
    """How many rows of one feed were planned for each node, by epoch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: dict[int, Counter[int]] = {}

    def plan(
        self,
        epoch: int,
        rows: int,
        node_ids: Sequence[int],
        back: Mapping[int, int],
        ahead: Mapping[int, int] = MappingProxyType({}),
    ) -> list[int]:
        """Share rows of an epoch out over nodes.

        Args:
            node_ids: the nodes that have room.
            back: rows by node id that were planned and came back.
            ahead: rows by node id that nodes had more than others before the epoch. Without it the
                first node would get all rows of a stream of single rows.

        Returns:
            How many rows each of `node_ids` gets.
        """
        with self._lock:
            planned = self._planned.setdefault(epoch, Counter(ahead))
            planned.subtract(back)
            totals = [planned[node_id] for node_id in node_ids]
            shares = level(rows, totals)
            planned.update(dict(zip(node_ids, shares, strict=True)))
            return shares

    def level(
        self, epoch: int, node_ids: Sequence[int], ahead: Mapping[int, int] = MappingProxyType({})
    ) -> float:
        """Return how many rows of an epoch these nodes have on average, with those in flight."""
        with self._lock:
            planned = self._planned.get(epoch, ahead)
            return sum(planned.get(node_id, 0) for node_id in node_ids) / max(1, len(node_ids))

    def forget(self, epoch: int) -> None:
        """Forget `epoch` and those before it."""
        with self._lock:
            self._planned = {e: planned for e, planned in self._planned.items() if e > epoch}
