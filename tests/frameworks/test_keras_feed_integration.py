"""`model.fit` over feeds of a cluster: no steps to count, no row lost, early stops end feeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.core.errors import EndOfFeedError
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

SOON_S = 120.0
LITTLE = 1 << 14


def tables(*sizes: int) -> list[pa.Table]:
    """Return tables of so many rows; the rows' column "x" is 1, so that its sum counts them."""
    filler = [bytes(200)]
    return [pa.table({"x": [1.0] * n, "y": [0.5] * n, "f": filler * n}) for n in sizes]


def fit(args: dict[str, Any], ctx: NodeContext) -> dict[str, Any]:
    """Fit a model on the feed, under a strategy if there are several nodes.

    Args: `validates`, `prefetch`, `stop_after` so many epochs, and `epochs`, 3 by default.

    Returns the history, and the rows that the model has seen by epoch.
    """
    import contextlib

    import keras
    import tensorflow as tf

    several = ctx.num_workers > 1
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else None

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch + 1 == args.get("stop_after")

    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        count = keras.metrics.MeanMetricWrapper(lambda y, p: tf.ones_like(p), name="ones")
        model.compile("sgd", "mse", metrics=[count])
    counts: list[int] = []

    class Count(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if not several:
                counts.append(int(count.count.numpy()))

    validation = ctx.dataset(8, x="x", y="y", feed="eval") if args.get("validates") else None
    history = model.fit(
        ctx.dataset(8, x="x", y="y", prefetch=args.get("prefetch", 2)),
        validation_data=validation,
        epochs=args.get("epochs", 3),
        callbacks=[Count(), Stop()],
        verbose=0,
    )
    return {"history": history.history, "rows": counts}


def test_two_workers_fit_uneven_partitions_without_a_number_of_steps() -> None:
    with launch(fit, {"validates": True}, framework="tensorflow") as cluster:
        evaluating = cluster.feed_async(tables(1, 30), 3, name="eval", timeout_s=SOON_S)
        report = cluster.feed(tables(1, 100, 0, 36), 3, timeout_s=SOON_S)
        assert evaluating.result(SOON_S).rows_used == 93
        chief, worker = cluster.results(SOON_S)
    assert (report.rows_used, report.rows_unused, report.passes) == (411, 0, 1)
    assert len(set(report.steps.values())) == 1
    assert chief["history"] == worker["history"]
    assert len(chief["history"]["val_loss"]) == 3


def test_one_fit_of_two_workers_goes_on_over_all_micro_batches_of_a_stream() -> None:
    with launch(fit, {"epochs": 1}, framework="tensorflow") as cluster:
        stream = cluster.open_stream(timeout_s=SOON_S)
        assert all(stream.feed(table) for table in tables(1, 1, 3, 0, 30, 2, 3))
        stream.end()
        chief, worker = cluster.results(SOON_S)
        counts = cluster._controller.look(lambda view: list(view.feeds.values()))
    assert sum(count.rows_consumed for count in counts) == 40
    assert len({count.steps for count in counts}) == 1
    assert chief["history"] == worker["history"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_row_is_lost_to_the_look_at_the_first_batch(prefetch: int) -> None:
    options = {"feed_memory": LITTLE, "feed_disk": 0}
    with launch(fit, {"prefetch": prefetch}, 1, framework="tensorflow", **options) as cluster:
        report = cluster.feed(tables(*[50] * 10), 3, timeout_s=SOON_S)
        (result,) = cluster.results(SOON_S)
    assert (report.rows_used, report.passes) == (1500, 3)
    assert result["rows"] == [500] * 3


@pytest.mark.parametrize("nodes", [1, 2])
def test_fit_that_is_stopped_early_ends_the_feeds_it_reads(nodes: int) -> None:
    args = {"stop_after": 2, "epochs": 1000, "validates": True}
    with launch(fit, args, nodes, framework="tensorflow") as cluster:
        evaluating = cluster.feed_async(tables(20), 1000, name="eval", timeout_s=SOON_S)
        cluster.feed(tables(50, 50), 1000, timeout_s=SOON_S)
        evaluating.result(SOON_S)
        results = cluster.results(SOON_S)
    assert [len(result["history"]["loss"]) for result in results] == [2] * nodes


def beyond(library: str, ctx: NodeContext) -> dict[str, Any]:
    """Ask Keras for more than feeds have: epochs, steps, evaluations."""
    import importlib

    keras = importlib.import_module(library)

    def fitted(feed: str, **options: Any) -> Any:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        data = ctx.dataset(8, x="x", y="y", feed=feed)
        told: list[int] = []
        ended = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: told.append(epoch))
        history = model.fit(data, verbose=0, callbacks=[ended, *options.pop("also", [])], **options)
        losses = history.history["loss"]
        assert len(losses) == len(told)
        return model, data, losses

    stopping = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    model, data, losses = fitted("input", epochs=5, also=[stopping])
    found = {"input": losses, "best": stopping.best}
    found["gaps"] = fitted("gaps", epochs=9)[2]
    found["counted"] = fitted("counted", epochs=5, steps_per_epoch=10)[2]
    refused = []
    evaluated = ctx.dataset(8, x="x", y="y", feed="eval")
    calls: list[Callable[[], Any]] = [
        lambda: model.fit(data, verbose=0),
        lambda: model.evaluate(data, verbose=0),
        lambda: model.predict(data, verbose=0),
        lambda: fitted("long", epochs=3, validation_data=evaluated),
    ]
    for call in calls:
        try:
            call()
        except EndOfFeedError as error:
            refused.append(str(error))
    return {**found, "refused": refused}


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_epochs_that_are_not_fed_are_not_trained_nor_evaluated(library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    with launch(beyond, library, 1, framework="tensorflow") as cluster:
        counted = cluster.feed_async(tables(160), 1, name="counted", timeout_s=SOON_S)
        long = cluster.feed_async(tables(20), 3, name="long", timeout_s=SOON_S)
        evaluating = cluster.feed_async(tables(20), 1, name="eval", timeout_s=SOON_S)
        cluster.feed(tables(20), 2, timeout_s=SOON_S)
        cluster.end_feeds("input")
        for table in tables(20, 0, 20):
            cluster.feed(table, name="gaps", timeout_s=SOON_S)
        cluster.end_feeds("gaps")
        counted.result(SOON_S)
        cluster.end_feeds("counted")
        evaluating.result(SOON_S)
        cluster.end_feeds("eval")
        (found,) = cluster.results(SOON_S)
        long.cancel()
    assert len(found["input"]) == len(found["gaps"]) == len(found["counted"]) == 2
    assert all(loss > 0 for name in ("input", "gaps", "counted") for loss in found[name])
    assert found["best"] == min(found["input"])
    assert all("feed 'input' ended after 2 epochs," in text for text in found["refused"][:3])
    assert len(found["refused"]) == 4
    assert "feed 'eval' ended after 1 epoch," in found["refused"][3]


def test_two_workers_end_fit_at_the_same_epoch_and_with_it_all_its_feeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = {"epochs": 5, "validates": True}
    with launch(fit, args, framework="tensorflow") as cluster:
        evaluating = cluster.feed_async(tables(20, 4), 5, name="eval", timeout_s=SOON_S)
        cluster.feed(tables(50, 3), 2, timeout_s=SOON_S)
        cluster.end_feeds("input")
        evaluating.result(SOON_S)
        results = cluster.results(SOON_S)
    assert [len(result["history"]["val_loss"]) for result in results] == [2, 2]
    assert results[0]["history"] == results[1]["history"]
    assert min(results[0]["history"]["loss"]) > 0
    assert "feed 'input' has ended, and map_fun on" in caplog.text
