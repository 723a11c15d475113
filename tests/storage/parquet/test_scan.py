"""Files of a scan are read by nodes as Spark would read them, or refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.control.rows import Share
from sparkdl.core.errors import ConfigError, ReadError
from sparkdl.storage.parquet.read import read_share
from sparkdl.storage.parquet.scan import ScannedColumn, ScannedFile, is_read_as, source_of
from sparkdl.storage.parquet.source import ParquetSource

INSTANT = pa.timestamp("us", "UTC")


def field(name: str, kind: pa.DataType, is_nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, is_nullable)


@pytest.mark.parametrize(
    ("found", "spark"),
    [
        *((kind, kind) for kind in (pa.bool_(), pa.int8(), pa.int64(), pa.float32())),
        (pa.large_string(), pa.string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (pa.binary(4), pa.binary()),
        (pa.decimal128(9, 2), pa.decimal128(9, 2)),
        (pa.list_(pa.float32(), 3), pa.list_(field("element", pa.float32()))),
        (pa.large_list(pa.list_(pa.int8())), pa.list_(pa.list_(pa.int8()))),
        (pa.struct([field("a", pa.int8(), False)]), pa.struct([field("a", pa.int8())])),
    ],
    ids=str,
)
def test_types_that_arrow_and_spark_read_alike(found: pa.DataType, spark: pa.DataType) -> None:
    assert is_read_as(found, spark)


@pytest.mark.parametrize(
    ("found", "spark"),
    [
        (pa.int32(), pa.int64()),
        (pa.uint8(), pa.int16()),
        (pa.float16(), pa.float32()),
        (pa.duration("us"), pa.int64()),
        (pa.binary(), pa.string()),
        (pa.dictionary(pa.int8(), pa.int64()), pa.int64()),
        (INSTANT, INSTANT),
        (pa.date32(), pa.date32()),
        (pa.list_(pa.date32()),) * 2,
        (pa.decimal128(9, 2), pa.decimal128(10, 2)),
        (pa.decimal256(50, 2), pa.decimal128(38, 2)),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int8())),
        (pa.list_(pa.int32()), pa.list_(pa.int64())),
        (pa.list_(pa.int32()), pa.list_(field("element", pa.int32(), False))),
        (pa.struct([("a", pa.int8())]), pa.struct([("b", pa.int8())])),
        (pa.struct([("a", pa.int8()), ("b", pa.int8())]), pa.struct([("a", pa.int8())])),
        (pa.struct([("a", pa.int8()), ("A", pa.int8())]),) * 2,
        (pa.time64("us"), pa.time64("ns")),
        (pa.null(), pa.null()),
        (pa.uuid(), pa.binary()),
    ],
    ids=str,
)
def test_types_that_are_left_to_spark(found: pa.DataType, spark: pa.DataType) -> None:
    assert not is_read_as(found, spark)


def write(path: Path, rows: int = 10, start: int = 0, **options: Any) -> ScannedFile:
    """Write columns `a` (int64) and `t` (text), null in every fourth."""
    numbers = range(start, start + rows)
    texts = [None if i % 4 == 3 else str(i) for i in numbers]
    table = pa.table({"a": pa.array(numbers, pa.int64()), "t": pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=4, **options)
    return listed(path)


def listed(path: Path) -> ScannedFile:
    stat = path.stat()
    return ScannedFile(f"file:{path}", stat.st_size, stat.st_mtime_ns // 1_000_000)


A = ScannedColumn("a", "a", pa.int64())


def read(source: ParquetSource, num_nodes: int = 2) -> pa.Table:
    """Read all shares, after they have travelled."""
    shares = [
        msgspec.json.decode(msgspec.json.encode(share), type=Share)
        for share in source.shares(num_nodes)
    ]
    batches = [batch for share in shares for batch in read_share(share)]
    return pa.Table.from_batches(batches, source.schema)


def test_columns_are_renamed(tmp_path: Path) -> None:
    files = [write(tmp_path / "b.parquet", 10, 10), write(tmp_path / "a.parquet")]
    columns = (ScannedColumn("x", "a", pa.int64()), ScannedColumn("a", "t", pa.string()))
    source = source_of(files, columns)
    assert source.schema.names == ["x", "a"]
    found = read(source).to_pylist()
    assert [row["x"] for row in found] == list(range(20))
    assert [row["a"] for row in found] == [None if i % 4 == 3 else str(i) for i in range(20)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: ([file], [A, A]), "several columns 'a'"),
        (lambda file: ([file], [ScannedColumn("n", "no", pa.int8())]), "'n' is missing in .*a.par"),
        (lambda file: ([file], [ScannedColumn("n", "A", pa.int64())]), "'n' is called 'a' in"),
        (lambda file: ([file], [ScannedColumn("n", "a", pa.int32())]), "int64 in .* int32 for"),
        (lambda file: ([], [A]), "no files"),
        (lambda file: ([file] * 2, [A]), "twice"),
        (lambda file: ([replace(file, nbytes=1)], [A]), "has changed"),
        (lambda file: ([replace(file, modified_ms=1)], [A]), "has changed"),
        (lambda file: ([replace(file, path="ftp:/x")], [A]), "cannot read ftp"),
    ],
)
def test_what_nodes_might_read_otherwise_is_refused(
    tmp_path: Path, change: Callable[[ScannedFile], Any], reason: str
) -> None:
    file = write(tmp_path / "a.parquet")
    assert read(source_of([file], [A])).num_rows == 10
    with pytest.raises(ConfigError, match=reason):
        source_of(*change(file))


def test_null_that_the_dataframe_refuses_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", 3)
    wanted = (ScannedColumn("b", "t", pa.string(), refuses_nulls=True),)
    assert read(source_of([file], wanted)).num_rows == 3
    with pytest.raises(ReadError, match="column 'b' holds a null"):
        read(source_of([write(tmp_path / "b.parquet", 4)], wanted))


def test_file_that_is_replaced_after_the_listing_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path)
    os.utime(path, (1e9, 1e9))
    source = source_of([listed(path)], [A])
    os.utime(path)  # as a copy on another host may have been made at another time
    assert read(source).num_rows
    write(path, 3)
    with pytest.raises(ReadError, match="has changed since Spark listed it"):
        read(source)
