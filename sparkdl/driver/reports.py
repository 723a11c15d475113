"""What nodes tell by `ctx.report`, as it comes to the driver.

Runs in: driver
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparkdl.control.messages import NodeActive
from sparkdl.driver.controller import Controller

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What a node has told by `ctx.report(step, **metrics)`.

    Attributes:
        node: its name, `worker:1` for example.
        rank: its rank in the world.
        time_s: Unix time in seconds at which the driver heard of it.
    """

    node: str
    rank: int
    step: int
    metrics: Mapping[str, float]
    time_s: float


class Reports:
    """Hands on what nodes report.

    Args:
        takers: called with each report, on the controller's thread.
    """

    def __init__(self, controller: Controller, takers: Sequence[Callable[[Report], None]]) -> None:
        self._controller = controller
        self._takers = takers
        self._last: dict[int, tuple[int, int, dict[str, float | str]]] = {}

    def take(self, node_id: int, activity: NodeActive) -> None:
        """Hand on what a node has done, if it is a report and a new one."""
        now = (activity.generation, activity.step, activity.metrics)
        world = getattr(self._controller.view.state, "world", None)
        if activity.step < 0 or self._last.get(node_id) == now:
            return
        self._last[node_id] = now
        name = self._controller.spec.nodes[node_id].name
        rank = world.member(node_id).rank if world and world.has(node_id) else -1
        metrics, time_s = activity.numbers, self._controller.wall_s()
        for taker in self._takers:
            try:
                taker(Report(name, rank, activity.step, metrics, time_s))
            except Exception:  # noqa: BLE001 (user code; it must not end the controller)
                _log.exception("on_report failed; the nodes are not harmed")
