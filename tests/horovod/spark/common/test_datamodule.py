"""The rows of the processes: each in one of them, as many in all, in as many batches."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.core.errors import FeedTypeError
from sparkdl.horovod.spark.common import datamodule
from sparkdl.horovod.spark.common.datamodule import ParquetDataModule, batch_sizes, rows_each
from sparkdl.storage.parquet.source import list_files


def write(folder: Path, files: list[int], row_group_size: int = 3) -> None:
    start = 0
    for number, rows in enumerate(files):
        numbers = np.arange(start, start + rows)
        vectors = pa.array([[float(n), 1.0] for n in numbers], pa.list_(pa.float64()))
        table = pa.table({"x": numbers, "v": vectors})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=row_group_size)
        start += rows


def epochs(folder: Path, rank: int, size: int, count: int, **options: Any) -> list[list[Any]]:
    """Return the batches of the first epochs of a process."""
    source = list_files(str(folder), ["x", "v"])
    rows = rows_each(source.num_rows, size)
    steps = len(batch_sizes(rows, options.get("train_batch_size", 32)))
    module = ParquetDataModule(cur_shard=rank, shard_count=size, train_source=source, **options)
    with module as data:
        batches = iter(data.train_data())
        return [list(islice(batches, steps)) for _ in range(count)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("files", "size"), [([1], 3), ([10], 4), ([3, 0, 5, 7], 2), ([4, 4], 5), ([2], 2)]
)
def test_all_processes_have_as_many_rows_and_batches(
    files: list[int], size: int, shuffle: bool, tmp_path: Path
) -> None:
    write(tmp_path, files)
    found = [
        epochs(tmp_path, rank, size, 2, train_batch_size=2, shuffle=shuffle) for rank in range(size)
    ]
    total = sum(files)
    for epoch in range(2):
        shapes = {tuple(len(batch["x"]) for batch in mine[epoch]) for mine in found}
        assert len(shapes) == 1, "unequal batches: the processes would wait for each other"
        seen = Counter(int(x) for mine in found for batch in mine[epoch] for x in batch["x"])
        assert set(seen) == set(range(total)), "a row was dropped"
        assert sum(seen.values()) == size * rows_each(total, size)
        for mine in found:
            for batch in mine[epoch]:
                assert batch["v"].shape == (len(batch["x"]), 2)
                assert (batch["v"][:, 0] == batch["x"]).all()


def test_negative_weights_of_rows_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [3])

    def negated(frame: Any) -> Any:
        return frame.assign(x=-frame.x)

    assert epochs(tmp_path, 0, 1, 1, sample_weight_col="x")
    with pytest.raises(FeedTypeError, match=r"column 'x' holds the weight -\d: .*0 or more"):
        epochs(tmp_path, 0, 1, 1, sample_weight_col="x", transform_fn=negated)


def test_batches_of_an_epoch_differ_by_one_row_at_most() -> None:
    assert batch_sizes(33, 32) == [16, 17]
    assert batch_sizes(64, 32) == [32, 32]
    assert batch_sizes(1, 32) == [1]


def test_rows_come_in_another_order_in_each_epoch_and_with_each_seed(tmp_path: Path) -> None:
    write(tmp_path, [50], row_group_size=100)

    def orders(**options: Any) -> list[list[int]]:
        found = epochs(tmp_path, 0, 1, 2, train_batch_size=7, **options)
        return [[int(x) for batch in epoch for x in batch["x"]] for epoch in found]

    first, second = orders(random_seed=1)
    assert first != second
    assert orders(random_seed=1) == [first, second]
    assert orders(random_seed=2) != [first, second]
    assert orders(shuffle=False) == [list(range(50))] * 2


def test_more_rows_than_fit_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datamodule, "CHUNK_NBYTES", 1)
    write(tmp_path, [11, 8], row_group_size=2)
    for epoch in epochs(tmp_path, 0, 1, 3, train_batch_size=4):
        assert sorted(int(x) for batch in epoch for x in batch["x"]) == list(range(19))
        assert {len(batch["x"]) for batch in epoch} == {3, 4}


def test_transformation_gets_and_returns_a_frame(tmp_path: Path) -> None:
    write(tmp_path, [4])

    def double(frame: Any) -> Any:
        frame["x"] = frame["x"] * 2
        return frame

    ((batch,),) = epochs(tmp_path, 0, 1, 1, shuffle=False, transform_fn=double)
    assert batch["x"].tolist() == [0, 2, 4, 6]
    assert batch["v"].shape == (4, 2)
    with pytest.raises(FeedTypeError, match="column 'x' whose rows must have one shape"):
        epochs(tmp_path, 0, 1, 1, transform_fn=lambda frame: {"x": [[1], [1, 2]]})
    with pytest.raises(FeedTypeError, match="different lengths"):
        epochs(tmp_path, 0, 1, 1, transform_fn=lambda frame: {"x": [1], "y": [1, 2]})


def test_column_whose_rows_differ_in_length_says_so(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2], "v": [[1.0], [1.0, 2.0]]}), tmp_path / "a.parquet")
    with pytest.raises(FeedTypeError, match="column 'v' holds arrays of different shapes"):
        epochs(tmp_path, 0, 1, 1)
