"""Options, files and folders: what is asked for is found, and what cannot be is said at once."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from sparkdl.core.errors import ConfigError, ReadError, WriteError
from sparkdl.data.files import Options, find, options_of, read_file
from sparkdl.data.source import Destination
from sparkdl.storage.systems import locate
from tests.data.records import framed, write

LOCAL = locate("/")[0]


def test_options_have_names_in_any_case() -> None:
    given = {
        "PATH": "a",
        "Compression": "GZIP",
        "inferRecords": "7",
        "storageOptions": '{"region": "x"}',
    }
    assert options_of(given) == Options(("a",), "gzip", 7, {"region": "x"})
    assert options_of({"paths": '["a", "b"]'}) == Options(("a", "b"))
    assert options_of({"path": "a", "inferRecords": "all"}).infer_records is None
    assert "key" not in repr(Options(("a",), storage={"access_key": "key"}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no path"),
        ({"path": "a", "header": "true"}, "no option 'header'; choose one of path"),
        ({"path": "a", "recordType": "SequenceExample"}, "no option 'recordtype'"),
        (
            {"path": "a", "compression": "zlib"},
            "compression='zlib' must be one of auto, none",
        ),
        ({"path": "a", "inferRecords": "0"}, "inferRecords"),
        ({"path": "a", "storageOptions": "region"}, "JSON object"),
        ({"paths": "a"}, "JSON array"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_of(given)


def test_files_are_those_that_spark_reads(tmp_path: Path) -> None:
    for name in ("b", "a", "_SUCCESS", ".a.crc", "_staging-1/part", "day=1/c", "day=2/d"):
        write(tmp_path / name, [])
    with pytest.raises(ConfigError, match="folders of different kinds"):
        find(Options((str(tmp_path),)))
    data = find(Options((f"{tmp_path}/day=*",)))
    assert [Path(file.path).name for file in data.files] == ["c", "d"]
    assert [file.values for file in data.files] == [{"day": "1"}, {"day": "2"}]
    assert data.partitions == pa.schema([("day", pa.int32())])
    data = find(Options((f"{tmp_path}/[ab]", f"file://{tmp_path}/a")))
    assert [Path(file.path).name for file in data.files] == ["a", "b"]
    with pytest.raises(ConfigError, match="no such file or folder"):
        find(Options((f"{tmp_path}/none*",)))
    with pytest.raises(ConfigError, match="different storages"):
        find(Options((str(tmp_path), "s3://bucket/data")))


def test_files_without_records_have_none(tmp_path: Path) -> None:
    path = write(tmp_path / "empty", [])
    assert list(read_file(LOCAL, str(path))) == []
    path.write_bytes(gzip.compress(b""))
    assert list(read_file(LOCAL, str(path))) == []


def test_a_file_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=f"{tmp_path}/gone cannot be read"):
        list(read_file(LOCAL, f"{tmp_path}/gone"))


# writing


def put(to: Destination, data: bytes, number: int = 0) -> str:
    with to.part(number, "none") as (name, file):
        file.write(data)
    return name


def names(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in folder.iterdir())


def test_nothing_is_there_before_the_commit_and_all_after(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "data"
    to = Destination.at(str(folder), {})
    to.begin()
    parts = [put(to, b"a", 0), put(to, b"b", 1)]
    lost = put(to, b"of an attempt that failed", 1)
    assert names(folder) == ["_staging"]
    to.commit(parts, is_overwrite=False)
    assert names(folder) == ["_SUCCESS", "part", "part"]
    assert [(folder / part).read_bytes() for part in parts] == [b"a", b"b"]
    assert not (folder / lost).exists()


def test_overwriting_keeps_the_old_files_until_the_new_ones_are_there(tmp_path: Path) -> None:
    old = write(tmp_path / "data", [b"old"])
    write(tmp_path / "day=1" / "data", [b"old"])
    to = Destination.at(str(tmp_path), {})
    to.begin()
    part = put(to, b"new")
    assert old.read_bytes() == framed([b"old"])
    to.commit([part], is_overwrite=True)
    assert names(tmp_path) == ["_SUCCESS", "part"]


def test_appending_keeps_the_old_files(tmp_path: Path) -> None:
    write(tmp_path / "data", [b"old"])
    to = Destination.at(str(tmp_path), {})
    to.begin()
    to.commit([put(to, b"new")], is_overwrite=False)
    assert names(tmp_path) == ["_SUCCESS", "data", "part"]


def test_a_commit_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "data", [b"old"])
    to = Destination.at(str(tmp_path), {})
    to.begin()
    parts = [put(to, b"new"), "part-that-the-driver-does-not-see"]
    with pytest.raises(WriteError, match=r"nothing was written.*does not see"):
        to.commit(parts, is_overwrite=True)
    to.abort()
    to.abort()  # twice does no harm
    assert names(tmp_path) == ["data"]


def test_a_task_that_fails_leaves_no_half_file(tmp_path: Path) -> None:
    to = Destination.at(str(tmp_path), {})
    to.begin()

    def fail() -> None:
        with to.part(0, "gzip") as (_, file):
            file.write(b"half")
            raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        fail()
    assert list(Path(to.staging).iterdir()) == []


def test_a_task_after_the_abort_cannot_write(tmp_path: Path) -> None:
    to = Destination.at(str(tmp_path), {})
    to.begin()
    to.abort()
    with pytest.raises(WriteError, match="cannot be written"):
        put(to, b"late")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "file", [])
    with pytest.raises(ConfigError, match="is a file"):
        Destination.at(str(path), {}).begin()
