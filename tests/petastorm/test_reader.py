"""A process's share of a converter's rows: each row once an epoch over all shards."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkdl
from sparkdl.core.errors import ConfigError, RemovedModuleError
from sparkdl.petastorm import TransformSpec
from sparkdl.petastorm.reader import rank_and_size
from sparkdl.petastorm.spark import SparkDatasetConverter


@pytest.fixture
def converter(tmp_path: Path) -> SparkDatasetConverter:
    """100 rows in one file of ten row groups: more or fewer than there are shards."""
    table = pa.table(
        {
            "id": np.arange(100),
            "x": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(200, dtype=np.float32)), 2),
            "name": [f"row {i}" for i in range(100)],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=10)
    return sparkdl.make_spark_converter(f"file://{tmp_path}")


def ids(converter: SparkDatasetConverter, **options: Any) -> list[int]:
    options = {"batch_size": 7, "num_epochs": 1, **options}
    with converter.make_torch_dataloader(**options) as loader:
        return [int(i) for batch in loader for i in batch["id"]]


@pytest.mark.torch
@pytest.mark.parametrize("shards", [3, 16])
def test_shards_have_each_row_once_and_equal_share(
    converter: SparkDatasetConverter, shards: int
) -> None:
    found = [ids(converter, cur_shard=i, shard_count=shards) for i in range(shards)]
    assert sorted(chain.from_iterable(found)) == list(range(100))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.torch
def test_orders_differ_by_epoch_and_repeat_with_the_seed(converter: SparkDatasetConverter) -> None:
    two = ids(converter, num_epochs=2, shuffling_queue_capacity=30, seed=4)
    assert Counter(two) == dict.fromkeys(range(100), 2)
    assert two[:100] != two[100:]
    assert two == ids(converter, num_epochs=2, shuffling_queue_capacity=30, seed=4)
    assert ids(converter, shuffle_row_groups=False) == list(range(100))


@pytest.mark.torch
def test_batches_are_dicts_of_tensors_across_epochs(converter: SparkDatasetConverter) -> None:
    import torch

    with cloudpickle.loads(cloudpickle.dumps(converter)).make_torch_dataloader(64) as loader:
        batches = list(islice(loader, 4))
    assert [len(batch["id"]) for batch in batches] == [64] * 4
    assert batches[0]["x"].dtype == torch.float32
    assert batches[0]["x"].shape == (64, 2)
    assert batches[0]["name"][0] == f"row {int(batches[0]['id'][0])}"
    batches[0]["x"] += 1  # memory of its own
    with converter.make_torch_dataloader(200, num_epochs=1) as loader:
        assert [len(batch["id"]) for batch in loader] == [100]
        assert [len(batch["id"]) for batch in loader] == [100], "each loop begins anew"
    assert len(converter) == 100


@pytest.mark.tensorflow
def test_elements_of_tensorflow_are_named_tuples(converter: SparkDatasetConverter) -> None:
    with converter.make_tf_dataset(30, num_epochs=1) as dataset:
        pairs = list(dataset.map(lambda row: (row.id, row.x)).as_numpy_iterator())
    assert [len(i) for i, _ in pairs] == [30, 30, 30, 10]
    assert sorted(i for part, _ in pairs for i in part.tolist()) == list(range(100))
    for part, x in pairs:
        assert x.dtype == np.float32
        assert x.tolist() == [[2.0 * i, 2.0 * i + 1] for i in part.tolist()]


@pytest.mark.torch
def test_transform_makes_columns_of_frames(converter: SparkDatasetConverter) -> None:
    def halves(frame: pd.DataFrame) -> pd.DataFrame:
        frame = frame[frame["id"] % 2 == 0].copy()
        frame["image"] = [np.full(6, i, np.float64) for i in frame["id"]]
        return frame

    spec = TransformSpec(
        halves, [("image", np.float32, (2, 3), False)], selected_fields=["image", "id"]
    )
    with converter.make_torch_dataloader(10, 1, transform_spec=spec) as loader:
        batches = list(loader)
    assert sorted(int(i) for batch in batches for i in batch["id"]) == list(range(0, 100, 2))
    for batch in batches:
        assert batch["image"].shape[1:] == (2, 3)
        assert str(batch["image"].dtype) == "torch.float32"
        assert batch["image"][:, 0, 0].tolist() == batch["id"].tolist()
    with pytest.raises(ConfigError, match="no column 'no', but must have all columns that are"):
        ids(converter, transform_spec=TransformSpec(selected_fields=["no"]))
    with pytest.raises(ConfigError, match="shard 0 of 1 has no rows in epoch 0"):
        ids(converter, transform_spec=TransformSpec(lambda frame: frame[:0]), num_epochs=None)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "RANK": "0", "WORLD_SIZE": "2"}, (1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, (2, 3)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        ({"RANK": "1"}, (0, 1)),
    ],
)
def test_shard_is_the_rank_that_the_launcher_gave(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: tuple[int, int]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert rank_and_size() == found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cur_shard": 1}, "cur_shard=1, shard_count=None: give both or neither"),
        ({"cur_shard": 2, "shard_count": 2}, "cur_shard from 0 to shard_count - 1"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(
    converter: SparkDatasetConverter, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        ids(converter, **options)
    with pytest.raises(TypeError, match=r"argument 'predicate'.* filter rows and columns in the D"):
        ids(converter, predicate=print)


def test_shard_without_rows_is_an_error_not_endless_wait(converter: SparkDatasetConverter) -> None:
    with pytest.raises(ConfigError, match="shard 100 of 200 has no rows"):
        ids(converter, cur_shard=100, shard_count=200, num_epochs=None)


def test_files_of_others_are_not_deleted_and_may_be_a_plain_path(
    converter: SparkDatasetConverter, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="delete the folder yourself"):
        converter.delete()
    assert sparkdl.make_spark_converter(str(tmp_path)).source == converter.source
    with pytest.raises(ConfigError, match="dtype='int8': must be 'float32'"):
        sparkdl.make_spark_converter(f"file://{tmp_path}", dtype="int8")


def test_other_names_of_petastorm_say_what_to_use() -> None:
    with pytest.raises(RemovedModuleError, match=r"Petastorm's: read any Parquet files by sparkdl"):
        from sparkdl.petastorm import make_batch_reader  # noqa: F401
    with pytest.raises(RemovedModuleError, match=r"converter\.make_torch_dataloader"):
        import_module("sparkdl.petastorm.pytorch")
