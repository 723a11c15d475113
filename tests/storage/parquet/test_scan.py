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
from msgspec import structs

from sparkdl.control.rows import Condition, Pick, Share
from sparkdl.core.errors import ConfigError, ReadError
from sparkdl.storage.parquet import scan as scan_module
from sparkdl.storage.parquet.read import read_share
from sparkdl.storage.parquet.scan import (
    Scan,
    ScannedColumn,
    ScannedFile,
    is_read_as,
    is_same_cast,
    source_of,
)
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


@pytest.mark.parametrize(
    ("start", "end", "is_same"),
    [
        (pa.int8(), pa.int64(), True),
        (pa.bool_(), pa.int8(), True),
        (pa.int64(), pa.float32(), True),
        (pa.float64(), pa.float32(), True),
        (pa.list_(pa.list_(pa.float64())), pa.list_(pa.list_(pa.float32())), True),
        (pa.int64(), pa.int32(), False),
        (pa.float32(), pa.int32(), False),
        (pa.int32(), pa.bool_(), False),
        (pa.int32(), pa.decimal128(10, 0), False),
        (pa.string(), pa.int32(), False),
        (pa.date32(), NAIVE, False),
        (NAIVE, BERLIN, False),
        (pa.list_(pa.int32()), pa.list_(field("element", pa.int64(), False)), False),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int16())]), False),
    ],
    ids=str,
)
def test_casts(start: pa.DataType, end: pa.DataType, is_same: bool) -> None:
    assert is_same_cast(start, end) == is_same


# whole scans


def write(path: Path, rows: int = 10, start: int = 0, **options: Any) -> ScannedFile:
    """Write columns `a` (int64), `s` (struct of `b`, a float, and `c.d`), null in every fourth."""
    numbers = range(start, start + rows)
    structs = [None if i % 4 == 3 else {"b": i / 2, "c.d": str(i)} for i in numbers]
    kind = pa.struct([("b", pa.float32()), ("c.d", pa.string())])
    table = pa.table({"a": pa.array(numbers, pa.int64()), "s": pa.array(structs, kind)})
    pq.write_table(table, path, row_group_size=4, **options)
    return listed(path)


def listed(path: Path, *values: str | None) -> ScannedFile:
    stat = path.stat()
    return ScannedFile(f"file:{path}", stat.st_size, stat.st_mtime_ns // 1_000_000, values)


def column(name: str, path: str, kind: pa.DataType, stored: Any = None, **more: Any) -> Any:
    return ScannedColumn(name, Pick(tuple(path.split("/")), **more), stored or kind, kind)


A = column("a", "a", pa.int64())


def read(source: ParquetSource, num_nodes: int = 2) -> pa.Table:
    """Read all shares, after they have travelled."""
    shares = [
        msgspec.json.decode(msgspec.json.encode(share), type=Share)
        for share in source.shares(num_nodes)
    ]
    batches = [batch for share in shares for batch in read_share(share)]
    return pa.Table.from_batches(batches, source.schema)


def test_columns_are_renamed_cast_taken_out_of_structs_and_out_of_folders(tmp_path: Path) -> None:
    files = [write(tmp_path / "b.parquet", 10, 10), write(tmp_path / "a.parquet")]
    columns = (
        column("x", "a", pa.float32(), pa.int64()),
        column("b", "s/b", pa.float64(), pa.float32()),
        column("a", "s/c.d", pa.string()),
        ScannedColumn("day", None, pa.date32(), pa.date32()),
    )
    files = [replace(f, values=(v,)) for f, v in zip(files, (None, "2026-01-02"), strict=True)]
    source = source_of(Scan(tuple(files), columns))
    assert source.schema.names == ["x", "b", "a", "day"]
    found = read(source).to_pylist()
    assert [row["x"] for row in found] == [float(i) for i in range(20)]
    assert [row["b"] for row in found] == [None if i % 4 == 3 else i / 2 for i in range(20)]
    assert [row["a"] for row in found] == [None if i % 4 == 3 else str(i) for i in range(20)]
    assert [str(row["day"]) for row in found] == ["2026-01-02"] * 10 + ["None"] * 10


def test_rows_that_are_numbered_otherwise_are_told_apart(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", 9)
    numbers = {
        source_of(Scan(files, (A,))).numbering for files in ((first,), (second,), (first, second))
    }
    assert len(numbers) == 3
    assert "" not in numbers


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: replace(s, columns=(A, A)), "several columns 'a'"),
        (
            lambda s: replace(s, columns=(column("n", "no", pa.int8()),)),
            "'n' is missing in .*a.par",
        ),
        (lambda s: replace(s, columns=(column("n", "A", pa.int64()),)), "'n' is called 'a' in"),
        (lambda s: replace(s, columns=(column("n", "s/x", pa.int8()),)), "'n' is missing"),
        (lambda s: replace(s, columns=(column("n", "a/x", pa.int8()),)), "no field of a struct"),
        (lambda s: replace(s, columns=(column("n", "a", pa.int32()),)), "is int64, which Spark"),
        (
            lambda s: replace(s, columns=(column("n", "a", pa.string(), pa.int64()),)),
            "'n' is cast from int64 to string",
        ),
        (
            lambda s: replace(s, columns=(ScannedColumn("d", None, pa.int8(), pa.int8()),)),
            "none of its columns is in the files",
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


def test_files_without_rows_and_those_that_are_not_parquet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows"):
        source_of(Scan((write(tmp_path / "a.parquet", 0),), (A,)))
    (tmp_path / "b.parquet").write_text("nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        source_of(Scan((listed(tmp_path / "b.parquet"),), (A,)))


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
    scan = Scan((listed(tmp_path / "a.parquet"),), (column("t", "t", kind),), rebases=modes)
    if is_read:
        assert read(source_of(scan)).num_rows == 3
    else:
        with pytest.raises(ConfigError, match="Julian"):
            source_of(scan)


def test_int96_has_a_mode_of_its_own(tmp_path: Path) -> None:
    table = pa.table({"t": pa.nulls(3, pa.timestamp("us", "UTC"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    column_t = column("t", "t", BERLIN)
    scan = Scan((listed(tmp_path / "a.parquet"),), (column_t,), rebases=("EXCEPTION", "CORRECTED"))
    assert read(source_of(scan)).schema.types == [BERLIN]
    with pytest.raises(ConfigError, match="Julian"):
        source_of(replace(scan, rebases=("CORRECTED", "EXCEPTION")))


EVEN = Condition("in", (), ("a",), "int64", (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20))
HAS_B = Condition("not", (Condition("null", (), ("s", "b"), ""),))


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_rows_that_pass_a_filter_are_shared_out_evenly_and_numbered(
    tmp_path: Path, nodes: int
) -> None:
    files = (write(tmp_path / "a.parquet", 10), write(tmp_path / "b.parquet", 15, 10))
    condition = Condition("and", (EVEN, HAS_B))
    source = source_of(Scan(files, (A, column("b", "s/b", pa.float32())), condition))
    wanted = [i for i in range(25) if i % 2 == 0 and i <= 20]
    assert source.num_rows == len(wanted) == 11
    assert max(map(len, source.row_groups)) == 4
    assert read(source, nodes)["a"].to_pylist() == wanted
    sizes = [share.num_rows for share in source.shares(nodes)]
    assert max(sizes) - min(sizes) <= 1
    (left,) = source.shares(1, done=((0, 2), (3, 4), (6, 10)))
    rows = pa.Table.from_batches(read_share(left)).column("a").to_pylist()
    assert rows == [wanted[number] for number in (2, 4, 5, 10)]


def test_filter_of_another_kind_numbers_rows_otherwise(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet")
    halves = [
        source_of(Scan((file,), (A,), Condition("not", (each,)) if is_not else each))
        for each, is_not in ((EVEN, False), (EVEN, True))
    ]
    assert halves[0].row_groups == halves[1].row_groups
    assert halves[0].numbering != halves[1].numbering


def test_filters_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = Scan((write(tmp_path / "a.parquet"),), (A,), EVEN)
    with pytest.raises(ConfigError, match=r"about 's.b', which is not selected"):
        source_of(replace(scan, condition=HAS_B))
    with pytest.raises(ConfigError, match="'a' is int64, which Spark reads as int32"):
        source_of(replace(scan, condition=structs.replace(EVEN, kind="int32")))
    with pytest.raises(ConfigError, match="no rows that are wanted"):
        source_of(replace(scan, condition=structs.replace(EVEN, values=(-1,))))
    monkeypatch.setattr(scan_module, "MAX_COUNTED_NBYTES", 10)
    with pytest.raises(ConfigError, match="it takes long to count"):
        source_of(scan)


def test_fewer_rows_than_were_counted_are_an_error(tmp_path: Path) -> None:
    source = source_of(Scan((write(tmp_path / "a.parquet"),), (A,), EVEN))
    (share,) = source.shares(1)
    files = tuple(structs.replace(file, nbytes=-1) for file in share.files)
    write(tmp_path / "a.parquet", start=15)
    with pytest.raises(ReadError, match=r"fewer rows in row group . .* than were counted"):
        list(read_share(structs.replace(share, files=files)))


def test_null_that_the_dataframe_refuses_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", 3)
    wanted = (column("b", "s/b", pa.float32(), refuses_nulls=True),)
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
