"""`TransformSpec`: what a program does with rows, in frames of pandas, before they are a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ConfigError
from sparkdl.values.columns import Columns, objects


@dataclass(frozen=True)
class TransformSpec:
    """A function on frames of pandas, and the columns that it leaves.

    Attributes:
        func: takes and returns a `pandas.DataFrame`; it may return fewer rows or more. Called on
            several threads at once.
        edit_fields: of columns that it changes or adds: `(name, numpy dtype, shape, is nullable)`,
            or objects with `name`, `numpy_dtype` and `shape`.
        removed_fields: columns to leave out afterwards.
        selected_fields: columns to keep, in this order; `None` for all.
    """

    func: Callable[[Any], Any] | None = None
    edit_fields: Sequence[Any] | None = None
    removed_fields: Sequence[str] | None = None
    selected_fields: Sequence[str] | None = None

    def columns(self, batch: pa.RecordBatch) -> Columns:
        """Return what becomes of a batch's rows: arrays `[rows, …]` by name.

        Raises:
            ConfigError: if the function returns no frame, or a column is not there or not of the
                shape that `edit_fields` says.
        """
        frame = batch.to_pandas()
        if self.func is not None:
            frame = self.func(frame)
        names = self.selected_fields
        if names is None:
            names = [name for name in frame.columns if name not in (self.removed_fields or ())]
        edits = {name: (dtype, shape) for name, dtype, shape in map(_edit, self.edit_fields or ())}
        if missing := [name for name in names if name not in frame.columns]:
            raise ConfigError(
                f"TransformSpec: the function's frame has no column {missing[0]!r}, and must have "
                f"all that are kept; its columns are {', '.join(map(repr, frame.columns))}"
            )
        return {str(name): _array(name, frame[name], *edits.get(name, ())) for name in names}


def _edit(field: Any) -> tuple[str, Any, Any]:
    if isinstance(field, (tuple, list)):
        return field[0], field[1], field[2]
    return field.name, field.numpy_dtype, field.shape


def _array(name: str, series: Any, dtype: Any = None, shape: Any = ()) -> np.ndarray[Any, Any]:
    values = list(series) if series.dtype == object else series.to_numpy()
    if isinstance(values, list):
        is_nested = all(isinstance(value, (np.ndarray, list)) for value in values)
        # pandas has arrays as objects, one a row.
        parts = list(map(np.asarray, values)) if is_nested else []
        is_even = len({part.shape for part in parts}) == 1
        values = np.stack(parts) if is_even else objects(parts or values)
    if values.dtype == object or dtype is None:
        return values
    wanted = tuple(shape or ())
    if all(wanted) and values.shape[1:] != wanted and len(values):
        if values.size != len(values) * int(np.prod(wanted)):
            raise ConfigError(
                f"TransformSpec: column {name!r} has values of shape {values.shape[1:]}, and must "
                f"have {wanted}, as edit_fields says"
            )
        values = values.reshape(len(values), *wanted)
    return values.astype(np.str_ if dtype is str else dtype, copy=False)
