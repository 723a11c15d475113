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
from sparkdl.storage.parquet.scan import Scan, ScannedColumn, ScannedFile, is_read_as, source_of
from sparkdl.storage.parquet.source import ParquetSource

BERLIN = pa.timestamp("us", "Europe/Berlin")
NAIVE = pa.timestamp("us")


def field(name: str, kind: pa.DataType, is_nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, is_nullable)


@pytest.mark.parametrize(
    ("found", "spark"),
    [
        *((kind, kind) for kind in (pa.bool_(), pa.int8(), pa.int64(), pa.float32(), pa.date32())),
        (pa.large_string(), pa.string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (pa.binary(4), pa.binary()),
        (pa.timestamp("ms", "UTC"), BERLIN),
        (pa.timestamp("s"), BERLIN),  # INT96
        (pa.timestamp("us"), NAIVE),
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
        (pa.timestamp("ns", "UTC"), BERLIN),
        (pa.timestamp("us"), BERLIN),
        (pa.timestamp("us", "UTC"), NAIVE),
        (pa.timestamp("s"), NAIVE),
        (pa.date32(), NAIVE),
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


# whole scans


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
    columns = (
        ScannedColumn("x", "a", pa.int64()),
        ScannedColumn("a", "t", pa.string()),
    )
    source = source_of(Scan(tuple(files), columns))
    assert source.schema.names == ["x", "a"]
    found = read(source).to_pylist()
    assert [row["x"] for row in found] == list(range(20))
    assert [row["a"] for row in found] == [None if i % 4 == 3 else str(i) for i in range(20)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: replace(s, columns=(A, A)), "several columns 'a'"),
        (
            lambda s: replace(s, columns=(ScannedColumn("n", "no", pa.int8()),)),
            "'n' is missing in .*a.par",
        ),
        (
            lambda s: replace(s, columns=(ScannedColumn("n", "A", pa.int64()),)),
            "'n' is called 'a' in",
        ),
        (
            lambda s: replace(s, columns=(ScannedColumn("n", "a", pa.int32()),)),
            "is int64, which Spark",
        ),
        (lambda s: replace(s, files=()), "no files"),
        (lambda s: replace(s, files=s.files * 2), "twice"),
        (lambda s: replace(s, files=(replace(s.files[0], nbytes=1),)), "has changed"),
        (lambda s: replace(s, files=(replace(s.files[0], modified_ms=1),)), "has changed"),
        (lambda s: replace(s, files=(replace(s.files[0], path="ftp:/x"),)), "cannot read ftp"),
    ],
)
def test_what_nodes_might_read_otherwise_is_refused(
    tmp_path: Path, change: Callable[[Scan], Scan], reason: str
) -> None:
    scan = Scan((write(tmp_path / "a.parquet"),), (A,))
    assert read(source_of(scan)).num_rows == 10
    with pytest.raises(ConfigError, match=reason):
        source_of(change(scan))


@pytest.mark.parametrize(
    ("tags", "modes", "is_read"),
    [
        ({}, ("CORRECTED", "EXCEPTION"), True),
        ({}, ("exception", "CORRECTED"), False),
        ({}, ("LEGACY", "CORRECTED"), False),
        ({"org.apache.spark.version": "3.0.0"}, ("LEGACY", "LEGACY"), True),
        ({"org.apache.spark.version": "2.4.8"}, ("CORRECTED", "CORRECTED"), False),
        (
            {"org.apache.spark.version": "4.0.0", "org.apache.spark.legacyDateTime": ""},
            ("CORRECTED", "CORRECTED"),
            False,
        ),
    ],
)
@pytest.mark.parametrize("kind", [pa.date32(), pa.list_(NAIVE)], ids=str)
def test_dates_of_the_julian_calendar_are_left_to_spark(
    tmp_path: Path, kind: pa.DataType, tags: dict[str, str], modes: tuple[str, str], is_read: bool
) -> None:
    table = pa.table({"t": pa.nulls(3, kind)}).replace_schema_metadata(tags)
    pq.write_table(table, tmp_path / "a.parquet")
    scan = Scan((listed(tmp_path / "a.parquet"),), (ScannedColumn("t", "t", kind),), rebases=modes)
    if is_read:
        assert read(source_of(scan)).num_rows == 3
    else:
        with pytest.raises(ConfigError, match="Julian"):
            source_of(scan)


def test_int96_has_a_mode_of_its_own(tmp_path: Path) -> None:
    table = pa.table({"t": pa.nulls(3, pa.timestamp("us", "UTC"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    column_t = ScannedColumn("t", "t", BERLIN)
    scan = Scan((listed(tmp_path / "a.parquet"),), (column_t,), rebases=("EXCEPTION", "CORRECTED"))
    assert read(source_of(scan)).schema.types == [BERLIN]
    with pytest.raises(ConfigError, match="Julian"):
        source_of(replace(scan, rebases=("CORRECTED", "EXCEPTION")))


def test_null_that_the_dataframe_refuses_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", 3)
    wanted = (ScannedColumn("b", "t", pa.string(), refuses_nulls=True),)
    assert read(source_of(Scan((file,), wanted))).num_rows == 3
    with pytest.raises(ReadError, match="column 'b' holds a null"):
        read(source_of(Scan((write(tmp_path / "b.parquet", 4),), wanted)))


def test_file_that_is_replaced_after_the_listing_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path)
    os.utime(path, (1e9, 1e9))
    source = source_of(Scan((listed(path),), (A,)))
    os.utime(path)  # as a copy on another host may have been made at another time
    assert read(source).num_rows
    write(path, 3)
    with pytest.raises(ReadError, match="has changed since Spark has listed it"):
        read(source)
