"""The Spark tasks that score: Arrow batches through a model.

The Python worker keeps the model, or a scorer does, which serves several workers of the executor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.core.errors import FeedTypeError, InferenceError, ScorerLostError
from sparkdl.core.texts import listed
from sparkdl.ml.scoring.client import ScorerClient
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.inputs import InputColumn, input_values, valid_rows
from sparkdl.ml.scoring.loaded import predictor
from sparkdl.ml.scoring.predictor import AsyncPredictor, Call, RowsFailedError, answer_of
from sparkdl.ml.scoring.share import Sharing
from sparkdl.ml.scoring.source import ModelSource
from sparkdl.values.ndarrays import Array, is_list

_MAX_SHARED = 2
"""A task's unanswered batches in a scorer: one being scored, one waiting. It bounds the memory."""

MAX_ASYNC = 16
"""A task's unanswered batches of an `async` function."""

_WINDOW_BATCHES = 8
_WINDOW_NBYTES = 64 << 20

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


def windows(batches: Iterable[Columns]) -> Iterator[list[Columns]]:
    """Take a few batches together; those of wide rows are fewer."""
    held: list[Columns] = []
    for batch in batches:
        held.append(batch)
        nbytes = sum(column.nbytes for each in held for column in each)
        if len(held) == _WINDOW_BATCHES or nbytes >= _WINDOW_NBYTES:
            yield held
            held = []
    if held:
        yield held


@dataclass(frozen=True)
class Chunk:
    """Rows that the model is given at once.

    Attributes:
        start: the number of the first row in the partition.
        values: the model's inputs, by name, of the rows that can be scored.
        given: the columns that these come from.
        valid: bool [rows], which rows these are; None for all.
        numbers: of the rows, if they do not follow one another.
    """

    start: int
    columns: Columns
    values: dict[str, Array] = field(default_factory=dict)
    given: dict[str, pa.Array] = field(default_factory=dict)
    valid: Array | None = None
    numbers: pa.Array | None = None

    def widened(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """Return outputs with nulls for rows that could not be scored."""
        if self.valid is None:
            return list(columns)
        # Each valid row takes the next output; a place that is masked takes null.
        taken = pa.array(np.cumsum(self.valid) - 1, mask=~self.valid)
        return [column.take(taken) for column in columns]

    @property
    def rows(self) -> str:
        from pyspark import TaskContext

        context = TaskContext.get()
        rows = f"{self.start} to {self.start + len(self.columns[0]) - 1}"
        if self.numbers is not None:
            rows = listed([str(number) for number in sorted(self.numbers.to_pylist())])
        return f"rows {rows}" + (f", partition {context.partitionId()}" if context else "")


def by_length(columns: Columns, place: int, start: int) -> Columns:
    """Sort rows by the length of a text or array; a further column has their numbers."""
    column = columns[place]
    length = pc.list_value_length if is_list(column.type) else pc.binary_length
    order = np.argsort(pc.fill_null(length(column), 0).to_numpy(), kind="stable")
    return *(each.take(pa.array(order)) for each in columns), pa.array(order + start)


def by_number(scored: Sequence[tuple[Chunk, list[pa.Array]]]) -> tuple[Chunk, list[pa.Array]]:
    """Join chunks, and put their rows back into order."""
    joined = _joined([chunk.columns for chunk, _ in scored])
    order = np.argsort(joined[-1].to_numpy())
    columns = tuple(column.take(pa.array(order)) for column in joined[:-1])
    outputs = _joined([tuple(found) for _, found in scored])
    masks = [np.ones(len(c.columns[0]), bool) if c.valid is None else c.valid for c, _ in scored]
    valid = np.concatenate(masks)[order]
    chunk = Chunk(0, columns, valid=None if valid.all() else valid)
    return chunk, [column.take(pa.array(order)) for column in outputs]


Answer = Callable[[], list[pa.Array]]
"""Waits for a batch's outputs; raises what it failed of."""


@dataclass
class _Part:
    """Rows to score at once; `answer` is there once they are sent."""

    start: int
    columns: Columns
    chunk: Chunk | None = None
    answer: Answer | None = None

    def halves(self) -> list[_Part]:
        half = len(self.columns[0]) // 2
        if not half:
            return []
        left, right = ([c.slice(*cut) for c in self.columns] for cut in ((0, half), (half,)))
        return [_Part(self.start, tuple(left)), _Part(self.start + half, tuple(right))]


class _Calls:
    """A task's calls of the model, of this process or of a scorer; `close` cancels the rest."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._source = score.source.on_executor()
        self._scorer: ScorerClient | None = None
        self._futures: set[Call] = set()
        self._is_async = False

    @cached_property
    def _device(self) -> str | None:
        return self._score.sharing.own_device()

    @property
    def window(self) -> int:
        """The batches that may be sent and not answered; known better after the first one."""
        if self._scorer is not None:
            return MAX_ASYNC if self._scorer.is_async else _MAX_SHARED
        return MAX_ASYNC if self._is_async else 1

    def send(self, chunk: Chunk) -> Answer:
        score = self._score
        if self._device is not None:
            self._scorer = self._scorer or ScorerClient.connect(
                self._source, self._device, score.sharing.cores, score.outputs
            )
            piece = self._scorer.send(chunk.values, chunk.given, score.batch_size)
            return partial(self._scorer.receive, piece)
        # Asked for again: rows may come from another model's partition of this worker.
        model = predictor(self._source)
        self._is_async = isinstance(model, AsyncPredictor)
        if not isinstance(model, AsyncPredictor):
            return partial(model.columns, chunk.values, score.outputs)
        call = model.start(chunk.values, score.outputs)
        self._futures.add(call)
        return partial(self._received, call)

    def _received(self, call: Call) -> list[pa.Array]:
        try:
            return answer_of(call)
        finally:
            if call.done():  # else this task was interrupted, and `close` cancels it
                self._futures.discard(call)

    def close(self) -> None:
        for call in self._futures:
            call.cancel()
        if self._scorer is not None:
            self._scorer.close()


def _raise(error: Exception) -> list[pa.Array]:
    raise error


@dataclass(frozen=True)
class Score:
    """The scoring of a partition's rows; `model` is its name in errors. Goes to Spark.

    With `error_col`, a further output says why a row has no others. `group_by` is the place of the
    input by whose length rows are grouped.
    """

    source: ModelSource
    model: str
    inputs: tuple[InputColumn, ...]
    outputs: tuple[OutputColumn, ...]
    batch_size: int
    handle_invalid: str
    sharing: Sharing = field(default_factory=Sharing)
    error_col: str | None = None
    group_by: int | None = None

    def answered(self, pieces: Iterable[Columns]) -> Iterator[tuple[Chunk, list[pa.Array]]]:
        """Yield chunks with the outputs' columns, in the order of the rows; see `_answered`."""
        if self.group_by is None:
            yield from self._answered(pieces)
            return
        sizes: deque[int] = deque()

        def grouped(place: int) -> Iterator[Columns]:
            start = 0
            for batches in windows(chunks(pieces, self.batch_size)):
                columns = by_length(_joined(batches), place, start)
                sizes.append(len(columns[0]))
                start += sizes[-1]
                yield columns

        held: list[tuple[Chunk, list[pa.Array]]] = []
        for scored in self._answered(grouped(self.group_by)):
            held.append(scored)
            # No chunk has rows of two windows: these end with a batch.
            if sum(len(chunk.columns[0]) for chunk, _ in held) == sizes[0]:
                sizes.popleft()
                yield by_number(held)
                held = []

    def _answered(self, pieces: Iterable[Columns]) -> Iterator[tuple[Chunk, list[pa.Array]]]:
        """Yield chunks with the outputs' columns, null where a row could not be scored.

        With `error_col`, a batch that fails is scored again in halves, until the row that fails is
        alone.
        """
        parts: deque[_Part] = deque()
        """Not yielded: in the order of the rows, which is also that of sending but for halves."""

        def new() -> Iterator[_Part]:
            start = 0
            for columns in chunks(pieces, self.batch_size):
                parts.append(_Part(start, columns))
                yield parts[-1]
                start += len(columns[0])

        following = new()
        with closing(_Calls(self)) as calls:
            while True:
                unsent = [part for part in parts if part.answer is None]
                count = len(parts) - len(unsent)
                waiting = chain(unsent, following)
                while count < calls.window and (part := next(waiting, None)) is not None:
                    self._send(part, calls, parts)
                    count += 1
                if not parts:
                    return
                part, text = parts.popleft(), None
                assert part.answer is not None
                chunk = part.chunk or Chunk(part.start, part.columns)
                try:
                    with self._explained(chunk):
                        outputs = part.answer()
                except (FeedTypeError, RowsFailedError) as error:
                    if self.error_col is None:
                        raise
                    if halves := part.halves():
                        parts.extendleft(reversed(halves))
                        continue
                    chunk, outputs = Chunk(part.start, part.columns), []
                    text = str(error)
                answer = chunk.widened(outputs) if outputs else self._nulls(chunk)
                if self.error_col is not None:
                    answer.append(pa.array([text] * len(part.columns[0]), pa.string()))
                yield chunk, answer

    def _send(self, part: _Part, calls: _Calls, parts: Iterable[_Part]) -> None:
        try:
            part.chunk = self._chunk(part.start, part.columns)
        except FeedTypeError as error:
            part.answer = partial(_raise, error)  # in its turn
            return
        if not part.chunk.values:
            part.answer = list
            return
        # The oldest that was sent: it may have ended the scorer.
        with self._explained(next(p.chunk for p in parts if p.chunk and p.chunk.values)):
            part.answer = calls.send(part.chunk)

    @contextmanager
    def _explained(self, chunk: Chunk) -> Iterator[None]:
        """Add the failed model, and its rows in a chunk, to errors."""
        try:
            yield
        except RowsFailedError as error:
            if self.error_col is not None:
                raise
            raise InferenceError(
                f"{self.model} failed on {chunk.rows}: {error}"
            ) from error.__cause__
        except ScorerLostError as error:
            raise ScorerLostError(f"{self.model} failed on {chunk.rows}: {error}") from None
        except InferenceError as error:
            raise InferenceError(f"{self.model}: {error}") from error.__cause__

    def _chunk(self, start: int, columns: Columns) -> Chunk:
        chunk = Chunk(start, columns, numbers=None if self.group_by is None else columns[-1])
        given = columns[: len(self.inputs)]
        try:
            valid = self._valid(given)
            if valid is not None:
                given = tuple(column.filter(pa.array(valid)) for column in given)
            is_empty = valid is not None and not valid.any()
            inputs = () if is_empty else self.inputs
            values = input_values(inputs, given[: len(inputs)])
        except FeedTypeError as error:
            raise FeedTypeError(f"{self.model}, {chunk.rows}: {error}") from error
        by_input = {wanted.tensor.name: c for wanted, c in zip(inputs, given, strict=False)}
        return replace(chunk, values=values, given=by_input, valid=valid)

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
