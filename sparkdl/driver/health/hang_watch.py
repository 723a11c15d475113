"""Looks at the nodes' progress now and then, and acts when there is none: see `hangs.py`.

Runs in: driver
"""

from __future__ import annotations

import logging
import threading
import time

from sparkdl.core.deadline import Deadline
from sparkdl.core.failure import Failure
from sparkdl.driver.controller import Controller, View
from sparkdl.driver.feeds.report import waits_in_vain
from sparkdl.driver.health.hangs import Hang, Watch, look
from sparkdl.driver.health.stragglers import Progress, Stragglers, compare, progress_of
from sparkdl.driver.lifecycle.state import NodesBlamed, Running

_log = logging.getLogger(__name__)

MAX_PERIOD_S = 5.0
STACKS_S = 5.0
"""How long the agents have to bring the stacks of their children."""


class HangWatch:
    """Watches one cluster on its controller's loop, until that is closed."""

    def __init__(self, controller: Controller, timeout_s: float) -> None:
        self._controller = controller
        self._timeout_s = timeout_s
        self._period_s = min(MAX_PERIOD_S, timeout_s / 8)
        self._watch = Watch()
        self._pace = Stragglers()

    def start(self) -> None:
        """Look now and then, from now on."""
        self._controller.soon(self._turn)

    def _turn(self) -> None:
        view = self._controller.view
        self._watch, hang = self._look(view)
        if hang:  # in a thread, for the answers come on the loop
            threading.Thread(
                target=self._tell, args=(hang,), name="sparkdl-hang", daemon=True
            ).start()
        if isinstance(view.state, Running):
            nodes = _progress(view, view.state)
            generation = view.state.world.generation
            self._pace, slow = compare(self._pace, generation, nodes, time.monotonic())
            if slow:
                _log.warning("Cluster %s: %s", self._controller.spec.cluster_id, slow)
        self._controller.later(self._period_s, self._turn)

    def _look(self, view: View) -> tuple[Watch, Hang | None]:
        if not isinstance(view.state, Running):
            return Watch(), None
        nodes = _progress(view, view.state)
        generation, now_s = view.state.world.generation, time.monotonic()
        start_s = self._controller.spec.settings.reservation_timeout_s
        return look(self._watch, generation, nodes, now_s, self._timeout_s, start_s)

    def _tell(self, hang: Hang) -> None:
        settings = self._controller.spec.settings
        found_s = self._controller.wall_s()
        stacks = self._controller.fetch_stacks(Deadline.after(STACKS_S))
        spec = self._controller.spec
        vain = self._controller.look(lambda view: waits_in_vain(spec, view.feeds))
        vain = vain and f"; {vain}"
        _log.warning(
            "Cluster %s: %s%s (hang_timeout=%g s, hang_action=%r)\n%s",
            self._controller.spec.cluster_id,
            hang.describe(),
            vain,
            self._timeout_s,
            settings.hang_action,
            "\n".join(f"Stacks of {node}:\n{text.rstrip()}" for node, text in stacks.items()),
        )
        goes_on = not self._controller.look(lambda view: self._look(view)[0].is_told)
        if settings.hang_action == "report" or goes_on:
            return
        hosts, pids = self._controller.look(lambda view: (_hosts(view), dict(view.pids)))
        failures = tuple(
            Failure(
                node=node.node,
                kind="hang",
                message=hang.message(node) + vain,
                time_s=found_s,
                node_id=node.node_id,
                rank=node.rank,
                host=hosts.get(node.node_id, ""),
                pid=pids.get(node.node_id, 0),
                traceback=stacks.get(node.node, ""),
                generation=hang.generation,
            )
            for node in hang.behind
        )
        self._controller.submit(NodesBlamed(hang.generation, failures))


def _hosts(view: View) -> dict[int, str]:
    world = getattr(view.state, "world", None)
    return {m.node.node_id: m.host for m in world.members} if world else {}


def _progress(view: View, state: Running) -> list[Progress]:
    return progress_of(state, view.feeds, view.activity, view.have_feeds_ended)
