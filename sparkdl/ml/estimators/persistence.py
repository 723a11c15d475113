"""How stages are saved and loaded: Spark ML's metadata, and files beside it.

Runs in: driver

A saved model holds its model's files, so it can be loaded where the training's code, and the
folder that the training wrote to, are gone. A saved estimator holds the user's function by
cloudpickle: load only those you trust, as with any pickle.
"""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import Any
from urllib.parse import urlsplit

import cloudpickle
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)
from pyspark.sql import SparkSession

from sparkdl.core.errors import ConfigError
from sparkdl.core.jobs import context_of, named_jobs
from sparkdl.core.scratch import scratch_folder
from sparkdl.ml.estimators.source import local_path
from sparkdl.ml.estimators.storage_task import RemoteStorage
from sparkdl.spark_versions import metadata_session


class HadoopStorage:
    """A saved stage's folder, on any file system that Hadoop knows."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._jvm: Any = spark._jvm
        self._conf = spark._jsc.hadoopConfiguration()
        self._folder = folder

    def add(self, path: str, name: str) -> None:
        """Copy a file or folder into the stage's folder."""
        # Hadoop would look for a plain path in its default file system.
        self._copy(path if urlsplit(path).scheme else f"file://{path}", f"{self._folder}/{name}")

    def write(self, content: bytes, name: str) -> None:
        """Write a file."""
        with scratch_folder() as folder:
            file = folder / "file"
            file.write_bytes(content)
            self.add(str(file), name)

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if there is no such file."""
        path = self._path(f"{self._folder}/{name}")
        if not path.getFileSystem(self._conf).exists(path):
            return None
        with scratch_folder() as folder:
            self._copy(f"{self._folder}/{name}", f"file://{folder}/file")
            return (folder / "file").read_bytes()

    def location(self, name: str) -> str:
        """Return where a file is: a local path, or a URL."""
        path = self._path(f"{self._folder}/{name}")
        return local_path(path.getFileSystem(self._conf).makeQualified(path).toString())

    def _path(self, text: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(text)

    def _copy(self, source: str, target: str) -> None:
        paths = [self._path(source), self._path(target)]
        systems = [path.getFileSystem(self._conf) for path in paths]
        copy = self._jvm.org.apache.hadoop.fs.FileUtil.copy
        copy(systems[0], paths[0], systems[1], paths[1], False, self._conf)


Storage = HadoopStorage | RemoteStorage


def storage_of(spark: SparkSession, folder: str) -> Storage:
    """Return the folder of a stage as this session reaches it."""
    return (RemoteStorage if context_of(spark) is None else HadoopStorage)(spark, folder)


class StageWriter(MLWriter):
    """Saves a stage: its parameters, `stage._extra()`, and what `stage._save_files` adds."""

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self._stage = stage

    def _handleOverwrite(self, path: str) -> None:
        storage = storage_of(self.sparkSession, path)
        if isinstance(storage, RemoteStorage):  # Spark's own needs an active session there
            storage.remove()
        else:
            super()._handleOverwrite(path)

    def saveImpl(self, path: str) -> None:
        """Save into a folder that does not exist."""
        stage, spark = self._stage, self.sparkSession
        params = {
            name: asdict(value) if is_dataclass(value) else value  # type: ignore[arg-type]
            for name, value in stage._to_save().items()
            if value is not None
        }
        try:
            json.dumps(params)
        except TypeError as error:
            raise ConfigError(
                f"a parameter of {stage.uid} cannot be saved: {error}. Set it to numbers, texts, "
                "lists or dicts"
            ) from None
        storage = storage_of(spark, path)
        with named_jobs(spark, "sparkdl", f"save {stage.uid}"):
            known = metadata_session(spark)
            DefaultParamsWriter.saveMetadata(stage, path, known, stage._extra(), params)
        # Last, because Spark makes the folder when it writes the metadata.
        stage._save_files(storage)


class StageReader(MLReader[Any]):
    """Loads what `StageWriter` saved."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """Return the stage in the folder `path`.

        Raises:
            ConfigError: if another kind of stage is there.
        """
        with named_jobs(self.sparkSession, "sparkdl", f"load {self._kind.__name__}"):
            known = metadata_session(self.sparkSession)
            metadata = DefaultParamsReader.loadMetadata(path, known)
        found, wanted = metadata["class"], self._kind.__name__
        if found.rpartition(".")[2] != wanted:  # modules have moved; a stage's name does not
            raise ConfigError(
                f"{path} holds a {found}, not a {wanted}: load it with "
                f"{found.rpartition('.')[2]}.load"
            )
        storage = storage_of(self.sparkSession, path)
        stage = self._kind._load_files(storage, metadata)
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        # After the parameters, among which may be a path from before the saving.
        stage._after_load(storage)
        return stage


class Saved(MLWritable, MLReadable[Any]):
    """Makes a stage writable and readable.

    A stage of sparkdl has `__module__ = "sparkdl"`: Spark ML finds the class of a saved stage by
    its module, and stages that were saved have to be found wherever their modules move.
    """

    def write(self) -> StageWriter:
        """Return what saves this stage: `stage.write().overwrite().save(path)`."""
        return StageWriter(self)

    @classmethod
    def read(cls) -> StageReader:
        """Return what loads a stage of this kind."""
        return StageReader(cls)

    def _to_save(self) -> dict[str, Any]:
        return {param.name: value for param, value in self._paramMap.items()}  # type: ignore[attr-defined]

    def _extra(self) -> dict[str, Any]:
        return {}

    def _save_files(self, storage: Storage) -> None:
        """Add files."""

    @classmethod
    def _load_files(cls, storage: Storage, metadata: dict[str, Any]) -> Any:
        return cls()

    def _after_load(self, storage: Storage) -> None:
        """Set what depends on where the stage is."""


CODE = "code.pickle"


def save_code(storage: Storage, *values: Any) -> None:
    """Save the user's own functions and arguments.

    Raises:
        ConfigError: if they cannot be pickled.
    """
    try:
        content = cloudpickle.dumps(values)
    except Exception as error:
        raise ConfigError(
            f"the stage's function or arguments cannot be pickled: {error}. Make locks, files and "
            "connections inside the function"
        ) from error
    storage.write(content, CODE)


def load_code(storage: Storage) -> tuple[Any, ...]:
    """Return what `save_code` saved. It runs what the pickle says: trust its origin."""
    content = storage.read(CODE)
    if content is None:
        raise ConfigError(
            f"{storage.location(CODE)} is missing: the stage was not saved whole. Save it again"
        )
    found: tuple[Any, ...] = cloudpickle.loads(content)
    return found
