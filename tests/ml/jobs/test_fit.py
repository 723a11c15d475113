"""Rows of a partition, sums of partitions, and what Keras learns of them; no Spark."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import DenseVector, SparseVector

from sparkdl.core.errors import ConfigError, FeedTypeError, JobFailedError
from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.keras_train import KerasTask, ModelSpec
from sparkdl.ml.jobs import work
from sparkdl.ml.jobs.fit import explained
from sparkdl.ml.jobs.keras import KerasLearner, KerasMaster, as_arrays
from sparkdl.ml.jobs.work import Rows, Sum, added, num_groups, num_steps, total, weighed
from sparkdl.ml.scoring.keras_objects import saved
from sparkdl.ml.scoring.source import source_of_content
from sparkdl.node.task import Problem
from sparkdl.values.ndarrays import store_vectors


def batch(values: list[Any], labels: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"x": values, "y": labels})


def test_each_row_is_in_one_batch_of_an_epoch_and_a_second_task_finds_it(tmp_path: Path) -> None:
    labels = list(range(11))
    values = [[float(n), -float(n)] for n in labels]
    columns = ["x", "y"]
    batches = [batch(values[:4], labels[:4]), batch([], []), batch(values[4:], labels[4:])]
    count, digest, sample = work.store(tmp_path, "rows", 0, columns, batches)
    again = work.store(tmp_path, "rows", 0, columns, [batch(values, labels)])  # another attempt
    other = work.store(tmp_path, "other", 0, columns, [batch(values, labels[::-1])])
    assert count == 11
    assert again[1] == digest != other[1]
    assert work.read_sample(sample, columns)["x"].tolist() == [[0.0, -0.0]]
    assert len(list(tmp_path.iterdir())) == 2
    steps = num_steps([11, 3, 0], 6)
    assert steps == 3
    path = work.path_of(tmp_path, "rows", 0, digest)
    for order in (None, (5, 0), (5, 1)):
        found = [Rows(path).batch(columns, step, steps, order) for step in range(steps)]
        repeated = Rows(path).batch(columns, 1, steps, order)
        assert np.array_equal(repeated["y"], found[1]["y"])
        assert [len(each["y"]) for each in found] == [3, 4, 4]
        seen = np.concatenate([each["y"] for each in found])
        assert sorted(seen) == labels
        assert (list(seen) == labels) == (order is None)
        assert all(np.array_equal(each["x"][:, 0], each["y"]) for each in found)


@pytest.mark.parametrize("width", [4, 200_000])
def test_sparse_vectors_are_stored_without_their_zeros(tmp_path: Path, width: int) -> None:
    rows = range(300)
    values: list[Any] = [SparseVector(width, {0: 1.0 + row, width - 1: -1.0}) for row in rows]
    values[3:5] = [SparseVector(width, {}), DenseVector([0.0] * (width - 2) + [5.0, 6.0])]
    dense = np.stack([value.toArray() for value in values[:8]])
    vectors = pa.RecordBatch.from_pydict({"x": store_vectors(values), "y": [*rows]})
    tracemalloc.start()
    try:
        columns = ["x", "y"]
        count, *_ = work.store(
            tmp_path, "rows", 0, columns, [vectors.slice(0, 100), vectors.slice(100)]
        )
        (path,) = tmp_path.iterdir()
        found = Rows(path).batch(columns, 0, 60, None), Rows(path).batch(columns, 1, 60, (1, 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 300
    assert np.array_equal(found[0]["x"], dense[:5])
    firsts = [0 if y in (3, 4) else y + 1 for y in found[1]["y"]]
    assert np.array_equal(found[1]["x"][:, 0], firsts)
    assert path.stat().st_size < 2_000_000, "one row is dense"
    assert peak < 300_000_000, "all rows would be 480 MB of float64"


def test_rows_that_are_no_numbers_of_one_shape_are_refused(tmp_path: Path) -> None:
    columns = ["x", "y"]
    text = pa.RecordBatch.from_pydict({"x": ["a"], "y": [1]})
    with pytest.raises(FeedTypeError, match="'x' holds string: training as Spark jobs takes"):
        work.store(tmp_path, "rows", 0, columns, [text])
    with pytest.raises(FeedTypeError, match=r"holds rows of float64 \[1\] and of float64 \[2\]"):
        work.store(tmp_path, "rows", 0, columns, [batch([[1.0]], [0]), batch([[1.0, 2.0]], [0])])
    with pytest.raises(FeedTypeError, match="column 'y' holds 1 null "):
        work.store(tmp_path, "rows", 0, columns, [batch([[1.0]], [None])])  # type: ignore[list-item]
    doubles = pa.RecordBatch.from_pydict({"x": [1.5, None], "y": [1, 2]})
    with pytest.raises(FeedTypeError, match="column 'x' holds 1 null "):
        work.store(tmp_path, "rows", 0, columns, [doubles])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("partitions", [1, 2, 4, 5, 7])
def test_the_sum_is_the_same_by_groups_and_in_whatever_order(partitions: int) -> None:
    rng = np.random.default_rng(partitions)
    sums = [
        weighed(n, n + 1, [rng.normal(size=9), np.array(3)], (np.array([1.0, n]),))
        for n in range(partitions)
    ]
    sums.append(Sum(partitions))  # a partition without rows
    sums.append(Sum(partitions + 1, missing=(partitions + 1,)))
    groups = max(1, num_groups(partitions))
    pairs = [(each.first % groups, each) for each in sums]
    rng.shuffle(pairs)
    merged = [pair for key in range(groups) for pair in added([p for p in pairs if p[0] == key])]
    rng.shuffle(merged)
    whole = total(each for _, each in merged)
    assert whole.weight == sum(range(1, partitions + 1))
    averages = whole.averages()
    expected = np.sum([each.learned[0] for each in sums[:partitions]], axis=0) / whole.weight
    assert np.allclose(averages[0], expected)
    assert averages[1].tolist() == 3
    assert whole.metrics[0].tolist() == [partitions, sum(range(partitions))]
    assert set(whole.missing) == {partitions + 1}


def test_what_a_task_raised_is_told_without_sparks_trace() -> None:
    text = (
        "An error occurred: org.apache.spark.SparkException: Job aborted\n"
        '  File "x.py", line 3, in f\n{}\n\n\tat org.apache.spark.api.Error: no'
    )
    failed = explained(Exception(text.format("sparkdl.core.errors.FeedTypeError: it holds nulls")))
    assert isinstance(failed, JobFailedError)
    assert str(failed).endswith("failed: sparkdl.core.errors.FeedTypeError: it holds nulls")
    wrong = explained(Exception(text.format(Problem("ConfigError", "set it").error())))
    assert isinstance(wrong, ConfigError)
    assert str(wrong) == "set it"


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_random_layers_draw_by_the_seed() -> None:
    import keras

    layers = [keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile("adam", "mse")
    columns, model_spec = Columns({"f": ""}, {"l": ""}), ModelSpec(source_of_content(saved(model)))
    asked = KerasTask(
        model_spec=model_spec, columns=columns, batch_size=8, epochs=1, name="n", seed=1
    )
    learner = KerasLearner(asked, None)
    state = as_arrays(KerasMaster(asked).model.weights)
    rows = {"f": np.arange(40.0).reshape(8, 5), "l": np.ones(8)}
    vectors = []
    for seed in (1, 2, 1):
        learner.load(state)
        vectors.append(learner.learn(rows, seed)[0][0])
    assert np.array_equal(vectors[0], vectors[2])
    assert not np.array_equal(vectors[0], vectors[1])
