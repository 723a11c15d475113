"""The Spark tasks that score: Arrow batches through a model that their Python worker keeps.

Runs in: feeder

`ScoreFiles` reads the model's columns from Parquet files itself. Spark gives each row's file and
its number in it, so that it still decides which rows there are, where they are scored, and what
else of them is read. The wide columns do not pass through the JVM, which would turn them from
columns into rows and into columns again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import FeedTypeError, InferenceError, ReadError
from sparkdl.feed.parquet.source import convert
from sparkdl.feed.values.ndarrays import Array
from sparkdl.ml.estimators.source import ModelSource
from sparkdl.ml.scoring.columns import InputColumn, OutputColumn, tensor_values, valid_rows
from sparkdl.ml.scoring.predict import Predictor, predictor
from sparkdl.storage import locate, open_file, open_storage

_DECODED_NBYTES = 4 * 1024 * 1024
"""About what is decoded at once: little enough to stay in the processor's cache until scored."""


@dataclass(frozen=True)
class Score:
    """What to do with the columns of a batch. Goes to Spark inside the task.

    Attributes:
        inputs: in the order in which their columns come.
        batch_size: rows that the model is given at once.
        handle_invalid: what becomes of rows with nulls: `error`, `skip` or `keep`.
    """

    source: ModelSource
    inputs: tuple[InputColumn, ...]
    outputs: tuple[OutputColumn, ...]
    batch_size: int
    handle_invalid: str

    def columns(self, given: Sequence[pa.Array]) -> tuple[list[pa.Array], Array | None]:
        """Return the outputs' columns, null where a row could not be scored, and which could.

        Args:
            given: the inputs' columns.

        Returns:
            The columns, and bool [rows], None if every row was scored.

        Raises:
            FeedTypeError: if a value cannot feed the model, nulls included with `error`.
            InferenceError: if the outputs are not one for each row, or do not fit their types.
        """
        valid = self._valid(given)
        if valid is not None:
            given = [column.filter(pa.array(valid)) for column in given]
        rows = len(given[0])
        if not rows:
            count = 0 if valid is None else len(valid)
            return [pa.nulls(count, column.type) for column in self.outputs], valid
        values = {
            wanted.tensor.name: tensor_values(column, wanted)
            for wanted, column in zip(self.inputs, given, strict=True)
        }
        found = _predict(predictor(self.source), values, rows, self.batch_size)
        columns = [output.column(self._checked(found, output, rows)) for output in self.outputs]
        if valid is not None:
            places = pa.array(np.cumsum(valid) - 1, mask=~valid)
            columns = [column.take(places) for column in columns]
        return columns, valid

    def struct(self, given: Sequence[pa.Array]) -> pa.Array:
        """Return the outputs as a struct for each row, null where it could not be scored."""
        found, valid = self.columns(given)
        mask = None if valid is None else pa.array(~valid)
        return pa.StructArray.from_arrays(found, fields=list(self.struct_type), mask=mask)

    @property
    def struct_type(self) -> pa.StructType:
        """The type of `struct`."""
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

    def _checked(self, found: Mapping[str, Array], output: OutputColumn, rows: int) -> Array:
        values = found[output.tensor]
        if values.ndim < 1 or len(values) != rows:
            raise InferenceError(
                f"the model's output {output.tensor!r} has shape {list(values.shape)} for {rows} "
                "rows; it must have one value for each row"
            )
        return values


@dataclass(frozen=True)
class ScoreStructs:
    """For `arrow_udf`: a struct of the outputs for each row, null where it could not be scored.

    Spark keeps the other columns to itself, so they cost nothing.
    """

    score: Score

    def structs(self, given: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Answer one partition. A single input comes as an array, without its tuple."""
        for columns in given:
            yield self.score.struct([columns] if isinstance(columns, pa.Array) else list(columns))


@dataclass(frozen=True)
class ScoreBatches:
    """For `mapInArrow`: each batch with the outputs' columns appended.

    Attributes:
        places: of the inputs' columns.
        kept: places of the columns that are returned, as they came.
    """

    score: Score
    places: tuple[int, ...]
    kept: tuple[int, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Answer one partition."""
        for batch in batches:
            found, valid = self.score.columns([batch.column(place) for place in self.places])
            kept = (batch.schema.field(place) for place in self.kept)
            fields = [*kept, *self.score.struct_type]
            columns = [*(batch.column(place) for place in self.kept), *found]
            scored = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
            if valid is not None and self.score.handle_invalid == "skip":
                scored = scored.filter(pa.array(valid))
            yield scored


def _predict(
    predict: Predictor, values: Mapping[str, Array], rows: int, batch_size: int
) -> dict[str, Array]:
    parts = [
        predict({name: array[start : start + batch_size] for name, array in values.items()})
        for start in range(0, rows, batch_size)
    ]
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([np.atleast_1d(p[name]) for p in parts]) for name in parts[0]}


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
        opened = ""
        with ExitStack() as stack:
            for paths, numbers in given:
                found = []
                for path, rows in _runs(paths, numbers.to_numpy()):
                    if path != opened:
                        stack.close()
                        file = stack.enter_context(
                            FileRows(path, self.columns, self.score.batch_size)
                        )
                        opened = path
                    found += [self.score.struct(columns) for columns in file.read(rows)]
                yield pa.concat_arrays(found) if found else pa.nulls(0, self.score.struct_type)


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

    def read(self, numbers: Array) -> Iterator[list[pa.Array]]:
        """Yield the columns of some rows, in parts.

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
                yield [column.slice(wanted[0], count) for column in self._here]
            else:
                yield [column.take(pa.array(wanted)) for column in self._here]
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
