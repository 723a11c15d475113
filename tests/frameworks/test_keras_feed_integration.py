"""`model.fit` over feeds of a cluster: no steps to count, no row lost, early stops end feeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.core.errors import EndOfFeedError
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab, lab
from tests.doubles.nodes import launch

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

SOON_S = 120.0
LITTLE = 1 << 14


@pytest.fixture(scope="module")
def pair(run_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes."""
    with lab(tmp_path_factory.mktemp("pair"), "tensorflow", 2) as made:
        yield made


@pytest.fixture(scope="module")
def single(run_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One node, whose feeds have little room."""
    options = {"feed_memory": LITTLE, "feed_disk": 0}
    with lab(tmp_path_factory.mktemp("single"), "tensorflow", 1, **options) as made:
        yield made


def tables(*sizes: int) -> list[pa.Table]:
    """Return tables of so many rows; the rows' column "x" is 1, so that its sum counts them."""
    filler = [bytes(200)]
    return [pa.table({"x": [1.0] * n, "y": [0.5] * n, "f": filler * n}) for n in sizes]


@cache
def strategy_of_workers() -> Any:
    """Return the strategy of a node; a second one would cut the first one's connections."""
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def fit(args: dict[str, Any], ctx: NodeContext) -> dict[str, Any]:
    """Fit a model on the feed, under a strategy if there are several nodes.

    Args: `feed`, `eval` (a feed to validate with), `prefetch`, `stop_after` so many epochs, and
        `epochs`, 3 by default.

    Returns the history, and the rows that the model has seen by epoch.
    """
    import contextlib

    import keras
    import tensorflow as tf

    several = ctx.num_workers > 1
    strategy = strategy_of_workers() if several else None

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

    validation = ctx.dataset(8, x="x", y="y", feed=args["eval"]) if "eval" in args else None
    history = model.fit(
        ctx.dataset(8, x="x", y="y", feed=args["feed"], prefetch=args.get("prefetch", 2)),
        validation_data=validation,
        epochs=args.get("epochs", 3),
        callbacks=[Count(), Stop()],
        verbose=0,
    )
    return {"history": history.history, "rows": counts}


def test_two_workers_fit_uneven_partitions_without_a_number_of_steps(pair: Lab) -> None:
    pair.begin(fit, {"feed": "uneven", "eval": "uneven-eval"})
    cluster = pair.cluster
    evaluating = cluster.feed_async(tables(1, 30), 3, name="uneven-eval", timeout_s=SOON_S)
    report = cluster.feed(tables(1, 100, 0, 36), 3, name="uneven", timeout_s=SOON_S)
    assert evaluating.result(SOON_S).rows_used == 93
    chief, worker = pair.results()
    assert (report.rows_used, report.rows_unused, report.passes) == (411, 0, 1)
    assert len(set(report.steps.values())) == 1
    assert chief["history"] == worker["history"]
    assert len(chief["history"]["val_loss"]) == 3


def test_one_fit_of_two_workers_goes_on_over_all_micro_batches_of_a_stream(pair: Lab) -> None:
    pair.begin(fit, {"feed": "stream", "epochs": 1})
    stream = pair.cluster.open_stream("stream", timeout_s=SOON_S)
    assert all(stream.feed(table) for table in tables(1, 1, 3, 0, 30, 2, 3))
    stream.end()
    chief, worker = pair.results()
    counts = pair.cluster._controller.look(
        lambda view: [count for (_, name), count in view.feeds.items() if name == "stream"]
    )
    assert sum(count.rows_consumed for count in counts) == 40
    assert len({count.steps for count in counts}) == 1
    assert chief["history"] == worker["history"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_row_is_lost_to_the_look_at_the_first_batch(single: Lab, prefetch: int) -> None:
    feed = f"prefetch-{prefetch}"
    single.begin(fit, {"feed": feed, "prefetch": prefetch})
    report = single.cluster.feed(tables(*[50] * 10), 3, name=feed, timeout_s=SOON_S)
    (result,) = single.results()
    assert (report.rows_used, report.passes) == (1500, 3)
    assert result["rows"] == [500] * 3


@pytest.mark.parametrize("nodes", ["single", "pair"])
def test_fit_that_is_stopped_early_ends_the_feeds_it_reads(
    request: pytest.FixtureRequest, nodes: str
) -> None:
    made: Lab = request.getfixturevalue(nodes)
    feeds = {"feed": "stopped", "eval": "stopped-eval"}
    made.begin(fit, {**feeds, "stop_after": 2, "epochs": 1000})
    cluster = made.cluster
    evaluating = cluster.feed_async(tables(20), 1000, name=feeds["eval"], timeout_s=SOON_S)
    cluster.feed(tables(50, 50), 1000, name=feeds["feed"], timeout_s=SOON_S)
    evaluating.result(SOON_S)
    results = made.results()
    assert [len(result["history"]["loss"]) for result in results] == [2] * made.size


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
    pair: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    pair.begin(fit, {"feed": "ended", "eval": "ended-eval", "epochs": 5})
    cluster = pair.cluster
    evaluating = cluster.feed_async(tables(20, 4), 5, name="ended-eval", timeout_s=SOON_S)
    cluster.feed(tables(50, 3), 2, name="ended", timeout_s=SOON_S)
    cluster.end_feeds("ended")
    evaluating.result(SOON_S)
    results = pair.results()
    assert [len(result["history"]["val_loss"]) for result in results] == [2, 2]
    assert results[0]["history"] == results[1]["history"]
    assert min(results[0]["history"]["loss"]) > 0
    assert "feed 'ended' has ended, and map_fun on" in caplog.text
