"""Scores DataFrames of pandas as a model scores those of Spark; without Spark, from a folder.

Runs in: anywhere

The folder holds the model's files, and `score.json` with what each column is. No code is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import fs as pafs

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.ml.estimators.source import fingerprint
from sparkdl.ml.scoring.columns import type_decoded, type_encoded
from sparkdl.ml.scoring.rows import Rows
from sparkdl.ml.scoring.task import Score
from sparkdl.storage.systems import locate, open_storage
from sparkdl.values.ndarrays import is_vector

if TYPE_CHECKING:
    import pandas as pd

_PLAN = "score.json"
_CONTENT = {"keras": "model.keras", "keras_code": "model.pickle", "module": "module.pickle"}
"""Names of the files of models that are in memory."""
_PICKLED = ("keras_code", "module")


class FrameScorer:
    """A model with the columns that it takes and gives."""

    def __init__(self, score: Score) -> None:
        # A row that is left out would shift the others' results; vectors are Spark's own.
        invalid = "keep" if score.handle_invalid == "skip" else score.handle_invalid
        outputs = tuple(replace(each, type=_plain(each.type)) for each in score.outputs)
        self.score = replace(score, handle_invalid=invalid, outputs=outputs)

    def predict(self, frame: Any, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Return the columns of results, one row for each row of `frame`.

        Args:
            frame: a DataFrame of pandas. Cells of a column may be lists, arrays or vectors.
            params: none are known; MLflow passes them.

        Raises:
            FeedTypeError: if a column is missing, or a value cannot feed the model.
            InferenceError: if the model fails.
        """
        names = [column.name for column in self.score.inputs]
        if missing := [name for name in names if name not in frame.columns]:
            raise FeedTypeError(
                f"the DataFrame has no column {', '.join(map(repr, missing))}, which the model "
                f"takes; its columns are {', '.join(map(str, frame.columns))}"
            )
        columns = tuple(_array(frame[name], name) for name in names)
        rows = Rows(columns, (("", np.arange(len(frame))),))
        types = pa.schema(list(self.score.struct_type))
        answers = self.score.answered(iter([rows] if len(frame) else []))
        batches = [pa.RecordBatch.from_arrays(found, schema=types) for _, found in answers]
        found = pa.Table.from_batches(batches, types).to_pandas()
        return found.set_index(frame.index)

    def save(self, folder: Path) -> None:
        """Write the model and its columns into a folder that exists.

        Raises:
            ConfigError: if the model's storage is not known.
            OSError: if its files cannot be read.
        """
        score, source = self.score, self.score.source
        if source.content is None:
            name = source.path.rstrip("/").rpartition("/")[2]
            _copy(source.path, folder / name)
        elif source.format in _CONTENT:
            name = _CONTENT[source.format]
            (folder / name).write_bytes(source.content)
        else:
            raise ConfigError(f"a model of format {source.format!r} cannot be saved")
        plan = replace(score, source=replace(source, path=name, content=None))
        (folder / _PLAN).write_bytes(msgspec.json.encode(plan, enc_hook=type_encoded))

    @classmethod
    def load(cls, folder: Path) -> FrameScorer:
        """Return the saved scorer; the model itself is loaded with the first rows.

        Raises:
            ConfigError: if the folder was not saved by this class.
        """
        try:
            text = (folder / _PLAN).read_bytes()
            score = msgspec.json.decode(text, type=Score, dec_hook=type_decoded)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"{folder} holds no model that was saved whole: {error}. Save it again"
            ) from None
        path = folder / score.source.path
        source = replace(score.source, path=str(path), fingerprint=fingerprint(str(path)))
        if source.format in _PICKLED:  # whose loader wants its content
            source = replace(source, path="", content=path.read_bytes())
        return cls(replace(score, source=source))


def _plain(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.float64()) if is_vector(kind) else kind


def _array(values: pd.Series, name: str) -> pa.Array:
    """Return a column as Arrow has it; NaN stays a number, None is a null."""
    if values.dtype != object:
        return pa.array(values, from_pandas=values.dtype.kind not in "biuf")
    try:
        return pa.array([_cell(value) for value in values], from_pandas=False)
    except pa.ArrowException as error:
        raise FeedTypeError(
            f"column {name!r} holds values of several kinds: {error}. Cast them to one type"
        ) from None


def _cell(value: Any) -> Any:
    if hasattr(value, "toArray"):  # a vector of Spark ML
        value = value.toArray()
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return [_cell(each) for each in value]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_cell(each) for each in value]
    return value


def _copy(path: str, target: Path) -> None:
    storage, where = locate(path)
    system = open_storage(storage)
    if system.get_file_info(where).type == pafs.FileType.Directory:
        target.mkdir()
    pafs.copy_files(where, str(target), system, pafs.LocalFileSystem())
