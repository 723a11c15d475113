"""Nodes die behind a checkpoint that leaves fewer rows of an epoch than there are nodes.

A synchronous step needs a row on each of them: so the rows wait for the next epoch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.doubles.ledger import Plan, lost_and_doubled, table, train
from tests.doubles.nodes import SOON_S, launch

NODES, STEPS = 3, 4
ROWS = NODES * 8 * STEPS + 1


def test_after_deaths_at_each_epochs_end_rows_of_the_last_are_unused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 dies when the checkpoint of the last full step of an epoch is complete."""
    faults = ((0, 0, STEPS + 1, "SIGKILL"), (1, 0, 2 * STEPS + 1, "os._exit"))
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "max_restarts": 2}
    with launch(train, Plan(every=STEPS, faults=faults), NODES, **options) as cluster:
        report = cluster.feed(table(ROWS, 2), epochs=2)
        results = cluster.results(3 * SOON_S)
        assert cluster.world.generation == len(faults)
    assert report.rows_fed == 2 * ROWS
    assert lost_and_doubled(results, ROWS, epochs=2) == (2, 0)
    # The call may have returned before the second death: then there is nobody else to tell.
    assert report.rows_unused == 2 or "2 rows of an earlier call" in caplog.text
