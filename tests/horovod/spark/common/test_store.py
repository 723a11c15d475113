"""Stores: where things are in them, and what they read and write."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdl.core.errors import ConfigError, RemovedModuleError
from sparkdl.horovod.spark.common.store import DBFSLocalStore, HDFSStore, LocalStore, Store


def test_layout_is_horovods(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    assert store.prefix_path == f"file://{tmp_path}"
    assert store.train_path == f"file://{tmp_path}/intermediate_train_data"
    assert store.val_path == f"file://{tmp_path}/intermediate_val_data"
    assert store.folder("r") == f"{tmp_path}/runs/r"
    mine = Store.create(str(tmp_path), runs_path=str(tmp_path / "mine"), train_path="s3://b/rows")
    assert mine.folder("r") == f"{tmp_path}/mine/r"
    assert mine.train_path == "s3://b/rows"
    assert HDFSStore("/user/me").folder("r") == "hdfs:///user/me/runs/r"
    for path in ("/dbfs/a/b", "dbfs:/a/b", "file:/dbfs/a/b", "file:///dbfs/a/b"):
        assert DBFSLocalStore(path).prefix_path == "file:///dbfs/a/b"


def test_store_that_cannot_be_opened_is_refused() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Store.create("nowhere://x")
    with pytest.raises(ConfigError, match="needs prefix_path, or train_path"):
        Store(runs_path="/a")


def test_method_of_horovods_store_names_what_is_there_instead(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    with pytest.raises(RemovedModuleError, match=r"get_checkpoint_path: .* runs_path"):
        store.get_checkpoint_path("r")
