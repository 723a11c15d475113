"""An agent is stopped (SIGSTOP): its child ends by itself before the seat is given away."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.driver.lifecycle.state import Running
from tests.doubles.ledger import Plan, lost_and_doubled, table, train
from tests.doubles.nodes import SOON_S, all_gone, launch, processes, use_settings

ROWS = 2 * 8 * 20


def test_stopped_agent_is_given_up_after_its_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_settings(monkeypatch, lease_s=1.5)
    gone_s: list[float] = []

    def watch(process: psutil.Process) -> None:
        all_gone([process], 3 * SOON_S)  # its agent cannot reap it
        gone_s.append(time.monotonic())

    plan = Plan(pause_s=0.03)
    with launch(train, plan, checkpoint_dir=str(tmp_path), max_restarts=9) as cluster:
        feeding = cluster.feed_async(table(ROWS, 3))
        pair = processes(nodes=2)["worker:1"]
        cluster._controller.wait_for(lambda view: view.progress > 3, Deadline.after(SOON_S))
        watcher = threading.Thread(target=watch, args=(pair.child,))
        watcher.start()
        pair.agent.suspend()
        assert cluster._controller.wait_for(
            lambda view: not isinstance(view.state, Running), Deadline.after(3 * SOON_S)
        )
        lost_s = time.monotonic()
        watcher.join()
        assert gone_s[0] < lost_s
        feeding.result(3 * SOON_S)
        results = cluster.results(3 * SOON_S)
    assert lost_and_doubled(results, ROWS) == (0, 0)
