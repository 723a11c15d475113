"""PyTorch's estimators on nodes: equal to one process, whatever the rows and whatever fails."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.core.errors import NodeFailedError
from sparkdl.core.options import Startup
from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.torch_train import ModuleTask, TorchTask, train
from sparkdl.ml.scoring.torch import module_of
from tests.doubles.labs import Lab, lab_of
from tests.doubles.nodes import launch
from tests.ml.torch_fits import (
    DATA,
    ROWS,
    SEED,
    W,
    Y,
    adam,
    alone,
    die_once,
    distance,
    line,
    net,
    normed,
    partly_used,
    still,
    stop_on_one,
    weights_of,
    worsen,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

NODES, EPOCHS = 2, 5
ALL = ROWS
"""A batch of all rows: a step is over all of them, wherever they are."""


nodes = lab_of("torch", NODES)


def task(weighted: bool = False, **fields: Any) -> TorchTask:
    columns = Columns({"x": ""}, {"y": ""}, "w" if weighted else None)
    given = {"made": net, "batch_size": ALL, "epochs": EPOCHS, "loss": "MSELoss", **fields}
    given = {"optimizer": adam, "seed": SEED, **given}
    return TorchTask(columns=columns, name="fit", **given)


def fitted(nodes: Lab, asked: ModuleTask, epochs: int | None = None, rows: Any = DATA) -> list[Any]:
    """Have the nodes train on the rows; return what they return."""
    nodes.begin(train, asked)
    epochs = epochs or asked.epochs
    validating = None
    if asked.validates:
        validating = nodes.cluster.feed_async(rows[:7], epochs=epochs, feed="validation")
    nodes.cluster.feed(rows, epochs=epochs)
    if validating is not None:
        validating.result(60.0)
    return nodes.results()


def trained(results: list[Any]) -> Any:
    """Return the module that the chief returned."""
    others = [["history"]] * (len(results) - 1)
    assert [sorted(each) for each in results] == [["content", "history", "signature"], *others]
    assert all(each["history"] == results[0]["history"] for each in results)
    return module_of(results[0]["content"])


@pytest.mark.smoke
def test_two_nodes_train_as_one_process_does(nodes: Lab) -> None:
    results = fitted(nodes, task(weighted=True))
    losses, weights = alone(EPOCHS, weighted=True)
    assert results[0]["history"]["loss"] == pytest.approx(losses, rel=1e-4)
    found = weights_of(trained(results))
    assert all(map(partial(np.allclose, atol=1e-4), found, weights))


@pytest.mark.deep
def test_module_of_lightning_trains_as_alone_and_its_logs_are_the_history(nodes: Lab) -> None:
    same = DATA[:1] * ROWS  # the mean of the nodes' means is that of all rows, wherever they are
    columns = Columns({"x": ""}, {"y": ""}, "w")
    fields: dict[str, Any] = {"made": line, "batch_size": ROWS, "epochs": EPOCHS, "seed": SEED}
    results = fitted(nodes, ModuleTask(columns=columns, name="fit", **fields), rows=same)
    assert results[0]["history"]["epoch"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    losses, weights = alone(EPOCHS, weighted=True, rows=[0] * ROWS)
    assert results[0]["history"]["loss"] == pytest.approx(losses, rel=1e-4)
    assert all(map(partial(np.allclose, atol=1e-4), weights_of(trained(results)), weights))


@pytest.mark.smoke
def test_history_is_the_mean_over_all_rows_however_they_lie(nodes: Lab) -> None:
    """With a rate of 0, for the weights stay those of the beginning."""
    fields = {"batch_size": 3, "optimizer": still, "validates": True, "shuffle": True}
    metrics: dict[str, Any] = {"mae": distance}
    if find_spec("torchmetrics"):
        from torchmetrics import MeanSquaredError

        metrics["mse"] = MeanSquaredError()
    results = fitted(nodes, task(weighted=True, metrics=metrics, **fields), epochs=EPOCHS)
    history = results[0]["history"]
    import torch

    with torch.no_grad():
        errors = trained(results)(torch.tensor([row["x"] for row in DATA]))[:, 0].numpy() - Y
    for prefix, rows in (("", slice(None)), ("val_", slice(7))):
        means = {"loss": (errors**2 * W)[rows].mean(), "mae": abs(errors)[rows].mean()}
        means["mse"] = (errors**2)[rows].mean()
        for name in ("loss", *metrics):
            assert history[prefix + name] == pytest.approx([means[name]] * EPOCHS, rel=1e-5)


@pytest.mark.smoke
def test_lone_rows_are_no_trouble_to_batch_norm(nodes: Lab) -> None:
    labelled = [{**row, "y": float(row["y"] > 0)} for row in DATA[:33]]
    asked = task(made=normed, loss="CrossEntropyLoss", batch_size=4, metrics=["accuracy"], epochs=8)
    results = fitted(nodes, asked, rows=labelled)
    module = trained(results)
    assert all(np.isfinite(each.numpy()).all() for each in module.buffers())
    assert module[1].running_var.numpy() != pytest.approx(1.0)
    losses = results[0]["history"]["loss"]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.smoke
def test_callbacks_stop_all_nodes_and_the_best_checkpoint_is_the_model(nodes: Lab) -> None:
    asked = task(epochs=50, callbacks=partial(worsen, 4), validates=True)
    results = fitted(nodes, asked, epochs=7)
    values = results[0]["history"]["val_loss"]
    assert len(values) == 7
    assert min(values) == values[4]
    _, weights = alone(5)
    assert all(map(partial(np.allclose, atol=1e-4), weights_of(trained(results)), weights))
    results = fitted(nodes, task(callbacks=partial(stop_on_one, 1)), epochs=2)
    assert [len(each["history"]["loss"]) for each in results] == [2, 2]


@pytest.mark.deep
def test_parameters_without_a_part_in_a_step_need_a_strategy_that_looks() -> None:
    def losses_by(strategy: str) -> Any:
        asked = task(made=partly_used, trainer_args={"strategy": strategy})
        with launch(train, asked, NODES, framework="torch") as cluster:
            cluster.feed(DATA, epochs=EPOCHS)
            return cluster.results(60.0)[0]["history"]["loss"]

    found = losses_by("ddp_find_unused_parameters_true")
    assert found == pytest.approx(alone(EPOCHS)[0], rel=1e-4)
    with pytest.raises(NodeFailedError, match="strategy='ddp_find_unused_parameters_true'"):
        losses_by("ddp")


@pytest.mark.smoke
def test_killed_fit_has_the_rows_history_and_end_of_an_undisturbed_one(tmp_path: Path) -> None:
    """On one node: that several go on in step is proved in tests/test_lightning.py."""
    callbacks = partial(die_once, tmp_path / "died", 3)
    asked = task(epochs=50, saves=True, validates=True, callbacks=callbacks)
    options: dict[str, Any] = {"max_restarts": 1, "checkpoint_dir": str(tmp_path / "saved")}
    options["startup"] = Startup(preload=["lightning.pytorch"])  # once, for both generations
    with launch(train, asked, 1, framework="torch", **options) as cluster:
        validating = cluster.feed_async(DATA, epochs=7, feed="validation")
        report = cluster.feed(DATA, epochs=7)
        results = cluster.results(120.0)
        validating.result(60.0)
    assert (tmp_path / "died").exists()
    assert report.rows_used >= EPOCHS * ROWS
    losses, weights = alone(3)
    history = results[0]["history"]
    assert history["loss"][:3] == pytest.approx(losses, rel=1e-4)
    assert [len(values) for values in history.values()] == [EPOCHS, EPOCHS], "two worse ones"
    assert all(map(partial(np.allclose, atol=1e-4), weights_of(trained(results)), weights))
