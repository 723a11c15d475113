"""Rows of Parquet files by their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ReadError
from sparkdl.ml.scoring.rows import Rows
from sparkdl.storage.parquet.source import convert
from sparkdl.storage.systems import locate, open_file, open_storage
from sparkdl.values.ndarrays import Array

_DECODED_NBYTES = 4 * 1024 * 1024
"""Approximate size of a decoded piece: it stays in the processor's cache until scored."""


@dataclass(frozen=True)
class FileColumns:
    """Columns as they are in the files.

    Attributes:
        schema: the files' names for them, and Spark's types.
        is_case_sensitive: whether names in files must be spelt as in `schema`.
    """

    schema: pa.Schema
    is_case_sensitive: bool


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
            # Rows in a row are a view; others are copied.
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
        # Decoding only goes forward, so an earlier row begins its row group again.
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


def runs(paths: pa.Array, numbers: Array) -> Iterator[tuple[str, Array]]:
    """Yield the rows of one file each, their numbers ascending."""
    if not len(numbers):
        return
    codes = paths.dictionary_encode()
    files = codes.indices.to_numpy()
    # A file may come again from an earlier row, as in a union of a DataFrame with itself.
    cuts = np.flatnonzero((np.diff(files) != 0) | (np.diff(numbers) <= 0)) + 1
    for start, stop in pairwise([0, *cuts, len(numbers)]):
        yield codes.dictionary[int(files[start])].as_py(), numbers[start:stop]
