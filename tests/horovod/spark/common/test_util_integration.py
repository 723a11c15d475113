"""A DataFrame is written into the store, once; what cannot be trained on is said before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.ml.linalg import DenseVector, SparseVector, Vectors
from pyspark.sql.types import DoubleType, LongType

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark.common import util
from sparkdl.horovod.spark.common.store import LocalStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def frame(spark_local: SparkSession) -> DataFrame:
    rows = [
        (Vectors.dense([i, 1.0]) if i % 2 else Vectors.sparse(2, {1: 1.0}), float(i), i % 5 == 0)
        for i in range(20)
    ]
    return spark_local.createDataFrame(rows, ["v", "y", "is_val"])


def rows_of(store: LocalStore, path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = store.get_parquet_dataset(path).read().to_pylist()
    return sorted(rows, key=lambda row: row["y"])


def test_frame_is_split_by_a_column_and_written_once(frame: DataFrame, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    with util.prepare_data(2, store, frame, ["y"], ["v"], validation="is_val") as index:
        train, val = store.get_train_data_path(index), store.get_val_data_path(index)
        assert [row["y"] for row in rows_of(store, val)] == [0.0, 5.0, 10.0, 15.0]
        assert rows_of(store, val)[0] == {"v": [0.0, 1.0], "y": 0.0}
        assert len(rows_of(store, train)) == 16
        num_train, num_val, metadata, row_nbytes = util.get_dataset_properties(index)
        assert (num_train, num_val, row_nbytes > 0) == (16, 4, True)
        assert metadata["v"]["spark_data_type"] is DenseVector
        assert (metadata["v"]["shape"], metadata["y"]["spark_data_type"]) == (2, DoubleType)
        with util.prepare_data(2, store, frame.where("y > 3"), ["y"], ["v"]) as other:
            assert other != index, "the rows of a fit that runs were overwritten"
    written = {file.name for file in Path(train.removeprefix("file://")).iterdir()}
    with util.prepare_data(2, store, frame, ["y"], ["v"], validation="is_val") as again:
        assert again == index
        assert {file.name for file in Path(train.removeprefix("file://")).iterdir()} == written
    store.delete(train)
    frame.limit(3).select("y").write.parquet(train)  # as another program does
    with util.prepare_data(2, store, frame, ["y"], ["v"], validation="is_val"):
        assert len(rows_of(store, train)) == 16
    util.clear_training_cache()
    with util.prepare_data(2, store, frame, ["y"], ["v"], validation=0.5) as index:
        assert {f.name for f in Path(train.removeprefix("file://")).iterdir()} != written
        num_train, num_val, *_ = util.get_dataset_properties(index)
        assert num_train + num_val == 20


def test_what_cannot_be_trained_on_is_refused(frame: DataFrame, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"label_columns": ["z"]}, "Label column z does not exist"),
        ({"feature_columns": ["z"]}, "Feature column z does not exist"),
        ({"label_columns": []}, "cannot be None or empty"),
        ({"validation": "z"}, "Validation column z does not exist"),
        ({"validation": 1.5}, r"must be in the range: \[0, 1\)"),
        ({"validation": 3}, 'must be of type "float" or "str"'),
        ({"num_processes": 0}, "must both be > 0"),
    ]
    for change, text in cases:
        options = {"num_processes": 1, "label_columns": ["y"], "feature_columns": ["v"], **change}
        with (
            pytest.raises(ConfigError, match=text),
            util.prepare_data(store=store, df=frame, **options),
        ):
            pass
    empty = frame.where("y < 0")
    with (
        pytest.raises(ConfigError, match="No rows found in training dataset"),
        util.prepare_data(1, store, empty, ["y"], ["v"]),
    ):
        pass


def test_metadata_of_a_frame(frame: DataFrame) -> None:
    found = util._get_metadata(frame.selectExpr("v", "y", "cast(y as long) as n"))
    assert (found["v"]["spark_data_type"], found["v"]["shape"]) == (SparseVector, 2)
    assert (found["n"]["spark_data_type"], found["n"]["shape"]) == (LongType, 1)
