"""The Spark task that scores: Arrow batches through a model that its Python worker keeps.

Runs in: feeder
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import FeedTypeError, InferenceError
from sparkdl.feed.values.ndarrays import Array
from sparkdl.ml.estimators.source import ModelSource
from sparkdl.ml.scoring.inputs import InputColumn, tensor_values, valid_rows
from sparkdl.ml.scoring.outputs import OutputColumn
from sparkdl.ml.scoring.predict import Predictor, predictor


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
