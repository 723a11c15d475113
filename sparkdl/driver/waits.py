"""The nodes' waits for rows and for each other, and the node that the others wait for. Pure.

Children report how many seconds they have waited so far (`node/waits.py`). This module alone turns
them into shares of the last minute, for tables, pages, records and the log. In a synchronous
training a step lasts equally long on all nodes; the straggler is the one that does not wait while
the others do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkdl.control.messages import NodeActive
from sparkdl.driver.lifecycle.state import Running, State

SLICE_S = 10.0
SLICES = 6
"""Full slices: the last minute. A node counts as awaited if it is in most of them, so that a
checkpoint or the end of an epoch does not make it a straggler."""
AWAITED = 0.3
"""A node is awaited if the others' share of time spent waiting for nodes is higher by this."""
_WAITED = ("watched_s", "rows_s", "others_s")
"""The counters in children's reports, see `NodeActive`."""


@dataclass(frozen=True)
class Shares:
    """Shares of the last minute that a node has waited.

    Attributes:
        rows: for rows.
        others: for other nodes; NaN if unknown.
        lag: how much longer the others waited for nodes, if they wait for this one; otherwise 0.
    """

    rows: float
    others: float
    lag: float = 0.0


class Waits:
    """The waits of one generation's nodes in the last minute."""

    def __init__(self) -> None:
        self._generation = -1
        self._newest = 0
        self._totals: dict[int, NodeActive] = {}
        self._slices: dict[int, dict[int, np.ndarray[Any, Any]]] = {}
        """Seconds that were watched, waited for rows, and for others, by node id and number."""

    def note(self, node_id: int, active: NodeActive, now_s: float) -> None:
        """Record a node's report."""
        if active.generation < self._generation:
            return
        if active.generation > self._generation:
            self._totals.clear()
            self._slices.clear()
            self._generation = active.generation
        before = self._totals.get(node_id)
        if before is None or active.watched_s < before.watched_s:  # another child
            # A first report counts from 0. The default of `others_s` would mean that it is unknown.
            before = NodeActive(active.generation, others_s=0.0)
        self._totals[node_id] = active
        self._newest = number = max(self._newest, int(now_s // SLICE_S))
        slices = self._slices.setdefault(node_id, {})
        slices[number] = slices.get(number, 0.0) + _seconds(active) - _seconds(before)
        for old in [each for each in slices if each < number - SLICES]:
            del slices[old]

    def shares(self, node_ids: Collection[int]) -> dict[int, Shares]:
        """Return the waits of these nodes that have reported in the last minute."""
        found = {}
        lags = self.lags(node_ids)
        for node_id in node_ids:
            slices = self._slices.get(node_id, {}).items()
            recent = [part for number, part in slices if number >= self._newest - SLICES]
            watched_s, rows_s, others_s = map(float, sum(recent, np.zeros(3)))
            if watched_s > 0:
                is_known = self._totals[node_id].others_s >= 0
                others = others_s / watched_s if is_known else math.nan
                found[node_id] = Shares(rows_s / watched_s, others, lags.get(node_id, 0.0))
        return found

    def lags(self, node_ids: Collection[int]) -> dict[int, float]:
        """Return the nodes that the others wait for, and how much longer those have waited.

        It is empty until all nodes have been watched for a minute.
        """
        if len(node_ids) < 2:
            return {}
        # Without the newest slice, which is still growing.
        minute = range(self._newest - SLICES, self._newest)
        by_slice = [self._lags_in(number, node_ids) for number in minute]
        if not all(by_slice):
            return {}
        # The median, so that a node counts as awaited only if it is in most of the slices.
        lags = {node: statistics.median_low([part[node] for part in by_slice]) for node in node_ids}
        return {node: lag for node, lag in lags.items() if lag >= AWAITED}

    def _lags_in(self, number: int, node_ids: Collection[int]) -> Mapping[int, float]:
        """Return how much longer the others waited in a slice; empty if that is not known."""
        waited = {}
        for node_id in node_ids:
            part = self._slices.get(node_id, {}).get(number)
            if part is None or part[0] < SLICE_S / 2 or self._totals[node_id].others_s < 0:
                return {}
            waited[node_id] = float(part[2] / part[0])
        # Of two nodes the one that waits shows how long. Their median would be half of it.
        typical = max(waited.values()) if len(waited) == 2 else statistics.median(waited.values())
        return {node_id: typical - share for node_id, share in waited.items()}


def _seconds(active: NodeActive) -> np.ndarray[Any, Any]:
    return np.array([getattr(active, name) for name in _WAITED])


def in_step(state: State) -> list[int]:
    """Return the nodes that train together now: in `map_fun`, with a job-finishing role."""
    if not isinstance(state, Running):
        return []
    return [
        member.node.node_id
        for member in state.world.members
        if member.role.finishes_job
        and member.node.node_id in state.in_map_fun
        and member.node.node_id not in state.returned
    ]
