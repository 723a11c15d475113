"""Scoring that goes on after a crash: results in Parquet files, and the rows that they lack.

Runs in: driver, feeder

A checkpoint is a folder of runs, one for each call that scored rows: a manifest, and parts. A part
is a file of some batches, which a task moves to its name once it is complete. The name is a digest
of the rows' keys: another attempt at the task has the same rows in the same order, and leaves out
what is there or replaces it by the same rows. The manifest names the parts of earlier runs. What
tasks of those runs, cancelled and not yet ended, write later does not count: no row counts twice.
"""

from __future__ import annotations

import functools
import json
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, functions as f, types as t

from sparkdl.control.rows import Storage
from sparkdl.core.errors import CheckpointError, ConfigError
from sparkdl.core.jobs import named_jobs
from sparkdl.core.texts import did_you_mean
from sparkdl.driver.executors.scored import (
    by_position,
    check_distinct,
    check_names,
    column,
    tells_cases,
)
from sparkdl.ml.scoring.task import Columns, Score, chunks, windows
from sparkdl.storage.systems import locate, open_storage

_MANIFEST = "_manifest.json"
_KEY, _SKIPPED = "__sparkdl_key", "__sparkdl_skipped"
_FAILURES = (OSError, pa.ArrowException)
_KEYS = (t.IntegralType, t.DecimalType, t.StringType, t.BinaryType, t.BooleanType, t.DateType)
_TIMES = (t.TimestampType, t.TimestampNTZType)
_UNSTORED = re.compile(r"\b(void|interval|variant|geometry|geography)\b")


@dataclass(frozen=True)
class Checkpoint:
    """A folder as the driver finds it.

    Attributes:
        url: of the folder, for Spark.
        model: what makes results, as JSON has it.
        parts: that count, each `run/name`.
        left: files of interrupted tasks.
    """

    storage: Storage
    folder: str
    url: str
    model: Mapping[str, Any]
    number: int = 0
    parts: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @classmethod
    def at(cls, path: str, model: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint at `path`, which must be one of this model, or empty."""
        if re.search(r"[*?\[\]{}]", path):
            raise ConfigError(f"checkpoint={path!r} must be a folder, with none of *?[]{{}} in it")
        storage, folder = locate(path)
        url = f"file://{folder}" if storage.uri == "file://" else path.rstrip("/")
        system = open_storage(storage)
        selector = pafs.FileSelector(folder, allow_not_found=True, recursive=True)
        try:
            # A file of no bytes: its host stopped before it was on the disk.
            infos = [info for info in system.get_file_info(selector) if info.size]
            names = sorted(info.path[len(folder) :].lstrip("/") for info in infos)
            runs = [name for name in names if name.endswith(f"/{_MANIFEST}")]
            if not runs:
                if others := [name for name in names if "/." not in name]:
                    raise ConfigError(
                        f"checkpoint={path!r} holds other files, such as {others[0]}: give a "
                        "folder that is empty, or not there yet"
                    )
                return cls(storage, folder, url, model)
            with system.open_input_stream(f"{folder}/{runs[-1]}") as file:
                manifest = json.loads(file.read())
        except _FAILURES as error:
            raise CheckpointError(f"checkpoint={path!r} cannot be read: {error}") from error
        for what, own in model.items():
            if (found := manifest["model"].get(what)) != own:
                here = "" if what == "function" else f": {found} there, {own} here"
                raise ConfigError(
                    f"checkpoint={path!r} holds the results of another call, whose {what} "
                    f"differs{here}. Call predict as before, or give it another folder"
                )
        last = runs[-1].removesuffix(_MANIFEST)
        own = [name for name in names if re.fullmatch(rf"{last}\w+\.parquet", name)]
        parts = (*manifest["parts"], *own)
        left = tuple(name for name in names if "/." in name)
        return cls(storage, folder, url, model, int(last.split("-")[1]), parts, left)

    def begin(self) -> str:
        """Write the manifest of a further run, and return its name."""
        system, run = open_storage(self.storage), f"run-{self.number + 1:05}-{uuid.uuid4().hex[:8]}"
        text = json.dumps({"model": self.model, "parts": self.parts}).encode()
        try:
            system.create_dir(f"{self.folder}/{run}", recursive=True)
            _write(system, f"{self.folder}/{run}/{_MANIFEST}", lambda to: to.write(text))
        except _FAILURES as error:
            raise ConfigError(
                f"checkpoint={self.url!r} cannot be written to: {error}. Give a folder that the "
                "driver and all executors may write to"
            ) from error
        for name in self.left:
            with suppress(*_FAILURES):
                system.delete_file(f"{self.folder}/{name}")
        return run


def _write(system: pafs.FileSystem, path: str, write: Callable[[Any], object]) -> None:
    """Write a file under a hidden name, and move it to its own once it is complete."""
    folder, _, name = path.rpartition("/")
    hidden = f"{folder}/.{uuid.uuid4().hex}-{name}"
    try:
        with system.open_output_stream(hidden, compression=None) as sink:
            write(sink)
        system.move(hidden, path)
    except BaseException:
        with suppress(*_FAILURES):
            system.delete_file(hidden)
        raise


def scored_once(
    frame: DataFrame,
    score: Score,
    results: t.StructType,
    kept: Sequence[str],
    key: str,
    path: str,
    function: str,
) -> DataFrame:
    """Score the rows that the checkpoint at `path` lacks, and return all results, read from it.

    Args:
        kept: names of columns.
        function: its identity.
    """
    _check_key(frame, key)
    stored, spark = [*kept, *{key}.difference(kept)], frame.sparkSession
    check_names(stored, results.names, lambda _: "schema", tells_cases(frame))
    inputs = [column.name for column in score.inputs]
    frame = frame.select(*map(column, dict.fromkeys((key, *inputs, *stored))))
    schema = t.StructType([*(frame.schema[name] for name in stored), *results.fields])
    checkpoint = Checkpoint.at(path, _model(score, schema, key, function))
    schema = schema.add(_SKIPPED, "boolean")

    def read(names: Sequence[str]) -> DataFrame:
        if not names:
            return spark.createDataFrame([], schema)
        reader = spark.read.schema(schema).option("datetimeRebaseMode", "CORRECTED")
        return reader.parquet(*(f"{checkpoint.url}/{name}" for name in names))

    with named_jobs(spark, "sparkdl", f"predict into {path}"):
        done, placed, given = read(checkpoint.parts), by_position(frame), f.col("c0")
        wanted = placed.select(given.alias(_KEY))
        keys = done.select(column(key).alias(_KEY))
        found = _compared(wanted, keys)
        _check_keys(key, found)
        if found.missing:
            if checkpoint.parts:
                placed = placed.join(keys, given == f.col(_KEY), "left_anti")
                placed = placed.repartition(found.slices + 1, given)
            run = checkpoint.begin()
            places = {name: place for place, name in enumerate(frame.columns)}
            task = ScoreParts(
                score,
                tuple(places[name] for name in inputs),
                {name: places[name] for name in stored},
                checkpoint.storage,
                f"{checkpoint.folder}/{run}",
            )
            # Sorted: in the same order at each attempt, also after a shuffle.
            placed.sortWithinPartitions(given).mapInArrow(task, "rows long").collect()
            # The run's folder as a whole: Spark lists it quicker than its files.
            done = read([run, *checkpoint.parts])
            found = _compared(wanted, done.select(column(key).alias(_KEY)))
            if found.missing:
                raise CheckpointError(
                    f"{found.missing} rows have no result in {path} after all were scored. Either "
                    "the driver does not see the executors' files: give a folder of a storage "
                    f"that all share. Or the keys have changed meanwhile: store {key!r} with the "
                    "rows, and neither draw nor count it (uuid, monotonically_increasing_id)"
                )
    if (found.copies or 0) > 1:  # two attempts at a task have seen other rows
        done = done.dropDuplicates([key])
    if found.others:
        done = done.join(wanted, column(key) == f.col(_KEY), "left_semi")
    return done.where(~f.col(_SKIPPED)).drop(_SKIPPED, *{key}.difference(kept))


def _model(score: Score, schema: t.StructType, key: str, function: str) -> dict[str, Any]:
    """Return what makes results, as JSON has it."""
    for each in schema:
        if found := _UNSTORED.search(kind := each.dataType.simpleString()):
            raise ConfigError(
                f"column {each.name!r} is of type {kind}, and files of a checkpoint hold no "
                f"{found[0]}: leave it out by keep=, or cast it"
            )
    return {
        "key": key,
        "schema": [f"{each.name} {each.dataType.simpleString()}" for each in schema],
        "input_cols": [f"{x.name} {list((x.tensor.shape or ())[1:])}" for x in score.inputs],
        "handle_invalid": score.handle_invalid,
        "error_col": score.error_col,
        "function": function,
    }


def _check_key(frame: DataFrame, key: str) -> None:
    if frame.isStreaming:
        raise ConfigError(
            "checkpoint= needs all rows, and the DataFrame is a stream: call predict in "
            "foreachBatch, with a folder for each batch"
        )
    if not isinstance(key, str) or key not in frame.columns:
        raise ConfigError(
            f"key={key!r} must be a column of the DataFrame, which has {', '.join(frame.columns)}"
            f"{did_you_mean(str(key), frame.columns)}"
        )
    check_distinct(frame.columns, [key])
    if not isinstance(kind := frame.schema[key].dataType, (*_KEYS, *_TIMES)):
        raise ConfigError(
            f"key={key!r} is of type {kind.simpleString()}, by which rows are not found again. It "
            "must be a whole number, decimal, text, bytes, boolean, date or time: cast it, or "
            "give another column, such as to_json(struct(…)) of several"
        )


def _compared(given: DataFrame, done: DataFrame) -> Any:
    """Count the keys that are given and those that are done.

    Returns:
        A row: the key `which` is given `most` often, `nulls` rows have none; `copies` is how often
        a key is done at most; `missing` are not done, `others` are done and not given; `slices` is
        the number of the last partition.
    """
    given = given.withColumn("p", f.spark_partition_id())
    rows = given.groupBy(_KEY).agg(f.count(f.lit(1)).alias("n"), f.max("p").alias("p"))
    rows = rows.join(done.groupBy(_KEY).agg(f.count(f.lit(1)).alias("d")), _KEY, "full")
    n, d, key = f.col("n"), f.col("d"), f.col(_KEY)
    (found,) = rows.agg(
        f.max(n).alias("most"),
        f.max_by(key, n).alias("which"),
        f.sum(f.when(key.isNull(), n)).alias("nulls"),
        f.max(d).alias("copies"),
        f.count(f.when(n.isNotNull() & d.isNull(), 1)).alias("missing"),
        f.count(f.when(n.isNull(), 1)).alias("others"),
        f.max("p").alias("slices"),
    ).collect()
    return found


def _check_keys(key: str, found: Any) -> None:
    if found.nulls:
        raise ConfigError(
            f"key={key!r} is null in {found.nulls} rows, and each needs one of its own: fill "
            "them, or leave such rows out"
        )
    if (found.most or 0) > 1:
        raise ConfigError(
            f"key={key!r} must differ in all rows, and {found.most} rows have {found.which!r}. "
            f"Give another column, or leave rows out: df.dropDuplicates([{key!r}])"
        )


@dataclass
class _Part:
    """Rows whose results make a file; `left` are not scored yet, none if the file is there."""

    name: str
    left: int
    scored: list[pa.RecordBatch] = field(default_factory=list)


@dataclass(frozen=True)
class ScoreParts:
    """For `mapInArrow`: scores a partition into the parts that are not there.

    The first column is the key.

    Attributes:
        inputs, kept: places of columns; of those that files keep by name.
    """

    score: Score
    inputs: tuple[int, ...]
    kept: Mapping[str, int]
    storage: Storage
    folder: str

    def __call__(self, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        system = open_storage(self.storage)
        infos = system.get_file_info(pafs.FileSelector(self.folder, allow_not_found=True))
        there = {info.base_name for info in infos if info.size}
        fields: list[pa.Field] = []
        parts: deque[_Part] = deque()

        def columns() -> Iterator[Columns]:
            for batch in given:
                fields[:] = [batch.schema.field(i).with_name(x) for x, i in self.kept.items()]
                places = (*self.inputs, 0, *self.kept.values())
                yield tuple(batch.column(index) for index in places)

        def missing() -> Iterator[Columns]:
            for batches in windows(chunks(columns(), self.score.batch_size)):
                part = self._part(batches)
                if part.name not in there:
                    parts.append(part)
                    yield from batches

        # No chunk has rows of two parts: windows end with a batch.
        for chunk, found in self.score.answered(missing()):
            part = parts[0]
            kept = chunk.columns[len(self.inputs) + 1 :]
            is_skipped = np.zeros(len(kept[0]), bool)
            if chunk.valid is not None and self.score.handle_invalid == "skip":
                is_skipped = ~chunk.valid
            skipped = pa.field(_SKIPPED, pa.bool_())
            schema = pa.schema([*fields, *self.score.struct_type, skipped])
            values = [*kept, *found, pa.array(is_skipped)]
            part.scored.append(pa.RecordBatch.from_arrays(values, schema=schema))
            part.left -= len(is_skipped)
            if not part.left:
                self._commit(system, parts.popleft())
                yield pa.RecordBatch.from_pydict({"rows": [len(is_skipped)]})

    def _part(self, batches: Sequence[Columns]) -> _Part:
        keys = sha256()
        for columns in batches:
            keys.update(repr(columns[len(self.inputs)].to_pylist()).encode())
        return _Part(f"{keys.hexdigest()[:32]}.parquet", sum(len(each[0]) for each in batches))

    def _commit(self, system: pafs.FileSystem, part: _Part) -> None:
        path, table = f"{self.folder}/{part.name}", pa.Table.from_batches(part.scored)
        try:
            _write(system, path, functools.partial(pq.write_table, table))
        except _FAILURES as error:
            # Another attempt at this task may have been first, and HDFS replaces no file.
            if not system.get_file_info(path).size:
                raise CheckpointError(
                    f"{path} cannot be written: {error}. All executors must be able to write to "
                    "the folder"
                ) from error
