"""A folder that driver and processes reach: rows for `fit_on_parquet`, and logs of runs.

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/common/store.py
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.namesakes import missing_name
from sparkdl.storage.systems import locate


class Store:
    """A folder for rows and for runs.

    Args:
        prefix_path: a local path that all machines have mounted, or a URL (`s3://`, `gs://`,
            `abfs://`, `hdfs://`; `dbfs:/` where it is mounted as `/dbfs`).
        train_path, val_path: Parquet files for `fit_on_parquet`; `intermediate_train_data` and
            `intermediate_val_data` in the folder by default.
        runs_path: the folder of the runs, `runs` in the folder by default.
        test_path, save_runs, storage_options, checkpoint_filename: accepted, without effect.

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
        storage_options: Any = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        if prefix_path is None and train_path is None:
            raise ConfigError("a store needs prefix_path, or train_path")
        folder = self._url(prefix_path or "")
        self.prefix_path = folder
        self.train_path = self._url(train_path or f"{folder}/intermediate_train_data")
        self.val_path = self._url(val_path or f"{folder}/intermediate_val_data")
        self.runs_path = self._url(runs_path or f"{folder}/runs")
        for url in (self.train_path, self.val_path, self.runs_path):
            locate(url)  # refuses what it cannot open

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


LocalStore = FilesystemStore = DBFSLocalStore = Store


class HDFSStore(Store):
    """A store in HDFS, whose paths may lack `hdfs://`; for the arguments see `Store`."""

    def _url(self, path: str) -> str:
        return path if "://" in path or not path else f"hdfs://{path}"


__getattr__ = partial(missing_name, __name__)
