"""All rows have been read and trained on when `map_fun` raises, before it has returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.errors import NodeFailedError
from sparkdl.node.context import NodeContext
from tests.doubles.ledger import Plan, lost_and_doubled, table, train
from tests.doubles.nodes import SOON_S, launch

ROWS = 2 * 8 * 6 + 3


def raise_after(plan: Plan, ctx: NodeContext) -> list[int]:
    """Train; raise once there is nothing left to read."""
    seen = train(plan, ctx)
    if (ctx.generation, ctx.rank) == (0, 1):
        raise ValueError("the model cannot be exported")
    return seen


def test_exception_after_the_loop_is_no_success() -> None:
    with pytest.raises(NodeFailedError) as caught, launch(raise_after, Plan(every=99)) as cluster:
        cluster.feed(table(ROWS, 2), epochs=2)
        cluster.shutdown()
    cause = caught.value.root_cause
    assert (cause.node, cause.kind) == ("worker:1", "exception")
    assert cause.exception_type == "builtins.ValueError"
    assert "the model cannot be exported" in str(caught.value)
    assert 'raise ValueError("the model cannot be exported")' in cause.traceback


def test_with_restarts_the_rows_behind_the_checkpoint_come_again(tmp_path: Path) -> None:
    """Also those of an epoch that all calls of `feed` had said was over."""
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "max_restarts": 1}
    with launch(raise_after, Plan(), **options) as cluster:
        assert cluster.feed(table(ROWS, 2), epochs=2).rows_used == 2 * ROWS
        results = cluster.results(3 * SOON_S)
        assert "restart 1 because worker:1" in cluster.status()
    assert lost_and_doubled(results, ROWS, epochs=2) == (0, 0)
