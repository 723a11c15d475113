"""Keras under `hvd.elastic`: a killed node costs what came after the last commit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sparkdl.horovod.spark import run_elastic
from tests.horovod.keras_programs import EPOCHS, STEPS, commits

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch]


def train() -> dict[str, Any]:
    """Train; the second process kills itself once."""
    import sparkdl.horovod.keras as hvd
    from sparkdl.node.context import current

    hvd.init()

    def dies() -> None:
        if hvd.rank() == 1 and not current().restarts:  # type: ignore[union-attr]
            os.kill(os.getpid(), signal.SIGKILL)

    return commits(hvd, dies)


@pytest.mark.deep  # PyTorch's training is killed in each run, Keras' is interrupted there
def test_killed_node_costs_what_came_after_the_last_commit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"executor": "local", "framework": "plain", "show_progress": False}
    first, second = run_elastic(
        train, num_proc=2, verbose=0, checkpoint_dir=str(tmp_path), **options
    )
    assert first == second
    assert first["begun"] == [1, 1, STEPS + 2]  # the second epoch, after two of its batches
    assert first["resets"] == [2]
    assert first["epoch"] == EPOCHS
    assert first["steps"] == STEPS + 2 + 2 * STEPS  # the interrupted epoch began anew
    assert first["plain"] == [[0.0], 0]
