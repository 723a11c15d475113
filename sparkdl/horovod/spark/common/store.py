"""A folder that driver and processes reach: checkpoints of runs, and rows for `fit_on_parquet`.

Runs in: driver, child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/common/store.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import pyarrow.fs as pafs

from sparkdl.core.errors import ConfigError
from sparkdl.core.namesakes import missing_name
from sparkdl.storage.systems import locate, open_storage


class Store:
    """A folder for rows and for runs.

    Args:
        prefix_path: a local path that all machines have mounted, or a URL (`s3://`, `gs://`,
            `abfs://`, `hdfs://`; `dbfs:/` where it is mounted as `/dbfs`).
        train_path, val_path: Parquet files for `fit_on_parquet`; `intermediate_train_data` and
            `intermediate_val_data` in the folder by default.
        test_path: accepted, without effect.
        runs_path: the folder of the checkpoints, `runs` in the folder by default.
        save_runs: whether checkpoints are kept.
        storage_options: arguments of the `pyarrow.fs` class of the URL.
        checkpoint_filename: instead of `checkpoint`.

    Raises:
        ConfigError: without the paths that it needs, or for a URL of another scheme.
    """

    def __init__(
        self,
        prefix_path: str | None = None,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        if prefix_path is None and (train_path is None or (save_runs and runs_path is None)):
            raise ConfigError("a store needs prefix_path, or train_path and runs_path")
        folder = self._url(prefix_path or "")
        self.prefix_path = folder
        self.train_path = self._url(train_path or f"{folder}/intermediate_train_data")
        self.val_path = self._url(val_path or f"{folder}/intermediate_val_data")
        self.runs_path = self._url(runs_path or f"{folder}/runs")
        self.save_runs = save_runs
        self.storage_options = dict(storage_options or {})
        self.checkpoint_filename = checkpoint_filename or "checkpoint"
        for url in (self.train_path, self.val_path, self.runs_path):
            locate(url, self.storage_options)  # refuses what it cannot open

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Return the store for a path or URL; for the arguments see `Store`."""
        return Store(prefix_path, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # for which Python asks, to copy
            raise AttributeError(name)
        missing_name(f"{__name__}.Store", name)

    def _url(self, path: str) -> str:
        # A URL, or Spark would take the path for one of Hadoop's default file system.
        path = re.sub("^dbfs:/(?!/)", "/dbfs/", re.sub("^file:/(?!/)", "/", path))
        return path if "://" in path or not path else f"file://{os.path.abspath(path)}"

    def folder(self, run_id: str) -> str:
        """Return the URL of a run's folder; a path, if it is on local disks."""
        return f"{self.runs_path}/{run_id}".removeprefix("file://")

    def read(self, url: str) -> bytes | None:
        """Return the bytes of a file; None if there is none."""
        system, path = self._place(url)
        if system.get_file_info(path).type != pafs.FileType.File:
            return None
        with system.open_input_file(path) as file:
            return bytes(file.read())

    def write(self, url: str, content: bytes) -> None:
        """Write a file, whole or not at all where the storage can rename."""
        system, path = self._place(url)
        system.create_dir(path.rpartition("/")[0])
        with system.open_output_stream(f"{path}.new") as file:
            file.write(content)
        system.move(f"{path}.new", path)

    def _place(self, url: str) -> tuple[pafs.FileSystem, str]:
        storage, path = locate(url, self.storage_options)
        return open_storage(storage), path


LocalStore = FilesystemStore = DBFSLocalStore = Store


class HDFSStore(Store):
    """A store in HDFS, whose paths may lack `hdfs://`; for the arguments see `Store`."""

    def _url(self, path: str) -> str:
        return path if "://" in path or not path else f"hdfs://{path}"


__getattr__ = partial(missing_name, __name__)
