"""Rows of a Parquet file by their numbers: in order, with gaps, backwards, across row groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.core.errors import ReadError
from sparkdl.ml.scoring.files import FileColumns, FileRows, runs

ROWS, GROUP = 1000, 170
COLUMNS = FileColumns(pa.schema([("x", pa.list_(pa.float32())), ("n", pa.int64())]), False)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file whose rows are [i, i + 1] in `x` and i, as int32, in `N`."""
    numbers = np.arange(ROWS, dtype=np.int32)
    pairs = np.stack([numbers, numbers + 1], 1).astype(np.float32)
    x = pa.FixedSizeListArray.from_arrays(pa.array(pairs.reshape(-1)), 2)
    table = pa.table({"other": numbers, "N": numbers, "x": x.cast(pa.list_(pa.float32()))})
    pq.write_table(table, tmp_path / "a b%20.parquet", row_group_size=GROUP)
    return f"file://{tmp_path}/a%20b%2520.parquet"


@pytest.mark.parametrize(
    "numbers",
    [range(ROWS), range(3, ROWS, 7), [0, 1, 2, 500, 999], [169, 170], [999], range(400, 401)],
    ids=str,
)
def test_the_wanted_rows_come_in_order(path: str, numbers: list[int]) -> None:
    with FileRows(path, COLUMNS, 32) as file:
        parts = [part.columns for part in file.read(np.array(numbers))]
    assert [n for _, part in parts for n in part.to_pylist()] == list(numbers)
    assert [x for part, _ in parts for x in part.to_pylist()] == [[n, n + 1] for n in numbers]
    assert all(n.type == pa.int64() for _, n in parts)


def test_a_file_is_read_on_where_it_was_and_again_from_before(path: str) -> None:
    with FileRows(path, COLUMNS, 1) as file:
        for wanted in ([5, 6], [7, 600], [8], [601, 602], [0]):
            parts = [part.columns for part in file.read(np.array(wanted))]
            assert [n for _, part in parts for n in part.to_pylist()] == wanted


def test_no_more_is_decoded_at_once_than_batches_of_the_model(path: str) -> None:
    with FileRows(path, COLUMNS, 64) as file:
        file._rows = 64
        sizes = [len(part) for part in file.read(np.arange(ROWS))]
    assert max(sizes) == 64
    assert sum(sizes) == ROWS


def test_a_column_that_an_older_file_lacks_is_null(path: str) -> None:
    columns = FileColumns(pa.schema([("new", pa.string()), ("n", pa.int64())]), False)
    with FileRows(path, columns, 32) as file:
        (part,) = file.read(np.array([3, 4]))
        new, n = part.columns
    assert new.to_pylist() == [None, None]
    assert n.to_pylist() == [3, 4]
    strict = FileColumns(columns.schema, is_case_sensitive=True)
    with FileRows(path, strict, 32) as file:
        (part,) = file.read(np.array([3]))
        _, n = part.columns
    assert n.to_pylist() == [None]


def test_rows_that_a_file_has_not_are_an_error(path: str) -> None:
    with (
        FileRows(path, COLUMNS, 32) as file,
        pytest.raises(ReadError, match=r"a b%20.*no row 1000"),
    ):
        list(file.read(np.array([998, 1000])))


def test_a_file_that_is_not_there_is_an_error(path: str) -> None:
    with pytest.raises(ReadError, match=r"setParquetReader\('spark'\)"):
        FileRows(f"{path}x", COLUMNS, 32)


def test_rows_are_taken_file_by_file_and_ascending() -> None:
    paths = pa.array(["a", "a", "a", "b", "b", "a"])
    found = [(path, list(rows)) for path, rows in runs(paths, np.array([1, 5, 3, 4, 6, 7]))]
    assert found == [("a", [1, 5]), ("a", [3]), ("b", [4, 6]), ("a", [7])]
    assert list(runs(pa.array([], pa.string()), np.array([], np.int64))) == []
