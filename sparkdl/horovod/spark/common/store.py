"""Where an estimator keeps its data, checkpoints and logs: a folder that all processes reach.

Runs in: driver, child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/common/store.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparkdl.core.errors import ConfigError
from sparkdl.storage.parquet.source import ParquetSource, list_files


class Store:
    """A folder for prepared data and for runs.

    ==================================  ==================================================
    `<prefix>/intermediate_train_data`  training rows as Parquet; `.0`, `.1`, … where fits
                                        have prepared them
    `<prefix>/intermediate_val_data`    validation rows
    `<prefix>/runs/<run_id>`            of each run: its checkpoint, and `logs`
    ==================================  ==================================================
    """

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> AbstractFilesystemStore:
        """Return the store for a path.

        Args:
            prefix_path: a local path, or a URL of any storage that fsspec knows (`s3://`, `gs://`,
                `abfs://`, …); `hdfs://`; on Databricks also `dbfs:/` and `/dbfs/`.
            args, kwargs: see `AbstractFilesystemStore`.

        Raises:
            ConfigError: if fsspec lacks what the storage needs.
        """
        if HDFSStore.matches(prefix_path):
            return HDFSStore(prefix_path, *args, **kwargs)
        is_databricks = "DATABRICKS_RUNTIME_VERSION" in os.environ
        if is_databricks and DBFSLocalStore.matches_dbfs(prefix_path):
            return DBFSLocalStore(prefix_path, *args, **kwargs)
        return FilesystemStore(prefix_path, *args, **kwargs)


class AbstractFilesystemStore(Store):
    """A store on a file system of fsspec.

    Args:
        prefix_path: the folder.
        train_path, val_path, test_path, runs_path: instead of those below it.
        save_runs: whether checkpoints and logs are kept.
        storage_options: how fsspec opens the storage.
        checkpoint_filename: instead of `checkpoint`.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        self.storage_options = dict(storage_options or {})
        self.fs = self._open(prefix_path)
        self.prefix_path = self.get_full_path(prefix_path)
        self._train_path = self._path(train_path, "intermediate_train_data")
        self._val_path = self._path(val_path, "intermediate_val_data")
        self._test_path = self._path(test_path, "intermediate_test_data")
        self._runs_path = self._path(runs_path, "runs")
        self._save_runs = save_runs
        self.checkpoint_filename = checkpoint_filename or "checkpoint"

    def _open(self, url: str) -> Any:
        import fsspec

        try:
            return fsspec.core.url_to_fs(url, **self.storage_options)[0]
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"the store {url} cannot be opened: {error}. Install the package that fsspec needs "
                "for it, on the driver and on all executors"
            ) from error

    def _path(self, given: str | None, name: str) -> str:
        return self.get_full_path(given) if given else f"{self.prefix_path}/{name}"

    def get_full_path(self, path: str) -> str:
        """Return a path as Spark and other processes find it: a URL."""
        # A URL, or Spark would take the path for one of Hadoop's default file system.
        return path if "://" in path else Path(os.path.abspath(path)).as_uri()

    def get_localized_path(self, path: str) -> str:
        """Return a path as `fs` takes it."""
        return str(self.fs._strip_protocol(path))

    def exists(self, path: str) -> bool:
        """Return whether there is such a file or folder."""
        return bool(self.fs.exists(self.get_localized_path(path)))

    def read(self, path: str) -> bytes:
        """Return the bytes of a file."""
        return bytes(self.fs.cat_file(self.get_localized_path(path)))

    def write_text(self, path: str, text: str) -> None:
        """Write a file."""
        with self.fs.open(self.get_localized_path(path), "w") as file:
            file.write(text)

    def upload(self, local: str | Path, path: str) -> None:
        """Copy a local file into the store."""
        target = self.get_localized_path(path)
        self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.fs.put_file(str(local), target)

    def download(self, path: str, local: str | Path) -> None:
        """Copy a file of the store to a local path."""
        self.fs.get_file(self.get_localized_path(path), str(local))

    def delete(self, path: str) -> None:
        """Delete a file or folder, if it is there."""
        if self.exists(path):
            self.fs.rm(self.get_localized_path(path), recursive=True)

    def parquet_source(self, path: str, columns: list[str] | None = None) -> ParquetSource:
        """Return what the Parquet files in a folder hold.

        Raises:
            ConfigError: if there are none, or they lack a column.
        """
        protocol = self.fs.protocol if isinstance(self.fs.protocol, str) else self.fs.protocol[0]
        inner = self.get_localized_path(path)
        if protocol in ("file", "local"):
            return list_files(inner, columns)
        return list_files(f"fsspec+{protocol}://{inner}", columns, self.fs.storage_options)

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether there are Parquet files in a folder."""
        try:
            self.parquet_source(path)
        except ConfigError:
            return False
        return True

    def get_parquet_dataset(self, path: str) -> Any:
        """Return a folder as a `pyarrow.parquet.ParquetDataset`."""
        import pyarrow.parquet as pq

        return pq.ParquetDataset(self.get_localized_path(path), filesystem=self.fs)

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the training rows."""
        return self._train_path if idx is None else f"{self._train_path}.{idx}"

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the validation rows."""
        return self._val_path if idx is None else f"{self._val_path}.{idx}"

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the rows to test with."""
        return self._test_path if idx is None else f"{self._test_path}.{idx}"

    def saving_runs(self) -> bool:
        """Return whether checkpoints and logs are kept."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Return the folder of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of a run."""
        return f"{self.get_runs_path()}/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Return the folder with a run's checkpoint, None if runs are not kept."""
        return self.get_run_path(run_id) if self._save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Return the paths of a run's files that end so, sorted."""
        folder = self.get_checkpoint_path(run_id)
        if folder is None or not self.exists(folder):
            return []
        names = self.fs.ls(self.get_localized_path(folder), detail=False)
        return sorted(name for name in names if name.endswith(suffix))

    def get_checkpoint_filename(self) -> str:
        """Return the name of a checkpoint's file."""
        return self.checkpoint_filename

    def get_logs_path(self, run_id: str) -> str | None:
        """Return the folder of a run's logs, None if runs are not kept."""
        return f"{self.get_run_path(run_id)}/{self.get_logs_subdir()}" if self._save_runs else None

    def get_logs_subdir(self) -> str:
        """Return the name of the folder of logs."""
        return "logs"

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Return a function that copies a local folder's new and changed files to a run's."""
        return _Sync(self, self.get_run_path(run_id))


@dataclass(frozen=True)
class _Sync:
    store: AbstractFilesystemStore
    target: str
    _sent: dict[Path, float] = field(default_factory=dict)

    def __call__(self, folder: str) -> None:
        for path in sorted(Path(folder).rglob("*")):
            modified = path.stat().st_mtime_ns
            # Only what has changed: this is called after each epoch, with all earlier files.
            if path.is_file() and self._sent.get(path) != modified:
                self.store.upload(path, f"{self.target}/{path.relative_to(folder)}")
                self._sent[path] = modified


class FilesystemStore(AbstractFilesystemStore):
    """A store at a local path, or at a URL of any storage that fsspec knows."""

    def get_filesystem(self) -> Any:
        """Return fsspec's file system."""
        return self.fs


class LocalStore(FilesystemStore):
    """A store on a file system that is mounted on all machines."""


class HDFSStore(AbstractFilesystemStore):
    """A store in HDFS: `hdfs://namenode:8020/path`, `hdfs:///path` or `/path`.

    It needs libhdfs, as pyarrow does.

    Args:
        prefix_path: the folder.
        host, port: of the namenode; by default those of the path, or of Hadoop's configuration.
        user, kerb_ticket, extra_conf: see `pyarrow.fs.HadoopFileSystem`.
        kwargs: see `AbstractFilesystemStore`.
    """

    FS_PREFIX = "hdfs://"

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        extra_conf: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        url = prefix_path if "://" in prefix_path else f"{self.FS_PREFIX}{prefix_path}"
        parts = urlsplit(url)
        if not self.matches(url) or not parts.path:
            raise ConfigError(f"{prefix_path!r} is no path in HDFS: write hdfs://host:port/path")
        # Before the base's constructor, which calls `get_full_path`.
        self._authority = parts.netloc
        given = {
            "host": host or parts.hostname,
            "port": port or parts.port,
            "user": user,
            "kerb_ticket": kerb_ticket,
            "extra_conf": extra_conf,
        }
        options = {name: value for name, value in given.items() if value}
        super().__init__(url, storage_options=options, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a path is in HDFS."""
        return path.startswith(cls.FS_PREFIX)

    def get_full_path(self, path: str) -> str:
        """Return a path as Spark finds it."""
        return path if self.matches(path) else f"{self.FS_PREFIX}{self._authority}{path}"


class DBFSLocalStore(FilesystemStore):
    """A store in Databricks' file system: `/dbfs/…`, `dbfs:/…`, `file:/dbfs/…`.

    All machines of a Databricks cluster have it mounted.
    """

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(self.normalize_path(prefix_path), *args, **kwargs)

    @staticmethod
    def matches_dbfs(path: str) -> bool:
        """Return whether a path is in DBFS."""
        is_url = path.startswith("dbfs:/") and not path.startswith("dbfs://")
        return is_url or path.startswith(("/dbfs/", "file:///dbfs/", "file:/dbfs/"))

    @classmethod
    def normalize_path(cls, path: str) -> str:
        """Return a path in the form `/dbfs/…`.

        Raises:
            ConfigError: if it is not in DBFS.
        """
        if not cls.matches_dbfs(path):
            raise ConfigError(
                f"{path!r} is no path in DBFS: it must begin with /dbfs/, dbfs:/, file:/dbfs/ or "
                "file:///dbfs/"
            )
        if path.startswith("dbfs:/"):
            return f"/dbfs/{path[len('dbfs:/') :]}"
        return path[path.index("/dbfs/") :]

    def get_full_path(self, path: str) -> str:
        """Return a path as Spark finds it."""
        return f"file://{self.normalize_path(path)}"

    def get_localized_path(self, path: str) -> str:
        """Return a path as `fs` takes it."""
        return self.normalize_path(path)
