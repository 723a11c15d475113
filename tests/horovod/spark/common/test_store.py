"""Stores: where things are in them, on local disks and on others."""

from __future__ import annotations

from pathlib import Path

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark.common.store import (
    DBFSLocalStore,
    FilesystemStore,
    HDFSStore,
    LocalStore,
    Store,
)
from sparkdl.storage.parquet.read import read_share

URLS = ["local", "memory://store"]


@pytest.fixture(params=URLS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FilesystemStore:
    pytest.importorskip("fsspec")
    found = Store.create(str(tmp_path) if request.param == "local" else request.param)
    assert isinstance(found, FilesystemStore)
    return found


def test_layout_is_horovods(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    assert store.prefix_path == tmp_path.as_uri()
    assert store.get_train_data_path() == f"{tmp_path.as_uri()}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{tmp_path.as_uri()}/intermediate_val_data.3"
    assert store.get_test_data_path(0).endswith("/intermediate_test_data.0")
    assert store.get_checkpoint_path("r") == f"{tmp_path.as_uri()}/runs/r"
    assert store.get_logs_path("r") == f"{tmp_path.as_uri()}/runs/r/logs"
    assert store.get_checkpoint_filename() == "checkpoint"


def test_store_that_keeps_no_runs_has_no_checkpoints(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path), save_runs=False, runs_path=str(tmp_path / "mine"))
    assert not store.saving_runs()
    assert store.get_checkpoint_path("r") is None
    assert store.get_logs_path("r") is None
    assert store.get_run_path("r") == (tmp_path / "mine" / "r").as_uri()


def test_files_are_written_read_and_deleted(store: FilesystemStore, tmp_path: Path) -> None:
    path = f"{store.prefix_path}/here/a.txt"
    assert not store.exists(path)
    (tmp_path / "local").write_text("abc")
    store.upload(tmp_path / "local", path)
    assert store.read(path) == b"abc"
    store.download(path, tmp_path / "back")
    assert (tmp_path / "back").read_text() == "abc"
    store.write_text(path, "other")
    assert store.read(path) == b"other"
    store.delete(f"{store.prefix_path}/here")
    assert not store.exists(path)
    store.delete(path)


def test_sync_copies_new_and_changed_files(store: FilesystemStore, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "events").write_text("1")
    (folder / "model.ckpt").write_text("m")
    sync = store.sync_fn("r")
    sync(str(folder))
    assert store.read(f"{store.get_logs_path('r')}/events") == b"1"
    assert [name.rpartition("/")[2] for name in store.get_checkpoints("r")] == ["model.ckpt"]
    store.write_text(f"{store.get_run_path('r')}/model.ckpt", "untouched")
    (folder / "logs" / "events").write_text("22")
    sync(str(folder))
    assert store.read(f"{store.get_logs_path('r')}/events") == b"22"
    assert store.read(f"{store.get_run_path('r')}/model.ckpt") == b"untouched"


def test_parquet_files_are_read_by_any_process(store: FilesystemStore, tmp_path: Path) -> None:
    path = store.get_train_data_path(0)
    assert not store.is_parquet_dataset(path)
    pq.write_table(pa.table({"x": [1, 2, 3], "y": [4, 5, 6]}), tmp_path / "part.parquet")
    store.upload(tmp_path / "part.parquet", f"{path}/part.parquet")
    assert store.is_parquet_dataset(path)
    store = cloudpickle.loads(cloudpickle.dumps(store))
    source = store.parquet_source(path, ["x"])
    shares = source.shares(2)
    rows = [b.column(0).to_pylist() for share in shares for b in read_share(share)]
    assert rows == [[1], [2, 3]]
    assert store.get_parquet_dataset(path).read().num_rows == 3


def test_paths_of_databricks_become_local_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16")
    for path in ("/dbfs/a/b", "dbfs:/a/b", "file:/dbfs/a/b", "file:///dbfs/a/b"):
        store = Store.create(path)
        assert isinstance(store, DBFSLocalStore)
        assert store.prefix_path == "file:///dbfs/a/b"
        assert store.get_localized_path(store.get_train_data_path()).startswith("/dbfs/a/b/inter")
    with pytest.raises(ConfigError, match="no path in DBFS"):
        DBFSLocalStore("/elsewhere")
    assert not isinstance(Store.create("/elsewhere"), DBFSLocalStore)


@pytest.mark.parametrize("path", ["s3://bucket/a", "hdfs://host"])
def test_path_that_is_not_in_hdfs_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="no path in HDFS"):
        HDFSStore(path)


def test_storage_that_fsspec_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="nowhere://x cannot be opened"):
        Store.create("nowhere://x")
