"""The Spark tasks that score: Arrow batches through a model.

The Python worker keeps the model, or a scorer does, which serves several workers of the executor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import FeedTypeError, InferenceError, ScorerLostError
from sparkdl.ml.scoring.client import ScorerClient
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.inputs import InputColumn, input_values, valid_rows
from sparkdl.ml.scoring.loaded import predictor
from sparkdl.ml.scoring.predictor import RowsFailedError
from sparkdl.ml.scoring.share import Sharing
from sparkdl.ml.scoring.source import ModelSource
from sparkdl.values.ndarrays import Array

_MAX_PIECES = 2
"""A task's unanswered batches: one being scored, one waiting. It bounds the memory."""

Columns = tuple[pa.Array, ...]
"""One array for each input, further ones as they are wanted."""


def chunks(pieces: Iterable[Columns], size: int) -> Iterator[Columns]:
    """Cut and join rows into chunks of `size` rows; the last one may have fewer."""
    held: list[Columns] = []
    count = 0
    for piece in pieces:
        start, rows = 0, len(piece[0])
        while start < rows:
            stop = min(rows, start + size - count)
            held.append(tuple(column.slice(start, stop - start) for column in piece))
            count += stop - start
            start = stop
            if count == size:
                yield _joined(held)
                held, count = [], 0
    if held:
        yield _joined(held)


def _joined(parts: Sequence[Columns]) -> Columns:
    return parts[0] if len(parts) == 1 else tuple(map(pa.concat_arrays, zip(*parts, strict=True)))


@dataclass(frozen=True)
class Chunk:
    """Rows that the model is given at once.

    Attributes:
        start: the number of the first row in the partition.
        values: the model's inputs, by name, of the rows that can be scored.
        given: the columns that these come from.
        valid: bool [rows], which rows these are; None for all.
    """

    start: int
    columns: Columns
    values: dict[str, Array]
    given: dict[str, pa.Array]
    valid: Array | None

    def widened(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """Return outputs with nulls for rows that could not be scored."""
        if self.valid is None:
            return list(columns)
        # Each valid row takes the next output; a place that is masked takes null.
        taken = pa.array(np.cumsum(self.valid) - 1, mask=~self.valid)
        return [column.take(taken) for column in columns]

    @property
    def rows(self) -> str:
        return _rows_named(self.start, self.start + len(self.columns[0]) - 1)


def _rows_named(first: int, last: int) -> str:
    from pyspark import TaskContext

    context = TaskContext.get()
    return f"rows {first} to {last}" + (f", partition {context.partitionId()}" if context else "")


@dataclass(frozen=True)
class Score:
    """The scoring of a partition's rows; `model` is its name in errors. Goes to Spark.

    With `error_col`, a further output says why a row has no others.
    """

    source: ModelSource
    model: str
    inputs: tuple[InputColumn, ...]
    outputs: tuple[OutputColumn, ...]
    batch_size: int
    handle_invalid: str
    sharing: Sharing = field(default_factory=Sharing)
    error_col: str | None = None

    def answered(self, pieces: Iterable[Columns]) -> Iterator[tuple[Chunk, list[pa.Array]]]:
        """Yield chunks with the outputs' columns, null where a row could not be scored."""
        if self.error_col is not None:
            yield from self._each_row(chunks(pieces, self.batch_size))
            return
        found = self._chunks(chunks(pieces, self.batch_size))
        if (first := next(found, None)) is None:
            return  # without loading the model
        device = self.sharing.own_device()
        rest = chain([first], found)
        for chunk, columns in self._own(rest) if device is None else self._shared(device, rest):
            yield chunk, chunk.widened(columns) if chunk.values else self._nulls(chunk)

    def _own(self, found: Iterable[Chunk]) -> Iterator[tuple[Chunk, list[pa.Array]]]:
        for chunk in found:
            columns: list[pa.Array] = []
            with self._explained(chunk):
                # Asked for again: rows may come from another model's partition of this worker.
                model = predictor(self.source)
                if chunk.values:
                    columns = model.columns(chunk.values, self.outputs)
            yield chunk, columns

    def _shared(
        self, device: str, found: Iterable[Chunk]
    ) -> Iterator[tuple[Chunk, list[pa.Array]]]:
        """Score in a process for several workers."""
        scorer = self._connected(device)
        sent: deque[Chunk] = deque()

        def received() -> tuple[Chunk, list[pa.Array]]:
            with self._explained(sent[0]):
                columns = scorer.receive() if sent[0].values else []
            return sent.popleft(), columns

        with closing(scorer):
            for chunk in found:
                sent.append(chunk)
                if chunk.values:
                    with self._explained(sent[0]):
                        scorer.send(chunk.values, chunk.given)
                if len(sent) >= _MAX_PIECES:
                    yield received()
            while sent:
                yield received()

    def _connected(self, device: str) -> ScorerClient:
        with self._explained():
            return ScorerClient.connect(self.source, device, self.sharing.cores, self.outputs)

    def _each_row(self, found: Iterable[Columns]) -> Iterator[tuple[Chunk, list[pa.Array]]]:
        """Score batches; if one fails, its halves, until the row that fails is alone."""
        ask, start = None, 0
        with ExitStack() as held:
            for columns in found:
                ask, parts = ask or self._asker(held), [columns]
                while parts:
                    part = parts.pop()
                    rows, text = len(part[0]), None
                    try:
                        chunk = self._chunk(start, part)
                        with self._explained():
                            outputs = ask(chunk) if chunk.values else []
                        answer = chunk.widened(outputs) if outputs else self._nulls(chunk)
                    except (FeedTypeError, RowsFailedError) as error:
                        if rows > 1:
                            half = rows // 2
                            parts.append(tuple(column.slice(half) for column in part))
                            parts.append(tuple(column.slice(0, half) for column in part))
                            continue
                        chunk, text = Chunk(start, part, {}, {}, None), str(error)
                        answer = self._nulls(chunk)
                    yield chunk, [*answer, pa.array([text] * rows, pa.string())]
                    start += rows

    def _asker(self, held: ExitStack) -> Callable[[Chunk], list[pa.Array]]:
        """Return what scores one batch after another, in this process or in the shared one."""
        device = self.sharing.own_device()
        if device is None:
            return lambda chunk: predictor(self.source).columns(chunk.values, self.outputs)
        scorer = held.enter_context(closing(self._connected(device)))

        def ask(chunk: Chunk) -> list[pa.Array]:
            scorer.send(chunk.values, chunk.given)
            return scorer.receive()

        return ask

    @contextmanager
    def _explained(self, chunk: Chunk | None = None) -> Iterator[None]:
        """Add the failed model, and its rows in a chunk, to errors."""
        try:
            yield
        except RowsFailedError as error:
            if chunk is None:
                raise
            raise InferenceError(
                f"{self.model} failed on {chunk.rows}: {error}"
            ) from error.__cause__
        except ScorerLostError as error:
            where = f" on {chunk.rows}" if chunk else ""
            raise ScorerLostError(f"{self.model} failed{where}: {error}") from None
        except InferenceError as error:
            raise InferenceError(f"{self.model}: {error}") from error.__cause__

    def _chunks(self, found: Iterable[Columns]) -> Iterator[Chunk]:
        start = 0
        for columns in found:
            yield self._chunk(start, columns)
            start += len(columns[0])

    def _chunk(self, start: int, columns: Columns) -> Chunk:
        given = columns[: len(self.inputs)]
        try:
            valid = self._valid(given)
            if valid is not None:
                given = tuple(column.filter(pa.array(valid)) for column in given)
            is_empty = valid is not None and not valid.any()
            inputs = () if is_empty else self.inputs
            values = input_values(inputs, given[: len(inputs)])
        except FeedTypeError as error:
            rows = _rows_named(start, start + len(columns[0]) - 1)
            raise FeedTypeError(f"{self.model}, {rows}: {error}") from error
        by_input = {wanted.tensor.name: c for wanted, c in zip(inputs, given, strict=False)}
        return Chunk(start, columns, values, by_input, valid)

    def _nulls(self, chunk: Chunk) -> list[pa.Array]:
        return [pa.nulls(len(chunk.columns[0]), output.type) for output in self.outputs]

    # Spark reads these types, to find out what it has to give.
    def structs(self, given: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Yield a struct of the outputs for each row, null where it could not be scored.

        For `arrow_udf`: Spark keeps the other columns to itself, so they cost nothing. A single
        input comes as an array, without its tuple.
        """
        columns = ((each,) if isinstance(each, pa.Array) else each for each in given)
        fields, is_empty = list(self.struct_type), True
        for chunk, found in self.answered(columns):
            mask = None if chunk.valid is None else pa.array(~chunk.valid)
            yield pa.StructArray.from_arrays(found, fields=fields, mask=mask)
            is_empty = False
        if is_empty:  # a partition without rows is answered by an array of the right type
            yield pa.nulls(0, self.struct_type)

    @property
    def struct_type(self) -> pa.StructType:
        fields = [pa.field(output.name, output.type) for output in self.outputs]
        error = [] if self.error_col is None else [pa.field(self.error_col, pa.string())]
        return pa.struct([*fields, *error])

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
class ScoreBatches:
    """For `mapInArrow`: the columns at the places `kept` as they came, and the outputs'."""

    score: Score
    indices: tuple[int, ...]
    kept: tuple[int, ...]

    def __call__(self, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fields: list[pa.Field] = []

        def columns() -> Iterator[Columns]:
            for batch in given:
                # Kept with their metadata and nullability, as Spark gave them.
                fields[:] = [batch.schema.field(index) for index in self.kept]
                yield tuple(batch.column(index) for index in (*self.indices, *self.kept))

        for chunk, found in self.score.answered(columns()):
            kept = chunk.columns[len(self.indices) :]
            schema = pa.schema([*fields, *self.score.struct_type])
            scored = pa.RecordBatch.from_arrays([*kept, *found], schema=schema)
            if chunk.valid is not None and self.score.handle_invalid == "skip":
                scored = scored.filter(pa.array(chunk.valid))
            yield scored
