"""A child is killed in the middle of an epoch: each row is in the model once, as if undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doubles.ledger import Plan, lost_and_doubled, table, train
from tests.doubles.nodes import SOON_S, launch

ROWS = 2 * 8 * 13


@pytest.mark.parametrize(
    "faults",
    [
        ((0, 1, 2, "SIGKILL"),),  # before the first checkpoint
        ((0, 1, 6, "SIGKILL"), (1, 0, 18, "os._exit"), (2, 1, 25, "segfault")),
    ],
    ids=["before the first checkpoint", "three times"],
)
def test_killed_child_loses_no_row(
    tmp_path: Path, faults: tuple[tuple[int, int, int, str], ...]
) -> None:
    plan = Plan(faults=faults)
    with launch(train, plan, checkpoint_dir=str(tmp_path), max_restarts=3) as cluster:
        cluster.feed(table(ROWS, 3), epochs=2)
        results = cluster.results(3 * SOON_S)
        assert cluster.world.generation == len(faults)
    assert lost_and_doubled(results, ROWS, epochs=2) == (0, 0)
