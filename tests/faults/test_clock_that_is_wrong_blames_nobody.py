"""The clock of a node's host is an hour behind: what fails there later did not happen first."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sparkdl.core.errors import NodeFailedError
from sparkdl.node.context import NodeContext
from tests.doubles.gates import Gate
from tests.doubles.nodes import SOON_S, launch, use_settings


def test_clock_that_is_wrong_blames_nobody(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_settings(monkeypatch, settle_s=2.0)  # rank 0 is heard on a slow machine as well
    alive = Gate.at(tmp_path / "alive")

    def fail(args: None, ctx: NodeContext) -> None:
        if ctx.rank == 1:
            import os

            os.open(alive.path, os.O_WRONLY)  # until this process ends
            raise ValueError("the cause")
        behind_s = time.time() - 3600
        time.time = lambda: behind_s
        alive.wait()
        raise ConnectionError("the other worker is gone")

    began_s = time.time()
    with pytest.raises(NodeFailedError) as caught, launch(fail) as cluster:
        cluster.wait(SOON_S)
    assert [failure.node for failure in caught.value.failures] == ["worker:1", "worker:0"]
    assert all(began_s <= f.time_s <= time.time() for f in caught.value.failures)
