"""The Spark tasks that score: Arrow batches through a model.

The Python worker keeps the model, or a scorer does, which serves several workers of the executor.

`ScoreFiles` reads the model's columns from Parquet files itself. Spark gives each row's file and
its number in it, so that it still decides which rows there are, where they are scored, and what
else of them is read. The wide columns do not pass through the JVM, which would turn them from
columns into rows and into columns again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.core.errors import FeedTypeError, InferenceError, ScorerLostError
from sparkdl.ml.scoring.client import ScorerClient
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.files import FileColumns, FileRows, runs
from sparkdl.ml.scoring.held import OwnModel
from sparkdl.ml.scoring.inputs import InputColumn, input_values, valid_rows
from sparkdl.ml.scoring.predictor import RowsFailedError
from sparkdl.ml.scoring.rows import Rows, ahead, chunks
from sparkdl.ml.scoring.share import Sharing
from sparkdl.ml.scoring.source import ModelSource
from sparkdl.values.ndarrays import Array

_CHUNK_ROWS = 1024
"""Rows that are converted at once, at least: several batches, if these are small and quick."""
_SORTED_ROWS = 4096
"""Texts are put into batches by their length within so many rows: a batch is padded to its longest
text. For texts of 2 to 128 words, all-MiniLM-L6-v2 embeds twice as many in a CPU second."""
_SORTED_NBYTES = 64 * 1024 * 1024
_ANSWER_ROWS = 10_000
_ANSWER_NBYTES = 1024 * 1024
"""Answers are joined to as many rows as Spark's own batches have, if they are small."""


@dataclass(frozen=True)
class Chunk:
    """Rows of one or more batches, converted at once.

    Attributes:
        values: the model's inputs, by name, of the rows that can be scored.
        given: the columns that these come from.
        valid: bool [rows], which rows these are; None for all.
        order: int64 [rows], the places of the values among those rows; None for their own order.
    """

    rows: Rows
    values: dict[str, Array]
    given: dict[str, pa.Array]
    valid: Array | None
    order: Array | None = None

    def widened(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """Return outputs in the rows' order, with nulls for rows that could not be scored."""
        if self.order is not None:
            back = pa.array(np.argsort(self.order))
            columns = [column.take(back) for column in columns]
        if self.valid is None:
            return list(columns)
        # Each valid row takes the next output; a place that is masked takes null.
        taken = pa.array(np.cumsum(self.valid) - 1, mask=~self.valid)
        return [column.take(taken) for column in columns]

    def scored_rows(self, start: int, stop: int) -> str:
        """Say which rows the values from `start` to before `stop` are of, for errors."""
        places = np.arange(start, stop) if self.order is None else np.sort(self.order[start:stop])
        if self.valid is not None:
            places = np.flatnonzero(self.valid)[places]
        first, last = int(places[0]), int(places[-1]) + 1
        some = f"{len(places)} of " if self.order is not None and len(places) < last - first else ""
        return f"{some}{self.rows.cut(first, last)}"


@dataclass(frozen=True)
class Score:
    """The scoring of a partition's rows. Goes to Spark inside the task.

    Attributes:
        model: the model's name in errors.
        inputs: in the order in which their columns come.
        batch_size: rows in each call of the model.
        handle_invalid: how rows with nulls are treated: `error`, `skip` or `keep`.
        sharing: whether the model is the Python worker's own.
    """

    source: ModelSource
    model: str
    inputs: tuple[InputColumn, ...]
    outputs: tuple[OutputColumn, ...]
    batch_size: int
    handle_invalid: str
    sharing: Sharing = field(default_factory=Sharing)

    def answered(
        self, pieces: Iterable[Rows], is_remote: bool = False
    ) -> Iterator[tuple[Chunk, list[pa.Array]]]:
        """Yield chunks with the outputs' columns, null where a row could not be scored.

        Args:
            is_remote: `pieces` wait for files on another machine.

        Raises:
            FeedTypeError: if a value cannot feed the model, nulls included with `error`.
            InferenceError: if the model fails, or its outputs are not one for each row, or do not
                fit their types.
        """
        pieces = iter(pieces)
        if (first := next(pieces, None)) is None:
            return  # without loading the model
        sent: deque[tuple[int, Chunk]] = deque()
        count = 0

        def received() -> tuple[Chunk, list[pa.Array]]:
            chunk = sent[0][1]
            with self._explained(sent):
                columns = scorer.receive() if chunk.values else []
            sent.popleft()
            return chunk, chunk.widened(columns) if chunk.values else self._nulls(chunk)

        with (
            closing(self._scorer()) as scorer,
            closing(self._chunks(first, pieces, scorer, is_remote)) as found,
        ):
            for chunk in found:
                # Chunks without a row to score have no answer, and wait only for those before them.
                sent.append((count if chunk.values else -1, chunk))
                if chunk.values:
                    count += 1
                    with self._explained(sent):
                        scorer.send(chunk.values, chunk.given)
                while sent and (scorer.is_full or not sent[0][1].values):
                    yield received()
            while sent:
                yield received()

    def _scorer(self) -> OwnModel | ScorerClient:
        """Return what runs the model: this Python worker, or a process of several."""
        device = self.sharing.own_device()
        if device is None:
            return OwnModel(self.source, self.batch_size, self.outputs)
        with self._explained(()):
            return ScorerClient.connect(
                self.source, device, self.sharing.cores, self.batch_size, self.outputs
            )

    @contextmanager
    def _explained(self, sent: Sequence[tuple[int, Chunk]]) -> Iterator[None]:
        """Add the failed model, and its rows among the `sent` ones, to errors."""
        try:
            yield
        except RowsFailedError as error:
            rows = dict(sent)[error.number].scored_rows(error.start, error.stop)
            raise InferenceError(f"{self.model} failed on {rows}: {error}") from error.__cause__
        except ScorerLostError as error:
            where = f" on {sent[0][1].rows}" if sent else ""
            raise ScorerLostError(f"{self.model} failed{where}: {error}") from None
        except InferenceError as error:
            raise InferenceError(f"{self.model}: {error}") from error.__cause__

    def _chunks(
        self, first: Rows, others: Iterator[Rows], scorer: OwnModel | ScorerClient, is_remote: bool
    ) -> Generator[Chunk, None, None]:
        """Return the chunks for the model.

        A thread prepares the next ones while the model waits for another process or a GPU, or while
        files are not local. If both computed on the task's one core, a thread would only cost time:
        the values would be in another core's cache.
        """
        batches = 1 if scorer.is_slow else max(1, _CHUNK_ROWS // self.batch_size)
        sorted_rows = self._sorted_rows(first)
        size = self.batch_size * max(batches, sorted_rows // self.batch_size)
        pieces = chunks(chain([first], others), size)
        found = (self._chunk(rows, is_sorted=sorted_rows > 0) for rows in pieces)
        return ahead(found) if is_remote or scorer.is_waited_for else found

    def _sorted_rows(self, first: Rows) -> int:
        """Return within how many rows a user's function gets its texts by length; 0 if it has none.

        Args:
            first: some rows, by which to estimate how large they are.
        """
        given = first.columns[: len(self.inputs)]
        is_small = all(_is_text(c.type) or pa.types.is_primitive(c.type) for c in given)
        if (
            self.source.format != "function"
            or not is_small
            or not any(_is_text(c.type) for c in given)
        ):
            return 0
        row_nbytes = int(sum(column.nbytes for column in given)) // max(1, len(first))
        return max(1, min(_SORTED_ROWS, _SORTED_NBYTES // max(1, row_nbytes)))

    def _chunk(self, rows: Rows, is_sorted: bool = False) -> Chunk:
        given = rows.columns[: len(self.inputs)]
        try:
            valid = self._valid(given)
            if valid is not None:
                given = tuple(column.filter(pa.array(valid)) for column in given)
            is_empty = valid is not None and not valid.any()
            # After the nulls are gone: a text without a value has no length.
            order = _by_length(given) if is_sorted else None
            if order is not None:
                given = tuple(column.take(pa.array(order)) for column in given)
            inputs = () if is_empty else self.inputs
            values = input_values(inputs, given[: len(inputs)])
        except FeedTypeError as error:
            raise FeedTypeError(f"{self.model}, {rows}: {error}") from error
        by_input = {wanted.tensor.name: c for wanted, c in zip(inputs, given, strict=False)}
        return Chunk(rows, values, by_input, valid, order)

    def _nulls(self, chunk: Chunk) -> list[pa.Array]:
        return [pa.nulls(len(chunk.rows), output.type) for output in self.outputs]

    def structs(self, pieces: Iterable[Rows], is_remote: bool = False) -> Iterator[pa.Array]:
        """Yield the outputs as a struct for each row, null where it could not be scored.

        Args:
            is_remote: `pieces` wait for files on another machine.

        Raises:
            FeedTypeError, InferenceError: see `answered`.
        """
        # So that a partition without rows is answered by an array of the right type.
        held = [pa.nulls(0, self.struct_type)]
        fields = list(self.struct_type)
        for chunk, columns in self.answered(pieces, is_remote):
            mask = None if chunk.valid is None else pa.array(~chunk.valid)
            held.append(pa.StructArray.from_arrays(columns, fields=fields, mask=mask))
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
                # Kept with their metadata and nullability, as Spark gave them.
                fields[:] = [batch.schema.field(place) for place in self.kept]
                yield tuple(batch.column(place) for place in (*self.places, *self.kept))

        for chunk, found in self.score.answered(_numbered(columns())):
            kept = chunk.rows.columns[len(self.places) :]
            schema = pa.schema([*fields, *self.score.struct_type])
            scored = pa.RecordBatch.from_arrays([*kept, *found], schema=schema)
            if chunk.valid is not None and self.score.handle_invalid == "skip":
                scored = scored.filter(pa.array(chunk.valid))
            yield scored


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _by_length(columns: Sequence[pa.Array]) -> Array:
    """Return the places of rows, those with the longest texts first; no text is null."""
    texts = (column for column in columns if _is_text(column.type))
    lengths = sum(pc.binary_length(text).to_numpy(zero_copy_only=False) for text in texts)
    return np.argsort(-np.asarray(lengths), kind="stable")


def _numbered(given: Iterable[tuple[pa.Array, ...]]) -> Iterator[Rows]:
    start = 0
    for columns in given:
        stop = start + len(columns[0])
        yield Rows(columns, (("", np.arange(start, stop)),))
        start = stop


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
                for path, rows in runs(paths, numbers.to_numpy()):
                    if path != opened:
                        # Closed stacks can be filled again: one file is open at a time.
                        stack.close()
                        file = stack.enter_context(
                            FileRows(path, self.columns, self.score.batch_size)
                        )
                        opened = path
                    yield from file.read(rows)
