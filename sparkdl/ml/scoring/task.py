"""The Spark tasks that score: Arrow batches through a model that their Python worker keeps.

Runs in: feeder

`ScoreFiles` reads the model's columns from Parquet files itself. Spark gives each row's file and
its number in it, so that it still decides which rows there are, where they are scored, and what
else of them is read. The wide columns do not pass through the JVM, which would turn them from
columns into rows and into columns again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import FeedTypeError, InferenceError, ReadError, SparkdlError
from sparkdl.feed.parquet.source import convert
from sparkdl.feed.values.ndarrays import Array
from sparkdl.ml.estimators.source import ModelSource
from sparkdl.ml.scoring.columns import InputColumn, OutputColumn, tensor_values, valid_rows
from sparkdl.ml.scoring.held import predictor
from sparkdl.ml.scoring.rows import Rows, ahead, chunks
from sparkdl.storage import locate, open_file, open_storage

_DECODED_NBYTES = 4 * 1024 * 1024
"""About what is decoded at once: little enough to stay in the processor's cache until scored."""
_CHUNK_ROWS = 1024
"""Rows that are converted at once, at least: several batches, if these are small and quick."""
_ANSWER_ROWS = 10_000
_ANSWER_NBYTES = 1024 * 1024
"""Answers are joined to as many rows as Spark's own batches have, if they are small."""


@dataclass(frozen=True)
class Chunk:
    """Rows of one or more batches, converted at once.

    Attributes:
        values: the model's inputs, by name, of the rows that can be scored.
        valid: bool [rows], which these are; None for all.
    """

    rows: Rows
    values: dict[str, Array]
    valid: Array | None


@dataclass(frozen=True)
class Score:
    """What to do with the rows of a partition. Goes to Spark inside the task.

    Attributes:
        model: what errors call it.
        inputs: in the order in which their columns come.
        batch_size: rows that the model is given at once.
        handle_invalid: what becomes of rows with nulls: `error`, `skip` or `keep`.
    """

    source: ModelSource
    model: str
    inputs: tuple[InputColumn, ...]
    outputs: tuple[OutputColumn, ...]
    batch_size: int
    handle_invalid: str

    def chunks(self, pieces: Iterable[Rows], is_remote: bool = False) -> Iterator[Chunk]:
        """Yield what the model is to be given.

        A thread makes the next ones meanwhile, where somebody waits: for a GPU, or for files that
        are not local. Where both compute on the core that the task has, it would only cost: the
        values would be in another core's cache.

        Raises:
            FeedTypeError: if a value cannot feed the model, nulls included with `error`.
        """
        pieces = iter(pieces)
        if (first := next(pieces, None)) is None:
            return iter(())  # without loading the model
        pieces = chain([first], pieces)
        is_waited_for = predictor(self.source).is_waited_for
        batches = 1 if is_waited_for else max(1, _CHUNK_ROWS // self.batch_size)
        found = (self._chunk(rows) for rows in chunks(pieces, self.batch_size * batches))
        return ahead(found) if is_remote or is_waited_for else found

    def _chunk(self, rows: Rows) -> Chunk:
        given = rows.columns[: len(self.inputs)]
        try:
            valid = self._valid(given)
            if valid is not None:
                given = tuple(column.filter(pa.array(valid)) for column in given)
            is_empty = valid is not None and not valid.any()
            values = {
                wanted.tensor.name: tensor_values(column, wanted)
                for wanted, column in zip([] if is_empty else self.inputs, given, strict=False)
            }
        except FeedTypeError as error:
            raise FeedTypeError(f"{self.model}, {rows}: {error}") from error
        return Chunk(rows, values, valid)

    def columns(self, chunk: Chunk) -> list[pa.Array]:
        """Return the outputs' columns, null where a row could not be scored.

        Raises:
            InferenceError: if the model fails, or its outputs are not one for each row, or do not
                fit their types.
        """
        if not chunk.values:
            return [pa.nulls(len(chunk.rows), output.type) for output in self.outputs]
        places = np.arange(len(chunk.rows)) if chunk.valid is None else np.flatnonzero(chunk.valid)
        parts = [
            self._predicted(chunk, places[start : start + self.batch_size], start)
            for start in range(0, len(places), self.batch_size)
        ]
        try:
            columns = [
                _column(output, [part[output.tensor] for part in parts]) for output in self.outputs
            ]
        except InferenceError as error:
            raise InferenceError(f"{self.model} failed on {chunk.rows}: {error}") from error
        if chunk.valid is not None:
            taken = pa.array(np.cumsum(chunk.valid) - 1, mask=~chunk.valid)
            columns = [column.take(taken) for column in columns]
        return columns

    def _predicted(self, chunk: Chunk, places: Array, start: int) -> dict[str, Any]:
        """Return the outputs for one batch.

        Args:
            places: of its rows in the chunk.
            start: of its rows in the chunk's values.
        """
        batch = slice(start, start + len(places))
        given = {name: array[batch] for name, array in chunk.values.items()}
        try:
            found = predictor(self.source)(given, [output.tensor for output in self.outputs])
            for name, values in found.items():
                _check(values, name, len(places))
        except Exception as error:
            rows = chunk.rows.cut(places[0], places[-1] + 1)
            kind = "" if isinstance(error, SparkdlError) else f"{type(error).__name__}: "
            raise InferenceError(f"{self.model} failed on {rows}: {kind}{error}") from error
        return found

    def structs(self, pieces: Iterable[Rows], is_remote: bool = False) -> Iterator[pa.Array]:
        """Yield the outputs as a struct for each row, null where it could not be scored.

        Args:
            is_remote: `pieces` wait for files on another machine.

        Raises:
            FeedTypeError, InferenceError: see `chunks` and `columns`.
        """
        held = [pa.nulls(0, self.struct_type)]
        for chunk in self.chunks(pieces, is_remote):
            mask = None if chunk.valid is None else pa.array(~chunk.valid)
            fields = list(self.struct_type)
            held.append(pa.StructArray.from_arrays(self.columns(chunk), fields=fields, mask=mask))
            if sum(map(len, held)) >= _ANSWER_ROWS or held[-1].nbytes >= _ANSWER_NBYTES:
                yield pa.concat_arrays(held)
                held = []
        if held:
            yield pa.concat_arrays(held)

    @property
    def struct_type(self) -> pa.StructType:
        """The type of what `structs` yields."""
        return pa.struct([pa.field(output.name, output.type) for output in self.outputs])

    def _valid(self, given: Sequence[pa.Array]) -> Array | None:
        found = None
        for wanted, column in zip(self.inputs, given, strict=True):
            valid = valid_rows(column)
            if valid is None:
                continue
            if self.handle_invalid == "error":
                raise FeedTypeError(
                    f"column {wanted.name!r} holds nulls in {int((~valid).sum())} of {len(valid)} "
                    "rows. Fill them (df.fillna, coalesce), or setHandleInvalid('keep') for null "
                    "outputs, or 'skip' to leave such rows out"
                )
            found = valid if found is None else found & valid
        return found


def _check(values: Any, name: str, rows: int) -> None:
    shape = list(values.shape) if hasattr(values, "shape") else [len(values)]
    if shape[:1] != [rows]:
        raise InferenceError(
            f"the model's output {name!r} has shape {shape} for {rows} rows; it must have one "
            "value for each row"
        )


def _column(output: OutputColumn, parts: Sequence[Any]) -> pa.Array:
    """Return an output of several batches as one column."""
    if len({getattr(part, "shape", (0,))[1:] for part in parts}) == 1 and all(
        isinstance(part, np.ndarray) and part.dtype == parts[0].dtype for part in parts
    ):
        return output.column(parts[0] if len(parts) == 1 else np.concatenate(parts))
    return pa.concat_arrays([output.column(part) for part in parts])


@dataclass(frozen=True)
class ScoreStructs:
    """For `arrow_udf`: a struct of the outputs for each row, null where it could not be scored.

    Spark keeps the other columns to itself, so they cost nothing.
    """

    score: Score

    def structs(self, given: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Answer one partition. A single input comes as an array, without its tuple."""
        columns = ((each,) if isinstance(each, pa.Array) else each for each in given)
        yield from self.score.structs(_numbered(columns))


@dataclass(frozen=True)
class ScoreBatches:
    """For `mapInArrow`: each row with the outputs' columns appended.

    Attributes:
        places: of the inputs' columns.
        kept: places of the columns that are returned, as they came.
    """

    score: Score
    places: tuple[int, ...]
    kept: tuple[int, ...]

    def __call__(self, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Answer one partition."""
        fields: list[pa.Field] = []

        def columns() -> Iterator[tuple[pa.Array, ...]]:
            for batch in given:
                fields[:] = [batch.schema.field(place) for place in self.kept]
                yield tuple(batch.column(place) for place in (*self.places, *self.kept))

        for chunk in self.score.chunks(_numbered(columns())):
            kept = chunk.rows.columns[len(self.places) :]
            schema = pa.schema([*fields, *self.score.struct_type])
            scored = pa.RecordBatch.from_arrays([*kept, *self.score.columns(chunk)], schema=schema)
            if chunk.valid is not None and self.score.handle_invalid == "skip":
                scored = scored.filter(pa.array(chunk.valid))
            yield scored


def _numbered(given: Iterable[tuple[pa.Array, ...]]) -> Iterator[Rows]:
    start = 0
    for columns in given:
        stop = start + len(columns[0])
        yield Rows(columns, (("", np.arange(start, stop)),))
        start = stop


@dataclass(frozen=True)
class FileColumns:
    """Columns as they are in the files.

    Attributes:
        schema: the files' names for them, and Spark's types.
        is_case_sensitive: whether names in files must be spelt as in `schema`.
    """

    schema: pa.Schema
    is_case_sensitive: bool


@dataclass(frozen=True)
class ScoreFiles:
    """For `arrow_udf`, given `_metadata.file_path` and `_metadata.row_index`: as `ScoreStructs`."""

    score: Score
    columns: FileColumns

    def structs(self, given: Iterator[tuple[pa.Array, pa.Array]]) -> Iterator[pa.Array]:
        """Answer one partition."""
        first = next(given, None)
        if first is not None:
            is_remote = not first[0][0].as_py().startswith("file:")
            yield from self.score.structs(self._read(chain([first], given)), is_remote)

    def _read(self, given: Iterable[tuple[pa.Array, pa.Array]]) -> Iterator[Rows]:
        opened = ""
        with ExitStack() as stack:
            for paths, numbers in given:
                for path, rows in _runs(paths, numbers.to_numpy()):
                    if path != opened:
                        stack.close()
                        file = stack.enter_context(
                            FileRows(path, self.columns, self.score.batch_size)
                        )
                        opened = path
                    yield from file.read(rows)


class FileRows:
    """Rows of a Parquet file by their numbers; each row group is decoded as far as it is wanted.

    Args:
        path: a URI, encoded, as `_metadata.file_path` has it.
        batch_size: rows that are decoded at once, at least; a multiple of it.

    Raises:
        ReadError: if the file cannot be read.
    """

    def __init__(self, path: str, columns: FileColumns, batch_size: int) -> None:
        self._path = unquote(path)
        storage, inner = locate(self._path)
        system = open_storage(storage)
        try:
            self._file = open_file(system, inner)
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error
        footer = self._file.metadata
        self._ends = np.cumsum([footer.row_group(i).num_rows for i in range(footer.num_row_groups)])
        self._fields = [
            (self._name(field.name, columns.is_case_sensitive), field.type)
            for field in columns.schema
        ]
        self._names = [name for name, _ in self._fields if name is not None]
        self._rows = batch_size * max(1, self._affordable_rows() // batch_size)
        self._group = -1
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._here: list[pa.Array] = []
        self._start = self._stop = 0  # the numbers of the rows that are decoded

    def __enter__(self) -> FileRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches = iter(())
        self._file.close()

    def read(self, numbers: Array) -> Iterator[Rows]:
        """Yield some rows, in parts.

        Args:
            numbers: int64 [rows], ascending.

        Raises:
            ReadError: if the file cannot be read, or has no such rows any more.
        """
        done = 0
        while done < len(numbers):
            try:
                self._seek(int(numbers[done]))
            except (OSError, pa.ArrowException, KeyError) as error:
                raise self._unreadable(error) from error
            count = int(np.searchsorted(numbers[done:], self._stop))
            wanted = numbers[done : done + count] - self._start
            if wanted[-1] - wanted[0] + 1 == count:
                columns = tuple(column.slice(wanted[0], count) for column in self._here)
            else:
                columns = tuple(column.take(pa.array(wanted)) for column in self._here)
            yield Rows(columns, ((self._path, numbers[done : done + count]),))
            done += count

    def _seek(self, number: int) -> None:
        """Decode the rows among which is `number`."""
        if self._start <= number < self._stop:
            return
        group = int(np.searchsorted(self._ends, number, side="right"))
        if group == len(self._ends):
            raise KeyError(f"it has no row {number}")
        if group != self._group or number < self._start:
            self._batches = self._file.iter_batches(
                self._rows, [group], self._names, use_threads=False
            )
            self._group = group
            self._stop = int(self._ends[group - 1]) if group else 0
        while number >= self._stop:
            batch = next(self._batches)
            self._start, self._stop = self._stop, self._stop + batch.num_rows
        self._here = [
            pa.nulls(batch.num_rows, kind) if name is None else convert(batch.column(name), kind)
            for name, kind in self._fields
        ]

    def _name(self, wanted: str, is_case_sensitive: bool) -> str | None:
        """Return what the file calls a column; None if it lacks it, as older files may."""
        names = self._file.schema_arrow.names
        if is_case_sensitive:
            found = [name for name in names if name == wanted]
        else:
            found = [name for name in names if name.lower() == wanted.lower()]
        if len(found) > 1:
            raise ReadError(f"{self._path} has several columns {wanted!r}: {', '.join(found)}")
        return str(found[0]) if found else None

    def _affordable_rows(self) -> int:
        footer = self._file.metadata
        nbytes: int = 0
        for group in map(footer.row_group, range(footer.num_row_groups)):
            for leaf in map(group.column, range(group.num_columns)):
                if leaf.path_in_schema.split(".")[0] in self._names:
                    nbytes += leaf.total_uncompressed_size
        return _DECODED_NBYTES * int(footer.num_rows) // max(nbytes, 1)

    def _unreadable(self, error: Exception) -> ReadError:
        return ReadError(
            f"{self._path}: {error}. Has the file been replaced since the DataFrame was made, or "
            "can Spark's Python workers not read it? setParquetReader('spark') has Spark read it"
        )


def _runs(paths: pa.Array, numbers: Array) -> Iterator[tuple[str, Array]]:
    """Yield the rows of one file each, their numbers ascending."""
    if not len(numbers):
        return
    codes = paths.dictionary_encode()
    files = codes.indices.to_numpy()
    cuts = np.flatnonzero((np.diff(files) != 0) | (np.diff(numbers) <= 0)) + 1
    for start, stop in pairwise([0, *cuts, len(numbers)]):
        yield codes.dictionary[int(files[start])].as_py(), numbers[start:stop]
