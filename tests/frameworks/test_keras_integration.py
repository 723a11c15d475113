"""Keras 3 on nodes of TensorFlow: what the shim promises, and `fit` over feeds."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab, lab_of
from tests.frameworks.programs.models import strategy_of_workers

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(400)]

SOON_S = 120.0
_NOISE = 1e-5

Results = list[dict[str, Any]]
"""Those of the chief and of the worker."""


pair, single = lab_of("tensorflow", 2), lab_of("tensorflow", 1)


def program(args: tuple[str, Path], ctx: NodeContext) -> Any:
    name, folder = args
    return import_module(f"tests.frameworks.programs.{name}").main(ctx.rank, folder)


# the shim


def ran(pair: Lab, factory: pytest.TempPathFactory, name: str) -> Results:
    pair.begin(program, (name, factory.mktemp(name)))
    return pair.results()


@pytest.fixture(scope="module")
def trained(pair: Lab, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return ran(pair, tmp_path_factory, "keras_trains")


@pytest.fixture(scope="module")
def saved(pair: Lab, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return ran(pair, tmp_path_factory, "keras_saves")


@pytest.mark.parametrize("case", ["arrays", "dicts", "stream", "executions"])
def test_workers_end_with_the_same_weights_and_losses(trained: Results, case: str) -> None:
    chief, worker = (result[case] for result in trained)
    assert chief["weights"] == worker["weights"]
    assert chief.get("history") == worker.get("history")


@pytest.mark.parametrize("case", ["arrays", "dicts"])
def test_two_workers_train_as_one_process_on_the_global_batch(trained: Results, case: str) -> None:
    chief, worker = (result[case] for result in trained)
    for found in (chief, worker):
        assert found["weights"] == pytest.approx(chief["expected_weights"], abs=_NOISE)


def test_metrics_and_validation_are_those_of_all_rows(trained: Results) -> None:
    chief, worker = (result["arrays"] for result in trained)
    for found in (chief, worker):
        assert set(found["history"]) >= {"loss", "AUC", "val_loss", "val_accuracy", "val_AUC"}
        for name, values in chief["expected_history"].items():
            assert found["history"][name] == pytest.approx(values, abs=_NOISE), name


def test_evaluate_gives_every_worker_the_value_for_all_rows(trained: Results) -> None:
    chief, worker = (result["arrays"] for result in trained)
    assert chief["evaluate"] == worker["evaluate"]
    assert chief["evaluate"] == pytest.approx(chief["expected_evaluate"], abs=_NOISE)


def test_building_the_model_takes_no_row_from_the_data(trained: Results) -> None:
    assert [(r["stream"]["starts"], r["stream"]["seen"]) for r in trained] == [(1, 32)] * 2


@pytest.mark.parametrize("case", ["outside", "within", "on_batch", "alone", "distributed"])
def test_predict_gives_each_worker_the_predictions_of_its_rows(trained: Results, case: str) -> None:
    assert [result["predict"][case] < _NOISE for result in trained] == [True, True]


def test_predict_leaves_the_model_under_its_strategy(trained: Results) -> None:
    chief, worker = (result["predict"] for result in trained)
    assert chief["strategy_kept"]
    assert chief["lazy_weights"] == worker["lazy_weights"] != []


def test_several_steps_per_execution_are_taken_as_one(trained: Results) -> None:
    assert all(result["executions"]["error"] < _NOISE for result in trained)


def test_model_without_strategy_trains_beside_a_cluster(trained: Results) -> None:
    assert [result["dicts"]["predicted"] for result in trained] == [5, 5]


@pytest.mark.smoke
def test_only_the_chief_saves(saved: Results) -> None:
    chief, worker = (result["saves"] for result in saved)
    assert chief["files"] == [
        "exported",
        "function.keras",
        "legacy.h5",
        "method.keras",
        "only.weights.h5",
    ]
    assert chief["loaded"] < _NOISE
    assert worker["files"] == []


@pytest.mark.smoke
def test_only_the_chief_writes_checkpoints(saved: Results) -> None:
    chief, worker = (result["checkpoints"] for result in saved)
    assert chief["own"] == ["1.keras", "2.keras"]
    assert worker["own"] == []
    assert chief["shared"] == worker["shared"] == ["best.weights.h5"]
    assert worker["path_kept"]


@pytest.mark.smoke
def test_backup_of_keras_is_refused_on_several_workers(saved: Results) -> None:
    assert ["sparkdl.keras.Checkpoint(ctx)" in result["backup"] for result in saved] == [True] * 2


@pytest.mark.smoke
def test_private_files_are_deleted(saved: Results) -> None:
    assert [result["left"] for result in saved] == [[], []]


def uses_a_wrapper(args: None, ctx: NodeContext) -> tuple[bool, str, bool]:
    import sys

    import keras

    before = "sklearn.base" in sys.modules
    found = keras.wrappers.SKLearnClassifier
    return before, found.__name__, "sklearn.base" in sys.modules


@pytest.mark.deep
def test_wrappers_of_other_libraries_import_them_when_they_are_used(single: Lab) -> None:
    pytest.importorskip("sklearn")
    single.begin(uses_a_wrapper, None)
    assert single.results() == [(False, "SKLearnClassifier", True)]


# feeds


def tables(*sizes: int) -> list[pa.Table]:
    """Return tables of so many rows; the rows' column "x" is 1, so that its sum counts them."""
    filler = [bytes(200)]
    return [pa.table({"x": [1.0] * n, "y": [0.5] * n, "f": filler * n}) for n in sizes]


def fit(args: dict[str, Any], ctx: NodeContext) -> dict[str, Any]:
    """Fit a model on the feed; return the history.

    Args: `feed`, `eval` (a feed to validate with), `stop_after` so many epochs, and `epochs`, 3 by
        default.
    """
    import keras

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch + 1 == args.get("stop_after")

    with strategy_of_workers().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    validation = ctx.dataset(8, x="x", y="y", feed=args["eval"]) if "eval" in args else None
    history = model.fit(
        ctx.dataset(8, x="x", y="y", feed=args["feed"]),
        validation_data=validation,
        epochs=args.get("epochs", 3),
        callbacks=[Stop()],
        verbose=0,
    )
    return {"history": history.history}


def test_two_workers_fit_uneven_partitions_without_a_number_of_steps(pair: Lab) -> None:
    pair.begin(fit, {"feed": "uneven", "eval": "uneven-eval"})
    cluster = pair.cluster
    evaluating = cluster.feed_async(tables(1, 30), 3, feed="uneven-eval", timeout_s=SOON_S)
    report = cluster.feed(tables(1, 100, 0, 36), 3, feed="uneven", timeout_s=SOON_S)
    assert evaluating.result(SOON_S).rows_used == 93
    chief, worker = pair.results()
    assert (report.rows_used, report.rows_unused, report.passes) == (411, 0, 1)
    assert len(set(report.steps.values())) == 1
    assert chief["history"] == worker["history"]
    assert len(chief["history"]["val_loss"]) == 3


def adapt(args: None, ctx: NodeContext) -> list[str]:
    """Adapt layers to the feed, each time to another part of it; return the errors."""
    import keras

    rows = ctx.dataset(4, x="x", feed="adapting")
    layers = keras.layers
    found = []
    for layer in (
        layers.Normalization(axis=None),
        layers.IntegerLookup(),
        layers.Discretization(2),
    ):
        try:
            layer.adapt(rows.map(lambda x: x))
        except ConfigError as error:
            found.append(str(error))
    layers.Normalization(axis=None).adapt(np.arange(4.0))  # which all nodes have
    strategy_of_workers()
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    try:
        model.fit(rows.map(lambda x: (x, x)), verbose=0)
    except ConfigError as error:
        found.append(str(error))
    assert list(rows)
    return found


def test_neither_layers_nor_models_without_a_strategy_take_the_rows_of_one_node(pair: Lab) -> None:
    pair.begin(adapt, None)
    pair.cluster.feed(tables(8, 8), 1, feed="adapting", timeout_s=SOON_S)
    for found in pair.ended("adapting"):
        assert len(found) == 4
        assert "IntegerLookup.adapt() was given the feed of one of several nodes" in found[1]
        assert "fit outside of a distribution strategy: 2 nodes share the rows of" in found[3]


@pytest.mark.smoke
def test_fit_that_is_stopped_early_ends_the_feeds_it_reads(pair: Lab) -> None:
    feeds = {"feed": "stopped", "eval": "stopped-eval"}
    pair.begin(fit, {**feeds, "stop_after": 2, "epochs": 1000})
    cluster = pair.cluster
    evaluating = cluster.feed_async(tables(20), 1000, feed=feeds["eval"], timeout_s=SOON_S)
    cluster.feed(tables(50, 50), 1000, feed=feeds["feed"], timeout_s=SOON_S)
    evaluating.result(SOON_S)
    results = pair.results()
    assert [len(result["history"]["loss"]) for result in results] == [2, 2]


def test_two_workers_end_fit_at_the_same_epoch_and_with_it_all_its_feeds(
    pair: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    pair.begin(fit, {"feed": "ended", "eval": "ended-eval", "epochs": 5})
    cluster = pair.cluster
    evaluating = cluster.feed_async(tables(20, 4), 5, feed="ended-eval", timeout_s=SOON_S)
    cluster.feed(tables(50, 3), 2, feed="ended", timeout_s=SOON_S)
    cluster.end_feeds("ended")
    evaluating.result(SOON_S)
    results = pair.results()
    assert [len(result["history"]["val_loss"]) for result in results] == [2, 2]
    assert results[0]["history"] == results[1]["history"]
    assert min(results[0]["history"]["loss"]) > 0
    assert "feed 'ended' has ended, but map_fun on" in caplog.text
