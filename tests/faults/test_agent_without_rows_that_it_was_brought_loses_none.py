"""An agent no longer has rows that the driver has assigned: they are fed again, as a lost host's.

What was to have them is its own child, or the agent of another node, which fetches them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparkdl.core.errors import NodeFailedError
from tests.doubles.ledger import Plan, lost_and_doubled, table, train
from tests.doubles.nodes import SOON_S, launch

ROWS = 2 * 8 * 13
FORGET = """
import os
from sparkdl.core.errors import FeedClosedError
from sparkdl.feed.store.spool import Spool

def forgetful(*window, stock=Spool.{way}):
    try:
        os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return stock(*window)
    raise FeedClosedError("rows are not in the spool")

Spool.{way} = forgetful
"""


def forget_once(folder: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> Path:
    """Have the first agent that is asked not find rows, once; return the file that says so."""
    flag = folder / "has-forgotten"
    (folder / "sitecustomize.py").write_text(FORGET.format(way=way, flag=str(flag)))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return flag


@pytest.mark.parametrize("way", ["take", "read"])
def test_agent_without_rows_that_it_was_brought_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    flag = forget_once(tmp_path, monkeypatch, way)
    checkpoints = str(tmp_path / "checkpoints")
    with launch(train, Plan(), checkpoint_dir=checkpoints, max_restarts=1) as cluster:
        cluster.feed(table(ROWS), epochs=2)
        results = cluster.results(3 * SOON_S)
        assert flag.exists()
        assert cluster.world.generation == 1
    assert lost_and_doubled(results, ROWS, epochs=2) == (0, 0)


def test_without_restarts_the_cluster_says_whose_rows_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_once(tmp_path, monkeypatch, "take")
    with (
        pytest.raises(NodeFailedError, match=r"worker:\d .*rows are not in the spool"),
        launch(train, Plan()) as cluster,
    ):
        cluster.feed(table(ROWS))
