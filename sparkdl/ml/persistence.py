"""How stages are saved and loaded: Spark ML's metadata, and Parquet rows of contents beside it.

Runs in: driver, feeder

Spark writes and reads both, so a stage may be on any file system that Spark knows, over Spark
Connect as well. A saved model holds its model's files, so it can be loaded where the training's
code, and the folder that the training wrote to, are gone. A saved estimator holds the user's
function by cloudpickle: load only those you trust, as with any pickle.
"""

from __future__ import annotations

import gc
import io
import os
import shutil
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

import cloudpickle
import pyarrow as pa
import pyarrow.fs as pafs
from pyspark.ml import util
from pyspark.sql import SparkSession

from sparkdl.core.errors import ConfigError
from sparkdl.core.jobs import context_of, named_jobs
from sparkdl.storage.systems import locate, open_storage

Contents = Mapping[str, bytes | os.PathLike[str]]
"""What a saved stage consists of beside its parameters, by name: bytes or files; loaded, files."""
_PIECE = "content binary"
_ROW = "name string, offset long, content binary"
_WRITE_NBYTES = 32 << 20
"""Of the rows that are written at once: Spark's driver and one task hold them in memory."""
_COPY_NBYTES = 4 << 20


class StageWriter(util.MLWriter):
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
        extra = {**stage._extra(), "contents": {name: _nbytes(x) for name, x in contents.items()}}
        try:
            metadata = util.DefaultParamsWriter._get_metadata_to_save(stage, spark, extra, params)
        except TypeError as error:
            raise ConfigError(
                f"a parameter of {stage.uid} cannot be saved: {error}. Set it to numbers, texts, "
                "lists or dicts"
            ) from None
        mode = first = "overwrite" if self.shouldOverwrite else "error"
        with named_jobs(spark, "sparkdl", f"save {stage.uid}"):
            for rows in _rows(contents):
                if mode == "append":
                    gc.collect()  # Py4J's cycles hold the rows written before in the JVM
                # No name for the frame: it would keep its rows.
                spark.createDataFrame(rows, _ROW).coalesce(1).write.mode(mode).parquet(
                    f"{path}/data"
                )
                mode = "append"
            # Last, so that an interrupted save leaves no stage.
            text = spark.createDataFrame([(metadata,)], "value string").coalesce(1)
            text.write.mode(first).text(f"{path}/metadata")


def _rows(contents: Contents) -> Iterator[list[tuple[str, int, bytes]]]:
    """Yield rows of pieces that are written at once; a list without rows, if there are none."""
    rows: list[tuple[str, int, bytes]] = []
    nbytes = 0
    for name, content in contents.items():
        offset = 0
        with io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb") as file:
            while piece := file.read(_WRITE_NBYTES):
                if nbytes + len(piece) > _WRITE_NBYTES:
                    yield rows
                    rows, nbytes = [], 0
                rows.append((name, offset, piece))
                offset += len(piece)
                nbytes += len(piece)
    yield rows


def _nbytes(content: bytes | os.PathLike[str]) -> int:
    return len(content) if isinstance(content, bytes) else os.stat(content).st_size


class StageReader(util.MLReader[Any]):
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
            metadata = util.DefaultParamsReader._parseMetaData(line.value)
            found = metadata["class"]
            # Not the module, because modules have moved.
            if found.rpartition(".")[2] != wanted:
                raise ConfigError(
                    f"{path} holds a {found}, not a {wanted}: load it with "
                    f"{found.rpartition('.')[2]}.load"
                )
            with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
                files = {name: Path(folder, str(n)) for n, name in enumerate(metadata["contents"])}
                _read_contents(spark, f"{path}/data", files, metadata["contents"])
                stage = self._kind._restored(files, metadata)
        stage._resetUid(metadata["uid"])
        util.DefaultParamsReader.getAndSetParams(stage, metadata)
        return stage


def _read_contents(
    spark: SparkSession, path: str, files: Mapping[str, Path], sizes: Mapping[str, int]
) -> None:
    found: dict[str, dict[int, int]] = defaultdict(dict)
    with ExitStack() as stack:
        targets = {name: stack.enter_context(file.open("wb")) for name, file in files.items()}
        read = spark.read.schema(_ROW).parquet
        # One file after another: a partition of several would need many times its size in the JVMs.
        for url in read(path).inputFiles():
            for row in read(unquote(url)).collect():
                targets[row.name].seek(row.offset)
                targets[row.name].write(row.content)
                found[row.name][row.offset] = len(row.content)
    if broken := [name for name in sizes if sum(found[name].values()) != sizes[name]]:
        raise ConfigError(
            f"{path} lacks parts of {', '.join(broken)}: the stage was not saved whole. Save it "
            "again"
        )


class Saved(util.MLWritable, util.MLReadable[Any]):
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
    content = contents[CODE]
    code = content if isinstance(content, bytes) else Path(content).read_bytes()
    found: tuple[Any, ...] = cloudpickle.loads(code)
    return found


def copy_path(spark: SparkSession, path: str, target: Path) -> None:
    """Copy a file, or a folder as a ZIP archive of its files.

    What a client of Spark Connect cannot read is read by a task.

    Raises:
        OSError, PySparkException: if it cannot be read.
    """
    with target.open("wb") as out:
        try:
            _copy(path, out)
        except OSError:
            if context_of(spark) is not None:
                raise
            pieces = spark.range(1, numPartitions=1).mapInArrow(partial(_in_task, path), _PIECE)
            out.truncate(out.seek(0))
            for row in pieces.toLocalIterator():
                out.write(row.content)


def _in_task(path: str, batches: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    with tempfile.TemporaryFile() as file:
        _copy(path, file)
        file.seek(0)
        while piece := file.read(_WRITE_NBYTES):
            yield pa.record_batch({"content": [piece]})


def _copy(path: str, out: IO[bytes]) -> None:
    storage, inner = locate(path)
    system = open_storage(storage)
    if system.get_file_info(inner).type != pafs.FileType.Directory:
        return _copy_file(system, inner, out)
    with zipfile.ZipFile(out, "w") as archive:
        for info in system.get_file_info(pafs.FileSelector(inner, recursive=True)):
            if info.type == pafs.FileType.File:
                name = info.path.removeprefix(inner).strip("/")
                with archive.open(name, "w", force_zip64=True) as file:
                    _copy_file(system, info.path, file)
    return None


def _copy_file(system: pafs.FileSystem, path: str, out: IO[bytes]) -> None:
    with system.open_input_stream(path) as file:
        shutil.copyfileobj(file, out, _COPY_NBYTES)
