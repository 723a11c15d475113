"""Files and folders: what is asked for is found, and what cannot be is said at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdl.core.errors import ConfigError, ReadError, WriteError
from sparkdl.data.files import Destination
from sparkdl.data.framing import find, read_file
from sparkdl.storage.systems import locate
from tests.data.records import write

LOCAL = locate("/")[0]


def test_files_are_those_that_spark_reads(tmp_path: Path) -> None:
    for name in ("b", "a", "_SUCCESS", ".a.crc", "_staging-1/part", "day=1/c", "other/d"):
        write(tmp_path / name, [])

    def found(*paths: str) -> list[str]:
        return [Path(path).name for path in find(paths, {})[1]]

    assert found(str(tmp_path)) == ["a", "b", "c"]
    assert found(f"{tmp_path}/[ab]", f"file://{tmp_path}/a") == ["a", "b"]
    with pytest.raises(ConfigError, match="no such file or folder"):
        found(f"{tmp_path}/none*")
    with pytest.raises(ConfigError, match="different storages"):
        found(str(tmp_path), "s3://bucket/data")
    with pytest.raises(ConfigError, match="must name folders"):
        found("")


def test_a_file_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    assert list(read_file(LOCAL, str(write(tmp_path / "empty", [])))) == []
    with pytest.raises(ReadError, match=f"{tmp_path}/gone cannot be read"):
        list(read_file(LOCAL, f"{tmp_path}/gone"))


def put(to: Destination, data: bytes, number: int = 0) -> str:
    with to.part(number) as (name, file):
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
    to.commit(parts)
    assert names(folder) == ["_SUCCESS", "part", "part"]
    assert [(folder / part).read_bytes() for part in parts] == [b"a", b"b"]
    assert not (folder / lost).exists()


def test_a_commit_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "data", [b"old"])
    to = Destination.at(str(tmp_path), {})
    to.begin()
    parts = [put(to, b"new"), "part-that-the-driver-does-not-see"]
    with pytest.raises(WriteError, match=r"nothing was written.*does not see"):
        to.commit(parts)
    to.abort()
    to.abort()  # twice does no harm
    assert names(tmp_path) == ["data"]


def test_a_task_that_fails_leaves_no_half_file(tmp_path: Path) -> None:
    to = Destination.at(str(tmp_path), {})
    to.begin()

    def fail() -> None:
        with to.part(0) as (_, file):
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
