"""Parquet files become shares that cover each row once, and shares become batches like Spark's."""

from __future__ import annotations

import datetime as dt
import itertools
import threading
from collections import deque
from collections.abc import Generator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from sparkdl.control.rows import FileRange, Share, Storage
from sparkdl.core.errors import ConfigError, ReadError
from sparkdl.core.row_ranges import take_rows, uncovered
from sparkdl.storage.parquet.read import BATCH_NBYTES, _in_order, _Piece, _pieces, read_share
from sparkdl.storage.parquet.source import ParquetSource, list_files, plan
from sparkdl.storage.systems import locate, open_storage

GROUPS = st.lists(st.lists(st.integers(0, 50), max_size=6), max_size=6)
NODES = st.integers(1, 9)
SEEDS = st.none() | st.integers()


def write(path: Path, columns: dict[str, Any] | pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, path, **options)
    return path


def read(source: ParquetSource, num_nodes: int = 1, **options: Any) -> pa.Table:
    """Read all shares, after they have travelled."""
    batches = []
    for share in source.shares(num_nodes):
        arrived = msgspec.json.decode(msgspec.json.encode(share), type=Share)
        assert arrived == share
        batches += list(read_share(arrived, **options))
    return pa.Table.from_batches(batches, source.schema)


# Planning


DONE = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)))


@given(GROUPS, NODES, SEEDS, DONE, st.booleans())
def test_rows_that_are_done_are_shared_out_to_nobody_and_all_others_to_somebody(
    groups: list[list[int]],
    num_nodes: int,
    seed: int | None,
    done: list[tuple[int, int]],
    in_turns: bool,
) -> None:
    shares = plan(groups, num_nodes, seed, done=done, in_turns=in_turns)
    starts = dict(zip(there(groups), itertools.count(), strict=False))
    numbers = []
    for share in shares:
        of_share = deque(part.numbers for part in share)
        taken = [rows for part in share for rows in take_rows(of_share, part.num_rows)]
        assert sum(stop - start for start, stop in taken) == sum(p.num_rows for p in share)
        numbers += [number for start, stop in taken for number in range(start, stop)]
        for part in share:
            assert part.first == starts[part.file, part.row_group, part.start]
    left = uncovered(0, len(starts), done)
    assert sorted(numbers) == [number for start, stop in left for number in range(start, stop)]
    totals = [sum(part.stop - part.start for part in share) for share in shares]
    assert max(totals) - min(totals) <= (
        max(itertools.chain(*groups), default=0) if in_turns else 1
    )


def there(groups: list[list[int]]) -> list[tuple[int, int, int]]:
    """All rows of all row groups of all files, in their order."""
    return [(f, g, r) for f, c in enumerate(groups) for g, n in enumerate(c) for r in range(n)]


def test_what_is_left_of_a_row_group_is_read_in_one_go(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"x": range(100)}, row_group_size=40)
    done = tuple((i, i + 1) for i in range(0, 90, 2))
    [share] = list_files(str(tmp_path)).shares(1, done=done)
    assert len(list(_pieces(share))) == 1
    rows = [x for batch in read_share(share) for x in batch.column("x").to_pylist()]
    assert rows == [*range(1, 90, 2), *range(90, 100)]


@given(GROUPS, NODES, SEEDS)
def test_fewer_row_groups_are_cut_than_there_are_nodes(
    groups: list[list[int]], num_nodes: int, seed: int | None
) -> None:
    shares = plan(groups, num_nodes, seed)
    parts = [(part.file, part.row_group) for share in shares for part in share]
    assert len(parts) - len(set(parts)) <= num_nodes - 1
    assert all(len(set(share)) == len(share) for share in shares)


def test_a_seed_shuffles_row_groups_the_same_everywhere() -> None:
    groups = [[1] * 8]

    def order(seed: int) -> list[int]:
        return [part.row_group for part in plan(groups, 1, seed)[0]]

    assert order(7) == [6, 3, 2, 1, 7, 0, 4, 5]
    assert order(8) != order(7)


# Finding files


def test_a_folder_is_read_as_spark_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "part-1.parquet", {"x": [3]})
    write(tmp_path / "part-0.parquet", {"x": [1, 2]})
    write(tmp_path / "_temporary" / "part-2.parquet", {"x": [4]})
    write(tmp_path / "other" / "part-3.parquet", {"x": [5]})
    for name in ("_SUCCESS", "_metadata", ".part-0.parquet.crc", "part-0.parquet.crc"):
        (tmp_path / name).write_bytes(b"no Parquet")
    source = list_files(str(tmp_path))
    assert read(source).to_pydict() == {"x": [1, 2, 3]}
    assert source.num_rows == 3


@pytest.mark.parametrize(
    ("paths", "rows"),
    [
        ("d/a0.parquet", [0]),
        ("file://{}/d/a0.parquet", [0]),
        ("file:{}/d/a0.parquet", [0]),
        ("d/*.parquet", [0, 1, 2]),
        ("d/a[01].parquet", [0, 1]),
        ("file://{}/d/a?.parquet", [0, 1]),
        ("*", [0, 1, 2]),
        ("*/b*", [2]),
        (["d/a1.parquet", "d/a0.parquet", "d/a0.parquet"], [0, 1]),
        ("odd [1] name", [9]),
    ],
)
def test_files_folders_patterns_and_lists_are_found(
    paths: str | list[str], rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, name in enumerate(("a0", "a1", "b0")):
        write(tmp_path / "d" / f"{name}.parquet", {"x": [i]})
    if paths == "odd [1] name":
        write(tmp_path / "odd [1] name" / "x.parquet", {"x": [9]})
    monkeypatch.chdir(tmp_path)
    asked = paths.format(tmp_path) if isinstance(paths, str) else paths
    assert read(list_files(asked)).to_pydict() == {"x": rows}


def test_only_wanted_columns_are_read_in_the_order_asked_and_keys_are_none(tmp_path: Path) -> None:
    write(tmp_path / "k=1" / "a", {"x": [1, 2], "y.z": ["a", "b"], "s": [{"x": 1}, {"x": 2}]})
    write(tmp_path / "k=2" / "a", {"x": [3], "y.z": ["c"], "s": [{"x": 3}]})
    source = list_files(str(tmp_path), columns=["y.z", "x"])
    assert source.schema.names == ["y.z", "x"]
    assert read(source).to_pydict() == {"y.z": ["a", "b", "c"], "x": [1, 2, 3]}
    assert read(list_files(str(tmp_path), columns=["s"])).num_columns == 1
    assert list_files(str(tmp_path)).schema.names == ["x", "y.z", "s"]
    with pytest.raises(ConfigError, match=r"has no column 'k'.*a folder's key is none"):
        list_files(str(tmp_path), columns=["k", "x"])


# What cannot be read


@pytest.mark.parametrize("path", ["", "/nothing", "/*.parquet", "/d/*/x"])
def test_nothing_found_is_an_error_of_configuration(path: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(ConfigError, match="no Parquet file found"):
        list_files(f"{tmp_path}{path}")


@pytest.mark.parametrize("content", [b"", b"name,value\n1,2\n" * 50])
def test_a_file_that_is_not_parquet_is_named(content: bytes, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"x": [1]})
    (tmp_path / "b.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=r"b\.csv is not a Parquet file"):
        list_files(str(tmp_path))


@pytest.mark.parametrize(
    ("paths", "columns", "said"),
    [
        ("https://host/x.parquet", None, r"cannot read .*://.* file, hdfs, .* s3"),
        ("dbfs:/mnt/x", None, r"cannot read .*://.* file, hdfs, .* s3"),
        (["x", "s3://bucket/x"], None, "different storages"),
        ("a.parquet", ["x", "z"], r"no column 'z'.* 'x', 'y'"),
        ("a.parquet", [], "name at least one, and each once"),
        ("a.parquet", ["x", "x"], "name at least one, and each once"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    paths: Any, columns: list[str] | None, said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    write(tmp_path / "a.parquet", {"x": [1], "y": [2]})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        list_files(paths, columns)


def test_files_of_different_types_are_refused_unless_the_column_is_unwanted(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"x": pa.array([1], pa.int32()), "y": [1]})
    write(tmp_path / "b.parquet", {"y": [2], "x": pa.array([1], pa.int64())})
    with pytest.raises(ConfigError, match=r"'x' is int32 in .*a\.parquet, int64 in .*b\.parquet"):
        list_files(str(tmp_path))
    assert read(list_files(str(tmp_path), columns=["y"])).to_pydict() == {"y": [1, 2]}


def test_files_with_more_or_fewer_columns_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"x": [1]})
    write(tmp_path / "b.parquet", {"x": [1], "y": [1]})
    with pytest.raises(ConfigError, match=r"b\.parquet has columns that .*a\.parquet lacks"):
        list_files(str(tmp_path))
    with pytest.raises(ConfigError, match=r"a\.parquet has no column 'y'"):
        list_files(str(tmp_path), columns=["y"])


def test_wrong_storage_options_are_named_without_their_values(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['secret'\]") as caught:
        list_files(str(tmp_path), options={"secret": "hunter2"})
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(Storage("s3://b", {"secret": "hunter2"}))


@pytest.mark.parametrize(
    ("path", "uri", "within"),
    [
        ("s3a://bucket/a/b c", "s3://bucket", "bucket/a/b c"),
        ("s3://key:secret@bucket/a/", "s3://key:secret@bucket", "bucket/a"),
        ("gs://bucket", "gs://bucket", "bucket"),
        ("hdfs://name:8020/a", "hdfs://name:8020", "/a"),
        ("hdfs:///a/*.parquet", "hdfs://", "/a/*.parquet"),
        ("abfss://box@account.dfs.core.windows.net/a", None, "box/a"),
        ("/a/../b", "file://", "/b"),
    ],
)
def test_paths_are_located_in_their_storage(path: str, uri: str | None, within: str) -> None:
    storage, found = locate(path, {})
    assert found == within
    assert storage.uri == (uri or path.rpartition("/")[0])


def test_options_reach_the_storage() -> None:
    options = {"endpoint_override": "localhost:1", "scheme": "http", "anonymous": True}
    system = open_storage(Storage("s3://bucket", {**options, "region": "somewhere"}))
    assert system.type_name == "s3"
    assert system.region == "somewhere"


# Reading


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    num_nodes=NODES,
    group_rows=st.integers(1, 20),
)
def test_shares_together_hold_every_row_in_order(
    sizes: list[int], num_nodes: int, group_rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, first = tmp_path_factory.mktemp("rows"), 0
    for i, size in enumerate(sizes):
        values = pa.array(range(first, first + size), pa.int64())
        write(folder / f"{i}", {"x": values}, row_group_size=group_rows)
        first += size
    source = list_files(str(folder))
    assert read(source, num_nodes, batch_nbytes=64)["x"].to_pylist() == list(range(first))
    totals = [share.num_rows for share in source.shares(num_nodes)]
    assert max(totals) - min(totals) <= 1


@pytest.mark.parametrize("encoding", [True, False])
@pytest.mark.parametrize("kind", ["number", "list", "text", "skew"])
def test_batches_stay_within_their_bytes(kind: str, encoding: bool, tmp_path: Path) -> None:
    column = {
        "number": pa.array(np.zeros(50_000)),
        "list": pa.array([[1, 1, 1, 1, 1, 1, 1, 1]] * 20_000),
        "text": pa.array(["x" * 100] * 5_000),
        "skew": pa.array(["x"] * 5_000 + ["y" * 50_000, "z" * 900]),
    }[kind]
    path = write(tmp_path / "a", {"x": column}, use_dictionary=encoding, row_group_size=20_000)
    [share] = list_files(str(path)).shares(1)
    batches = list(read_share(share, batch_nbytes=10_000))
    assert pa.chunked_array([batch["x"] for batch in batches]).equals(pa.chunked_array([column]))
    assert all(batch.nbytes <= 10_000 or batch.num_rows == 1 for batch in batches)
    assert sum(batch.nbytes for batch in batches) / len(batches) > 2_000


def test_columns_come_as_spark_gives_them(tmp_path: Path) -> None:
    when = dt.datetime(2024, 5, 6, 7, 8, 9, 123456)
    utc = when.replace(tzinfo=dt.timezone.utc)
    vector = pa.struct(
        {
            "type": pa.int8(),
            "size": pa.int32(),
            "indices": pa.list_(pa.int32()),
            "values": pa.list_(pa.float64()),
        }
    )
    dense = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]}
    there = {
        "instant": (pa.timestamp("ns", "Europe/Paris"), pa.timestamp("us", "UTC"), utc),
        "local": (pa.timestamp("ms"), pa.timestamp("us"), when.replace(microsecond=123000)),
        "small": (pa.decimal128(7, 2), pa.decimal128(7, 2), Decimal("12345.67")),
        "words": (pa.dictionary(pa.int8(), pa.string()), pa.string(), "word"),
        "large": (pa.large_string(), pa.string(), "long"),
        "fixed": (pa.binary(3), pa.binary(), b"abc"),
        "items": (pa.large_list(pa.large_string()), spark_list(pa.string()), ["a", None]),
        "pair": (pa.list_(pa.float32(), 2), spark_list(pa.float32()), [1.0, 2.0]),
        "deep": (pa.list_(pa.list_(pa.int8())), spark_list(spark_list(pa.int8())), [[1], []]),
        "map": (pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.int64()), [("a", 1)]),
        "byte": (pa.uint8(), pa.uint8(), 200),
        "vector": (vector, None, dense),
    }
    table = pa.table(
        [pa.array([value, value], kind) for kind, _, value in there.values()],
        schema=pa.schema(
            [pa.field(name, kind, nullable=False) for name, (kind, *_) in there.items()],
            metadata={"made": "here"},
        ),
    )
    source = list_files(str(write(tmp_path / "a", table)))
    result = read(source, 2)
    for name, (_, kind, value) in there.items():
        field = source.schema.field(name)
        assert field.equals(pa.field(name, kind or field.type))
        assert result[name].to_pylist() == [value, value]
    assert [field.name for field in source.schema.field("vector").type] == list(dense)
    assert source.schema.metadata is None


def spark_list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind))


def test_int96_timestamps_are_instants_at_any_depth(tmp_path: Path) -> None:
    when = dt.datetime(1600, 1, 1, 0, 0, 0, 1)  # too early for nanoseconds in 64 bits
    now = dt.datetime(2024, 5, 6, 7, 8, 9, 123456)
    kind = pa.timestamp("us")
    table = pa.table({"t": pa.array([when, now], kind), "l": pa.array([[now], []], pa.list_(kind))})
    path = write(tmp_path / "a", table, use_deprecated_int96_timestamps=True, store_schema=False)
    source = list_files(str(path))
    instant = pa.timestamp("us", "UTC")
    assert source.schema.types == [instant, spark_list(instant)]
    utc = dt.timezone.utc
    assert read(source).to_pydict() == {
        "t": [when.replace(tzinfo=utc), now.replace(tzinfo=utc)],
        "l": [[now.replace(tzinfo=utc)], []],
    }


def parquet_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sparkdl-parquet"]


@pytest.fixture
def many(tmp_path: Path) -> Iterator[Share]:
    for i in range(4):
        write(tmp_path / f"{i}", {"x": np.arange(100_000)}, row_group_size=50_000)
    [share] = list_files(str(tmp_path)).shares(1)
    yield share
    assert not parquet_threads()


def test_a_reader_that_is_closed_ends_its_threads(many: Share) -> None:
    batches = read_share(many, batch_nbytes=10_000, prefetch_nbytes=20_000)
    assert next(batches)["x"][0].as_py() == 0
    assert len(parquet_threads()) == 2
    batches.close()
    assert not parquet_threads()


def test_no_more_is_decoded_ahead_than_is_allowed(many: Share) -> None:
    made: list[int] = []
    batch = pa.record_batch({"x": np.zeros(125)})

    def decode(piece: _Piece) -> Generator[pa.RecordBatch, None, None]:
        for _ in range(50):
            made.append(batch.nbytes)
            yield batch

    pieces = [_Piece(many.files[0], (part,)) for part in many.ranges]
    for taken, _ in enumerate(_in_order(pieces, decode, batch.nbytes, 10_000), start=1):
        assert len(made) - taken <= 2 * (5 + 1)  # two at once: 5000 bytes each, and one in hand
    assert taken == len(made) == 50 * len(pieces)


def test_many_small_files_make_few_batches(tmp_path: Path) -> None:
    for i in range(20):
        write(tmp_path / f"{i:02}", {"x": [i]})
    [share] = list_files(str(tmp_path)).shares(1)
    [batch] = read_share(share)
    assert batch["x"].to_pylist() == list(range(20))
    rows = [batch.num_rows for batch in read_share(share, batch_nbytes=200)]
    assert sum(rows) == 20
    assert set(rows[:-1]) <= {4, 5, 6}, "a quarter of what a batch may hold"
    assert 0 < rows[-1] <= 6


def test_small_pieces_are_read_several_at_a_time(many: Share) -> None:
    everyone = threading.Barrier(4)

    def decode(piece: _Piece) -> Generator[pa.RecordBatch, None, None]:
        everyone.wait(10)
        yield pa.record_batch({"x": [piece.ranges[0].row_group]})

    pieces = [_Piece(many.files[0], (FileRange(0, i, 0, 1),)) for i in range(4)]
    batches = _in_order(pieces, decode, 1000, 10_000)
    assert [batch["x"][0].as_py() for batch in batches] == [0, 1, 2, 3]


def test_remote_storages_are_read_the_same(many: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    local = [x for batch in read_share(many) for x in batch["x"].to_pylist()]
    system = pafs.SubTreeFileSystem("/", pafs.LocalFileSystem())
    monkeypatch.setattr("sparkdl.storage.parquet.read.open_storage", lambda storage: system)
    assert [x for batch in read_share(many) for x in batch["x"].to_pylist()] == local


def test_a_file_that_was_replaced_by_a_shorter_one_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"x": [1, 2, 3]})
    [share] = list_files(str(path)).shares(1)
    write(path, {"x": [1]})
    with pytest.raises(ReadError, match="has 1 rows in row group 0, not 3 as planned"):
        list(read_share(share))


@pytest.mark.parametrize("other", [{"y": [1, 2, 3]}, {"x": ["a", "b", "c"]}, None])
def test_a_file_that_is_gone_or_has_other_columns_is_an_error(
    other: dict[str, Any] | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "a", {"x": [1, 2, 3]})
    [share] = list_files(str(path)).shares(1)
    path.unlink()
    if other:
        write(path, other)
    with pytest.raises(ReadError, match=r"row groups 0 to 0: .*not on all nodes"):
        list(read_share(share))
    assert not parquet_threads()


def test_ranges_may_come_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"x": list(range(10))}, row_group_size=4)
    [share] = list_files(str(path)).shares(1)
    ranges = (FileRange(0, 2, 0, 2), FileRange(0, 0, 1, 3), FileRange(0, 1, 0, 1))
    share = msgspec.structs.replace(share, ranges=ranges)
    batches = read_share(share, batch_nbytes=BATCH_NBYTES)
    assert [x for batch in batches for x in batch["x"].to_pylist()] == [8, 9, 1, 2, 4]
