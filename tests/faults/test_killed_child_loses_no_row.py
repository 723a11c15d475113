"""A child dies within an epoch, in three ways: each row is in the model once, as if undisturbed."""

from __future__ import annotations

from pathlib import Path

from tests.doubles.ledger import Plan, lost_and_doubled, table, train
from tests.doubles.nodes import SOON_S, launch

ROWS = 2 * 8 * 13
FAULTS = ((0, 1, 2, "SIGKILL"), (1, 0, 18, "os._exit"), (2, 1, 25, "segfault"))
"""The first before there is any checkpoint."""


def test_killed_child_loses_no_row(tmp_path: Path) -> None:
    plan = Plan(faults=FAULTS)
    with launch(train, plan, checkpoint_dir=str(tmp_path), max_restarts=3) as cluster:
        cluster.feed(table(ROWS, 3), epochs=2)
        results = cluster.results(3 * SOON_S)
        assert cluster.world.generation == len(FAULTS)
    assert lost_and_doubled(results, ROWS, epochs=2) == (0, 0)
