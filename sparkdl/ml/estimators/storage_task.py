"""A saved stage's files over Spark Connect: Spark tasks write and read them.

Runs in: driver, feeder. A client of Spark Connect may not reach the executors' storage, and has no
Hadoop to open it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs as pafs

from sparkdl.driver.executors.sessions import qualified
from sparkdl.ml.estimators.source import local_path
from sparkdl.storage.systems import locate, open_storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NBYTES = 4 << 20
_CONTENT = "content binary"


class RemoteStorage:
    """The `Storage` of a Spark Connect session."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._spark = spark
        self._folder = qualified(spark, folder)

    def add(self, path: str, name: str) -> None:
        """Copy a file or folder into the stage's folder: the client's, or else the executors'."""
        local = Path(local_path(path))
        if not local.exists():
            self._run(partial(_copy, path, self.location(name)))
            return
        for file in [local] if local.is_file() else sorted(local.rglob("*")):
            if file.is_file():
                inner = f"{name}/{file.relative_to(local)}" if file != local else name
                self.write(file.read_bytes(), inner)

    def write(self, content: bytes, name: str) -> None:
        """Write a file."""
        # An empty file has one piece as well, or no task would make it.
        offsets = range(0, len(content) or 1, _NBYTES)
        pieces = [content[at : at + _NBYTES] for at in offsets]
        rows = pa.table({"offset": pa.array(offsets, pa.int64()), "content": pieces})
        frame = self._spark.createDataFrame(rows)
        # One task writes the file, and Spark keeps no order of rows by itself.
        ordered = frame.repartition(1).sortWithinPartitions("offset")
        ordered.mapInArrow(_Write(self.location(name)), _CONTENT).collect()

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if there is no such file."""
        pieces = self._run(partial(_read, self.location(name)))
        return b"".join(bytes(piece.content) for piece in pieces) if pieces else None

    def remove(self) -> None:
        """Remove the stage's folder, if it is there."""
        self._run(partial(_remove, self._folder))

    def location(self, name: str) -> str:
        """Return where a file is: a local path, or a URL."""
        return local_path(f"{self._folder}/{name}".rstrip("/"))

    def _run(self, task: Any) -> list[Any]:
        frame = self._spark.range(1, numPartitions=1)
        return frame.mapInArrow(task, _CONTENT).collect()


@dataclass(frozen=True)
class _Write:
    """Writes the pieces of a file, which come in order."""

    url: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        system, path = _open(self.url)
        system.create_dir(os.path.dirname(path))
        with system.open_output_stream(path) as file:
            for batch in batches:
                for piece in batch.column(1):
                    file.write(piece.as_buffer())
        yield from ()


def _copy(source: str, url: str, batches: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    here, path = _open(source)
    there, target = _open(url)
    is_folder = here.get_file_info(path).type == pafs.FileType.Directory
    there.create_dir(target if is_folder else os.path.dirname(target))
    pafs.copy_files(path, target, here, there)
    yield from ()


def _read(url: str, batches: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    system, path = _open(url)
    if system.get_file_info(path).type == pafs.FileType.File:
        # First, so that an empty file differs from a missing one.
        yield pa.record_batch({"content": [b""]})
        with system.open_input_stream(path) as file:
            while piece := file.read(_NBYTES):
                yield pa.record_batch({"content": [piece]})


def _remove(url: str, batches: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    system, path = _open(url)
    if system.get_file_info(path).type != pafs.FileType.NotFound:
        system.delete_dir(path)
    yield from ()


def _open(url: str) -> tuple[pafs.FileSystem, str]:
    storage, path = locate(url)
    return open_storage(storage), path
