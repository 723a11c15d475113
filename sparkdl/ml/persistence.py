"""How stages are saved and loaded: Spark ML's metadata, and Parquet rows of contents beside it.

Runs in: driver, feeder

Spark writes and reads both, so a stage may be on any file system that Spark knows, over Spark
Connect as well. A saved model holds its model's files, so it can be loaded where the training's
code, and the folder that the training wrote to, are gone. A saved estimator holds the user's
function by cloudpickle: load only those you trust, as with any pickle.
"""

from __future__ import annotations

import io
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.fs as pafs
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
from sparkdl.storage.systems import locate, open_storage

Contents = Mapping[str, bytes]
"""What a saved stage consists of beside its parameters, by name."""
_PIECE = "content binary"
_ROW = "name string, offset long, content binary"
_WRITE_NBYTES = 32 << 20
"""Of the rows that are written at once: Spark's driver and one task hold them in memory."""


class StageWriter(MLWriter):
    """Saves a stage: its parameters, `stage._extra()` and `stage._contents()`."""

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self._stage = stage

    def _handleOverwrite(self, path: str) -> None:
        """Leave it to `saveImpl`: Spark's own needs a JVM."""

    def saveImpl(self, path: str) -> None:
        """Save into a folder, which must not hold a stage unless `overwrite` was called."""
        stage, spark = self._stage, self.sparkSession
        contents = stage._contents(spark)
        params = {
            name: asdict(value) if is_dataclass(value) else value  # type: ignore[arg-type]
            for name, value in stage._to_save().items()
            if value is not None
        }
        extra = {**stage._extra(), "contents": {name: len(x) for name, x in contents.items()}}
        try:
            metadata = DefaultParamsWriter._get_metadata_to_save(stage, spark, extra, params)
        except TypeError as error:
            raise ConfigError(
                f"a parameter of {stage.uid} cannot be saved: {error}. Set it to numbers, texts, "
                "lists or dicts"
            ) from None
        mode = first = "overwrite" if self.shouldOverwrite else "error"
        with named_jobs(spark, "sparkdl", f"save {stage.uid}"):
            for rows in _rows(contents):
                frame = spark.createDataFrame(rows, _ROW).coalesce(1)
                frame.write.mode(mode).parquet(f"{path}/data")
                mode = "append"
            # Last, so that an interrupted save leaves no stage.
            text = spark.createDataFrame([(metadata,)], "value string").coalesce(1)
            text.write.mode(first).text(f"{path}/metadata")


def _rows(contents: Contents) -> Iterator[list[tuple[str, int, bytes]]]:
    """Yield rows of pieces that are written at once; a list without rows, if there are none."""
    rows: list[tuple[str, int, bytes]] = []
    nbytes = 0
    for name, content in contents.items():
        for offset in range(0, len(content), _WRITE_NBYTES):
            piece = content[offset : offset + _WRITE_NBYTES]
            if nbytes + len(piece) > _WRITE_NBYTES:
                yield rows
                rows, nbytes = [], 0
            rows.append((name, offset, piece))
            nbytes += len(piece)
    yield rows


class StageReader(MLReader[Any]):
    """Loads what `StageWriter` saved."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """Return the stage in the folder `path`.

        Raises:
            ConfigError: if another kind of stage is there, or not all of it.
        """
        spark, wanted = self.sparkSession, self._kind.__name__
        with named_jobs(spark, "sparkdl", f"load {wanted}"):
            (line,) = spark.read.text(f"{path}/metadata").collect()
            metadata = DefaultParamsReader._parseMetaData(line.value)
            found = metadata["class"]
            # Not the module, because modules have moved.
            if found.rpartition(".")[2] != wanted:
                raise ConfigError(
                    f"{path} holds a {found}, not a {wanted}: load it with "
                    f"{found.rpartition('.')[2]}.load"
                )
            contents = _contents(spark, f"{path}/data", metadata["contents"])
        stage = self._kind._restored(contents, metadata)
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        return stage


def _contents(spark: SparkSession, path: str, sizes: Mapping[str, int]) -> Contents:
    pieces: dict[str, dict[int, bytes]] = defaultdict(dict)
    # One partition after another, because Spark limits what a job collects.
    for row in spark.read.schema(_ROW).parquet(path).toLocalIterator():
        pieces[row.name][row.offset] = row.content
    found = {name: b"".join(piece for _, piece in sorted(pieces[name].items())) for name in sizes}
    if broken := [name for name in sizes if len(found[name]) != sizes[name]]:
        raise ConfigError(
            f"{path} lacks parts of {', '.join(broken)}: the stage was not saved whole. Save it "
            "again"
        )
    return found


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
        """Return what the metadata hold beside the parameters."""
        return {}

    def _contents(self, spark: SparkSession) -> Contents:
        return {}

    @classmethod
    def _restored(cls, contents: Contents, metadata: dict[str, Any]) -> Any:
        """Return a stage of these contents; its parameters are set later."""
        return cls()


CODE = "code.pickle"


def packed_code(*values: Any) -> dict[str, bytes]:
    """Return the user's own functions and arguments as a content of a stage."""
    try:
        return {CODE: cloudpickle.dumps(values)}
    except Exception as error:
        raise ConfigError(
            f"the stage's function or arguments cannot be pickled: {error}. Make locks, files and "
            "connections inside the function"
        ) from error


def unpacked_code(contents: Contents) -> tuple[Any, ...]:
    """Return what `packed_code` packed. It runs what the pickle says: trust its origin."""
    found: tuple[Any, ...] = cloudpickle.loads(contents[CODE])
    return found


def read_path(spark: SparkSession, path: str) -> bytes:
    """Return a file's content, or a folder as a ZIP archive of its files.

    What a client of Spark Connect cannot read is read by a task.

    Raises:
        OSError, PySparkException: if it cannot be read.
    """
    try:
        return _read_path(path)
    except OSError:
        if context_of(spark) is not None:
            raise
    pieces = spark.range(1, numPartitions=1).mapInArrow(partial(_read_in_task, path), _PIECE)
    return b"".join(row.content for row in pieces.toLocalIterator())


def _read_in_task(path: str, batches: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    content = _read_path(path)
    for offset in range(0, len(content), _WRITE_NBYTES):
        yield pa.record_batch({"content": [content[offset : offset + _WRITE_NBYTES]]})


def _read_path(path: str) -> bytes:
    storage, inner = locate(path)
    system = open_storage(storage)
    if system.get_file_info(inner).type != pafs.FileType.Directory:
        return _read_file(system, inner)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for info in system.get_file_info(pafs.FileSelector(inner, recursive=True)):
            if info.type == pafs.FileType.File:
                name = info.path.removeprefix(inner).strip("/")
                file.writestr(name, _read_file(system, info.path))
    return archive.getvalue()


def _read_file(system: pafs.FileSystem, path: str) -> bytes:
    with system.open_input_stream(path) as file:
        return bytes(file.read())
