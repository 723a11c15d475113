"""A child is stopped (SIGSTOP) within an epoch: the watch finds it, and all begin anew."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.options import Recovery
from tests.doubles.ledger import Plan, lost_and_doubled, table, train
from tests.doubles.nodes import SOON_S, launch, processes

ROWS = 2 * 8 * 20


def test_stopped_child_is_found_and_loses_no_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {
        "max_restarts": 9,
        "recovery": Recovery(hang_timeout_s=2.0, on_hang="fail"),
    }
    with launch(train, Plan(pause_s=0.03), checkpoint_dir=str(tmp_path), **options) as cluster:
        feeding = cluster.feed_async(table(ROWS, 3))
        child = processes(nodes=2)["worker:1"].child
        # Stopped before it enters map_fun, a node would have longer than the hang timeout.
        assert cluster._controller.wait_for(
            lambda view: (1, "input") in view.feeds and view.feeds[1, "input"].given.steps > 0,
            Deadline.after(SOON_S),
        )
        child.suspend()
        feeding.result(3 * SOON_S)
        results = cluster.results(3 * SOON_S)
    assert lost_and_doubled(results, ROWS) == (0, 0)
    assert not child.is_running()
    found = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert any(f"process {child.pid} is stopped (SIGSTOP)" in text for text in found)
