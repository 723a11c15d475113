"""A feed as a `tf.data.Dataset`: types as they are, each iteration an epoch, batches kept whole."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.core.errors import ConfigError, EndOfFeedError, FeedTypeError
from sparkdl.datasets.keras_epochs import patch_fit_for_feeds
from sparkdl.datasets.tensorflow import let_strategies_keep_batches, tf_dataset
from sparkdl.feed.reader.batches import EpochBatches
from sparkdl.feed.store.buffer import AppendRequest
from tests.doubles.feeds import Arrivals, LocalNode, Running, labelled, numbers, vectors
from tests.doubles.lazy import Lazy

keras: Any = Lazy("keras")
tf: Any = Lazy("tensorflow")
pytestmark = pytest.mark.tensorflow


@pytest.fixture(autouse=True)
def _strategies_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    original = tf.distribute.Strategy.experimental_distribute_dataset
    monkeypatch.setattr(tf.distribute.Strategy, "experimental_distribute_dataset", original)


def dataset(it: Arrivals, x: Any = None, y: Any = None, batch_size: int = 4) -> Any:
    names = [n for part in (x, y) for n in ([part] if isinstance(part, str) else part or [])]
    return tf_dataset(EpochBatches(it.reader, batch_size, tuple(names) or None), x, y)


def test_elements_have_the_types_of_the_rows() -> None:
    features = tf.TensorSpec((None, 2), tf.float32)
    labels = tf.TensorSpec((None,), tf.int64)
    names = tf.TensorSpec((None,), tf.string)
    with Arrivals() as it:
        it.batch(labelled(0, 3))
        everything = {"x": features, "y": labels, "s": names}
        assert dataset(it).element_spec == everything
        assert dataset(it, "x").element_spec == features
        assert dataset(it, "x", "y").element_spec == (features, labels)
        assert dataset(it, ["x", "s"], "y").element_spec == ({"x": features, "s": names}, labels)
        assert dataset(it, "x", ["y", "s"]).element_spec == (features, {"y": labels, "s": names})


def test_sparse_vectors_stay_sparse_and_keras_trains_on_them() -> None:
    with Arrivals() as it:
        it.batch(vectors(0, 9, 4))
        it.end_epoch(0)
        it.batch(vectors(0, 9, 4), 1)
        it.end_epoch(1)
        data = tf_dataset(EpochBatches(it.reader, 4, sparse=("x",)), "x", "y")
        assert data.element_spec[0] == tf.SparseTensorSpec((None, 4), tf.float64)
        rows = [row for x, _ in data for row in tf.sparse.to_dense(x).numpy().tolist()]
        assert rows == [[row, 0, 0, 1] for row in range(9)]
        model = keras.Sequential([keras.Input((4,), sparse=True), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        assert [model.train_on_batch(x, y) for x, y in data]


@pytest.mark.parametrize("count", [3, 8])
def test_epoch_read_ahead_to_its_end_is_over_once_its_batches_are_asked_for(count: int) -> None:
    with Arrivals() as it:
        for epoch in range(2):
            it.batch(labelled(0, count), epoch)
            it.end_epoch(epoch)
        it.end()
        data = tf_dataset(EpochBatches(it.reader, 4, ("y",)), "y", None, ahead=2)
        for epoch in range(2):
            for _ in range(3):
                assert next(iter(data)).numpy()[0] == 0
            assert [v for batch in data for v in batch.numpy().tolist()] == list(range(count))
            assert it.consumed == (count * (epoch + 1), epoch + 1)


def test_feed_that_ended_before_a_row_came_has_no_types() -> None:
    with Arrivals() as it:
        it.end()
        with pytest.raises(EndOfFeedError, match="ended before any row came"):
            dataset(it)


@pytest.mark.parametrize(
    ("counts", "says"), [({0: 1, 1: 0}, "1 rows for 2 nodes"), ({}, "no row for this node")]
)
def test_node_without_rows_learns_at_once_of_no_types(counts: dict[int, int], says: str) -> None:
    with Arrivals() as it:
        making = Running(lambda: dataset(it))
        it.waits.wait_for_waiter()
        it.end_epoch(0, counts)
        with pytest.raises(ConfigError, match=rf"epoch 0 of feed 'input' has {says}; .*fewer node"):
            making.result()


LISTS = pa.record_batch(
    {
        "ids": pa.array([[1], [2, 3], []], pa.list_(pa.int32())),
        "words": [["a"], ["b", "c"], []],
        "deep": pa.array([[[1]], [[2, 3], []], []], pa.list_(pa.list_(pa.int64()))),
        "at": pa.array([[5], [], [6, 7]], pa.list_(pa.timestamp("us"))),
    }
)


def test_arrays_of_different_lengths_are_refused_without_padding() -> None:
    with Arrivals() as it:
        it.batch(LISTS)
        with pytest.raises(FeedTypeError, match=r"different lengths.*pad=\{'ids': None\}"):
            dataset(it, "ids", batch_size=3)


@pytest.mark.parametrize("length", [None, 4])
def test_padded_arrays_are_tensors_with_lengths_and_masks(length: int | None) -> None:
    with Arrivals() as it:
        it.batch(LISTS)
        it.end_epoch(0)
        columns = ("ids", "ids.mask", "ids.length")
        batches = EpochBatches(it.reader, 2, columns, tail="pad", pad={"ids": length})
        data = tf_dataset(batches, ["ids", "ids.mask"], "ids.length")
        specs, _, _ = data.element_spec
        assert specs["ids"].shape.as_list() == specs["ids.mask"].shape.as_list() == [2, length]
        (first, lengths, weight), (second, _, last_weight) = data
        width = length or 2
        assert first["ids"].numpy().tolist() == [
            [1] + [0] * (width - 1),
            [2, 3] + [0] * (width - 2),
        ]
        assert first["ids.mask"].numpy().sum(axis=1).tolist() == lengths.numpy().tolist() == [1, 2]
        assert second["ids"].shape == (2, length or 0)
        assert (weight.numpy().tolist(), last_weight.numpy().tolist()) == ([1, 1], [1, 0])


def test_times_are_integers_and_a_struct_is_its_fields() -> None:
    batch = pa.record_batch(
        {
            "at": pa.array([1_000_001, 2], pa.timestamp("us", "UTC")),
            "day": pa.array([1, 2], pa.date32()),
            "c": [{"a": 1, "b": {"d": 2.0}}, {"a": 3, "b": {"d": 4.0}}],
        }
    )
    with Arrivals() as it:
        it.batch(batch)
        it.end_epoch(0)
        data = dataset(it, ["at", "c"], "day")
        assert {spec.dtype for spec in data.element_spec[0].values()} == {tf.int64, tf.float64}
        ((x, y),) = data
        assert {name: value.numpy().tolist() for name, value in x.items()} == {
            "at": [1_000_001, 2],
            "c.a": [1, 3],
            "c.b.d": [2.0, 4.0],
        }
        assert y.numpy().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        (
            [[1, 2], [3, 4]],
            [[1], [2, 3]],
            r"held int64 \[2\] in the first rows, and holds arrays of",
        ),
        ([[1, 2], [3, 4]], [[1], [2]], r"and holds values of int64 \[1\] now.*pad=\{'c': None\}"),
        ([1, 2], [0.5, 1.5], r"held int64 \[\] in the first rows, and holds values of float64"),
        ([1, 2], [3, None], "holds 1 null among 2 values"),
    ],
)
def test_rows_unlike_the_first_ones_are_named(first: Any, later: Any, words: str) -> None:
    with Arrivals() as it:
        it.batch(pa.record_batch({"c": first}))
        it.batch(pa.record_batch({"c": later}))
        it.end_epoch(0)
        data = dataset(it, "c", batch_size=2)
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            list(data)
        assert isinstance(it.reader.registry.raised, FeedTypeError)
        with pytest.raises(FeedTypeError, match=f"column 'c' .*{words}|column 'c' {words}"):
            raise it.reader.registry.raised
        assert str(it.reader.registry.raised) in str(raised.value)


def model(strategy: Any = None) -> Any:
    """Return a model that adds up the labels it was fed, as the metric "seen"."""

    class Seen(tf.keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="seen")
            self.total = self.add_weight(name="total", initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(tf.reduce_sum(tf.cast(y_true, tf.float32)))

        def result(self) -> Any:
            return self.total + 0.0

    with strategy.scope() if strategy is not None else tf.device("cpu"):
        built = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        built.compile("sgd", "mse", metrics=[Seen()])
    return built


def fit(model: Any, node: LocalNode, epochs: int) -> list[float]:
    patch_fit_for_feeds()
    data = tf_dataset(EpochBatches(node.reader(), 4, ("x", "y")), "x", "y")
    history = model.fit(data, epochs=epochs, verbose=0, shuffle=False).history
    return [float(seen) for seen in history["seen"]]


def test_fit_reads_as_many_epochs_as_it_is_told_and_every_row_of_them() -> None:
    built = model(tf.distribute.MirroredStrategy(["CPU:0"]))
    with LocalNode() as node:
        log = node.feeds.store.log("input")
        for epoch in range(3):
            for start, stop in ((0, 6), (6, 10)):
                batch = labelled(epoch * 10 + start, epoch * 10 + stop)
                assert log.append(batch, AppendRequest(epoch))
            node.end_epoch(epoch, {0: 10})
        assert fit(built, node, 2) == [sum(range(10)), sum(range(10, 20))]
        reader = node.reader()
        left = [v for batch in EpochBatches(reader, 4) for v in batch["y"].tolist()]
        assert left == list(range(20, 30))


@pytest.mark.parametrize(("steps", "found"), [(3, [3] * 4), (5, [5, 5, 2])])
def test_fit_takes_the_steps_it_is_told_over_ends_of_epochs(steps: int, found: list[int]) -> None:
    built = keras.Sequential([keras.layers.Dense(1)])  # built by a look at the first batch
    built.compile("sgd", "mse")
    patch_fit_for_feeds()
    ends: list[int] = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: ends.append(0),
        on_train_batch_end=lambda batch, logs: ends.append(ends.pop() + 1),
    )
    with Arrivals() as it:
        for epoch in range(4):
            it.batch(labelled(0, 12), epoch)
            it.end_epoch(epoch)
        it.end()
        data = tf_dataset(EpochBatches(it.reader, 4, ("x", "y")), "x", "y", ahead=2)
        mapped = data.map(lambda x, y: (x, y)).prefetch(1)
        options = {"epochs": len(found), "steps_per_epoch": steps, "callbacks": [count]}
        built.fit(*(mapped,), verbose=0, shuffle=False, **options)
        assert ends == found
        if steps == 3:
            assert it.consumed == (48, 4)


def test_keras_warns_of_a_feed_that_is_short_of_steps_and_of_no_epochs_end() -> None:
    patch_fit_for_feeds()
    built = model()
    with Arrivals() as it:
        for epoch in range(3):
            it.batch(labelled(0, 8), epoch)
            it.end_epoch(epoch)
        it.end()
        data = dataset(it, "x", "y")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            built.fit(data, epochs=2, verbose=0, shuffle=False)
        with pytest.warns(UserWarning, match="ran out of data"):
            built.evaluate(data, steps=5, verbose=0)


def distribute(num_workers: int, data: Any) -> list[str]:
    """Distribute `data` with a strategy of that many nodes; return what was done."""
    done: list[str] = []

    class Fake:
        extended = SimpleNamespace(_num_workers=num_workers)

        def distribute_datasets_from_function(self, function: Any, options: Any) -> None:
            assert function(None) is data
            done.append("kept")

    def original(self: Any, dataset: Any, options: Any = None) -> None:
        assert dataset is data
        done.append("cut")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.distribute.Strategy, "experimental_distribute_dataset", original)
        for _ in range(2):
            let_strategies_keep_batches()
        tf.distribute.Strategy.experimental_distribute_dataset(Fake(), data)
    return done


@pytest.mark.parametrize(
    ("nodes", "change", "done"),
    [
        (2, lambda ours, others: ours, "kept"),
        (2, lambda ours, others: ours.map(lambda x: x + 1).prefetch(1), "kept"),
        (2, lambda ours, others: ours.unbatch().batch(2), "cut"),
        (2, lambda ours, others: ours.rebatch(2), "cut"),
        (2, lambda ours, others: ours.unbatch().ragged_batch(2), "cut"),
        (2, lambda ours, others: others, "cut"),
        (2, lambda ours, others: type(ours).zip((ours, others)), "cut"),
        (1, lambda ours, others: ours, "cut"),
    ],
)
def test_strategies_of_many_nodes_keep_a_feeds_batches(nodes: int, change: Any, done: str) -> None:
    with Arrivals() as it:
        it.batch(numbers(0, 3))
        others = tf.data.Dataset.range(4).batch(2)
        assert distribute(nodes, change(dataset(it, "x"), others)) == [done]


def test_position_is_what_was_used_of_what_is_made_ready_in_advance() -> None:
    with Arrivals(tracks=True) as it:
        for epoch in range(2):
            it.batch(labelled(epoch * 10, epoch * 10 + 10), epoch)
            it.end_epoch(epoch)
        count = 0
        batches = dataset(it, "y").prefetch(2)
        for epoch in range(2):
            used: list[int] = []
            for batch in batches:
                used += batch.numpy().tolist()
                count += 1
                assert used == list(range(epoch * 10, epoch * 10 + len(used)))
                position = it.reader.position(count)
                assert position[epoch] == {epoch: ((0, len(used)),)}
                with pytest.raises(ConfigError, match="Pass batches="):
                    it.reader.position(None)
        assert it.reader.position(count) == {epoch: {epoch: ((0, 10),)} for epoch in range(2)}
