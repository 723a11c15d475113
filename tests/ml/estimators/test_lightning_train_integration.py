"""`LightningEstimator` on nodes: equal to one process, noted, stopped and resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.ml.estimators.columns import Columns, EarlyStopping
from sparkdl.ml.estimators.torch_train import LightningTask, train
from sparkdl.ml.scoring.torch import module_of
from tests.doubles.labs import Lab, lab
from tests.doubles.nodes import launch
from tests.ml.torch_fits import DATA, ROWS, SEED, alone, line, weights_of

pytestmark = [
    *(pytest.mark.torch, pytest.mark.deep, pytest.mark.timeout(300)),
    pytest.mark.skipif(
        not (find_spec("lightning") and find_spec("pytorch_lightning")),
        reason="PyTorch Lightning is not installed",
    ),
]

NODES, EPOCHS = 2, 4
SAME = DATA[:1] * ROWS
"""With these the mean of the nodes' means is that of all rows, wherever they are."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("lab"), "torch", NODES) as found:
        yield found


def task(weighted: bool = False, **fields: Any) -> LightningTask:
    columns = Columns({"x": ""}, {"y": ""}, "w" if weighted else None)
    given = {"made": line, "batch_size": ROWS, "epochs": EPOCHS, "seed": SEED, **fields}
    return LightningTask(columns=columns, name="fit", **given)


def test_trainer_trains_as_the_module_alone_and_its_logs_are_the_history(nodes: Lab) -> None:
    nodes.begin(train, task(validates=True, weighted=True))
    validating = nodes.cluster.feed_async(SAME[:8], epochs=EPOCHS, feed="validation")
    nodes.cluster.feed(SAME, epochs=EPOCHS)
    validating.result(60.0)
    results = nodes.results()
    history = results[0]["history"]
    assert history == results[1]["history"]
    assert history["epoch"] == [0.0, 1.0, 2.0, 3.0]
    losses, weights = alone(EPOCHS, weighted=True, rows=[0] * ROWS)
    assert history["loss"] == pytest.approx(losses, rel=1e-4)
    assert history["val_loss"][:-1] == pytest.approx(losses[1:], rel=1e-4)
    found = weights_of(module_of(results[0]["content"]))
    assert all(map(partial(np.allclose, atol=1e-4), found, weights))


def test_killed_node_costs_no_row_and_no_epoch(tmp_path: Path) -> None:
    marker = tmp_path / "died"

    def die(module: Any) -> None:
        if module.current_epoch == 2:
            with suppress(FileExistsError):
                marker.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    asked = task(
        made=partial(line, logs=die), saves=True, stopping=EarlyStopping(4), validates=True
    )
    options: dict[str, Any] = {"max_restarts": 1, "checkpoint_dir": str(tmp_path / "saved")}
    with launch(train, asked, NODES, framework="torch", **options) as cluster:
        validating = cluster.feed_async(SAME, epochs=EPOCHS, feed="validation")
        cluster.feed(SAME, epochs=EPOCHS)
        results = cluster.results(120.0)
        validating.result(60.0)
    assert marker.exists()
    history = results[0]["history"]
    assert history["epoch"] == [0.0, 1.0, 2.0, 3.0]
    losses = alone(EPOCHS, rows=[0] * ROWS)[0]
    assert history["loss"] == pytest.approx(losses, rel=1e-4)
    assert history["val_loss"][:-1] == pytest.approx(losses[1:], rel=1e-4)
