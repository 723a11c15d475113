"""A partition's rows as arrays on its executor's disk, and which of them make a mini-batch.

Runs in: feeder. `num_steps` in the driver.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import FeedTypeError
from sparkdl.ml.estimators.source import Tensor
from sparkdl.ml.scoring.inputs import (
    InputColumn,
    check_classes,
    check_weights,
    fitting,
    tensor_values,
)
from sparkdl.values.columns import convert, is_packed
from sparkdl.values.ndarrays import Array

_ABOUT = "about.json"
_PIECE_NBYTES = 32 * 1024 * 1024
"""Sparse rows are made dense by so many bytes."""


@dataclass(frozen=True)
class Column:
    """A column that is kept.

    Attributes:
        tensor: the model's input for it, which gives dtype and shape; None to leave it unchanged.
        has_classes: it holds numbers of classes.
        is_weight: it holds the weights of rows, float32.
    """

    name: str
    tensor: Tensor | None = None
    has_classes: bool = False
    is_weight: bool = False

    def values(self, column: pa.Array) -> Array:
        """Return some rows of it.

        Raises:
            FeedTypeError: for nulls, text, arrays of different lengths, or what does not fit.
        """
        where = f"column {self.name!r}"
        if self.tensor is not None:
            values = tensor_values(column, InputColumn(self.name, self.tensor))
        else:
            values = convert(column, None, where)
        if values.dtype == object:
            raise FeedTypeError(
                f"{where} holds {column.type}: training as Spark jobs takes numbers, and arrays of "
                "one shape. Encode text as numbers, or train on nodes (mode='nodes')"
            )
        if self.has_classes:
            check_classes(values, self.name)
        if self.is_weight:
            check_weights(values, self.name)
        if self.is_weight and self.tensor is None:
            values = fitting(values, np.dtype(np.float32), where, "weights")
        return values


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> Array:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty((0, *shape[1:]), dtype)
    return np.memmap(path, dtype, "r").reshape(shape)


class _SparseRows:
    """Rows [rows, *shape] of which only the numbers other than 0 are stored."""

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...]) -> None:
        counts = np.fromfile(f"{path}.counts", np.int64)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._places = _mapped(Path(f"{path}.places"), "int32", (-1,))
        self._values, self._shape = _mapped(path, dtype, (-1,)), shape

    def __getitem__(self, rows: slice | Array) -> Array:
        starts, stops = self._starts[:-1][rows], self._starts[1:][rows]
        counts = stops - starts
        before = np.cumsum(counts) - counts
        at = np.arange(counts.sum()) + np.repeat(starts - before, counts)
        dense = np.zeros((len(counts), prod(self._shape[1:])), self._values.dtype)
        dense[np.repeat(np.arange(len(counts)), counts), self._places[at]] = self._values[at]
        return dense.reshape(len(counts), *self._shape[1:])


def num_steps(rows: Sequence[int], batch_rows: int) -> int:
    """Return the mini-batches of an epoch, so that none has more than `batch_rows` on average."""
    return max(1, -(-sum(rows) // batch_rows))


class Rows:
    """A partition's rows.

    Args:
        folder: where `store` has put them; mapped into memory, which all processes share.

    Attributes:
        digest: see `Stored`.
    """

    def __init__(self, folder: Path) -> None:
        about = json.loads((folder / _ABOUT).read_text())
        self.num_rows: int = about["rows"]
        self.digest: int = about["digest"]
        self._arrays: dict[str, Array | _SparseRows] = {
            name: (_SparseRows if is_sparse else _mapped)(folder / file, dtype, (-1, *shape))
            for name, (file, dtype, shape, is_sparse) in about["columns"].items()
        }
        self._order: tuple[tuple[int, int], Array] | None = None

    def batch(self, step: int, steps: int, order: tuple[int, int] | None) -> dict[str, Array]:
        """Return the rows of one of `steps` mini-batches: every row is in one of them.

        Args:
            order: seed and epoch, which decide the order; None for the order that Spark gave.
        """
        # By fractions: the batches differ by one row at most.
        start, stop = (at * self.num_rows // steps for at in (step, step + 1))
        if order is None:
            return {name: np.asarray(a[start:stop]) for name, a in self._arrays.items()}
        # Ascending, as the mapped file has them: a gradient does not depend on their order.
        places = np.sort(self._places(order)[start:stop])
        return {name: np.asarray(array[places]) for name, array in self._arrays.items()}

    def _places(self, order: tuple[int, int]) -> Array:
        if self._order is None or self._order[0] != order:
            self._order = (order, np.random.default_rng(order).permutation(self.num_rows))
        return self._order[1]


@dataclass(frozen=True)
class Stored:
    """Facts about a partition's stored rows.

    Attributes:
        digest: of all values; it shows whether they are the same when Spark computes them again.
        sample: the first row, as `read_sample` takes it; empty if there is none.
    """

    rows: int
    digest: int
    sample: bytes


def folder_of(root: Path, job: str, name: str) -> Path:
    """Return where a partition's rows are, on an executor with the directory `root`."""
    return root / f"sparkdl-jobs-{job}" / name


def store(folder: Path, columns: Sequence[Column], batches: Iterable[pa.RecordBatch]) -> Stored:
    """Write rows into `folder`, which appears when all are there; another attempt may be first.

    Args:
        batches: each is written before the next is asked for.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename does not cross file systems.
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=folder.parent))
    try:
        stored = _write(draft, columns, batches)
        if folder.is_dir() and Rows(folder).digest != stored.digest:
            shutil.rmtree(folder)  # left by a failed attempt that had other rows
        with suppress(OSError):  # it is there already, from another attempt
            os.rename(draft, folder)
        return stored
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(draft: Path, columns: Sequence[Column], batches: Iterable[pa.RecordBatch]) -> Stored:
    rows = 0
    with ExitStack() as stack:
        writers = [
            _Writer(draft / str(number), column.name, stack)
            for number, column in enumerate(columns)
        ]
        for batch in batches:
            # By place: Spark does not find a name with a dot in it.
            for place, (column, writer) in enumerate(zip(columns, writers, strict=True)):
                for part in _pieces(batch.column(place)):
                    writer.write(column.values(part), is_packed(part.type))
            rows += batch.num_rows
    found = {writer.name: writer.about for writer in writers if writer.kind is not None}
    digest = 0
    for writer in writers:
        digest = zlib.crc32(writer.digest.to_bytes(4, "big"), digest)
    (draft / _ABOUT).write_text(json.dumps({"rows": rows, "digest": digest, "columns": found}))
    return Stored(rows, digest, _as_sample({w.name: w.first for w in writers}) if rows else b"")


def _pieces(column: pa.Array) -> Iterator[pa.Array]:
    """Cut vectors and matrices into pieces that are not large as arrays either."""
    rows = len(column)
    if rows and is_packed(column.type) and not column.null_count:
        rows = max(1, _PIECE_NBYTES // max(1, convert(column[:1]).nbytes))
    for start in range(0, len(column), max(1, rows)):
        yield column[start : start + rows]


class _Writer:
    """The files of a column.

    Args:
        stack: closes the files.

    Attributes:
        kind: dtype and shape of its rows; None before the first.
        first: the first row `[1, …]`.
        digest: of what was written.
    """

    def __init__(self, path: Path, name: str, stack: ExitStack) -> None:
        self.name, self.digest = name, 0
        self.kind: tuple[np.dtype[np.generic], tuple[int, ...]] | None = None
        self.first = np.empty(0)
        self._path, self._stack, self._is_sparse = path, stack, False
        self._files: list[IO[bytes]] = []

    @property
    def about(self) -> tuple[str, str, tuple[int, ...], bool]:
        """What `Rows` has to know of the files."""
        assert self.kind is not None
        return self._path.name, self.kind[0].str, self.kind[1], self._is_sparse

    def write(self, array: Array, may_be_sparse: bool) -> None:
        """Write rows `[rows, …]`; without the zeros if the first ones are mostly zeros."""
        kind = array.dtype, array.shape[1:]
        if self.kind is None:
            self.kind, self.first = kind, array[:1].copy()
            self._is_sparse = may_be_sparse and bool(3 * np.count_nonzero(array) < array.size)
            ends = ("", ".counts", ".places") if self._is_sparse else ("",)
            paths = [Path(f"{self._path}{end}") for end in ends]
            self._files = [self._stack.enter_context(path.open("wb")) for path in paths]
        if kind != self.kind:
            raise FeedTypeError(
                f"column {self.name!r} holds rows of {self.kind[0]} {list(self.kind[1])} and of "
                f"{array.dtype} {list(array.shape[1:])}; make all rows the same shape"
            )
        parts = [array]
        if self._is_sparse:
            flat = array.reshape(len(array), -1)
            row_of, places = np.nonzero(flat)
            counts = np.bincount(row_of, minlength=len(flat)).astype(np.int64)
            parts = [flat[row_of, places], counts, places.astype(np.int32)]
        for part, file in zip(parts, self._files, strict=True):
            data = np.ascontiguousarray(part).data
            # A checksum is enough: nobody has a reason to forge it.
            self.digest = zlib.crc32(data, self.digest)
            file.write(data)


def _as_sample(values: Mapping[str, Array]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **{f"column_{name}": value for name, value in values.items()})  # type: ignore[arg-type]
    return file.getvalue()


def read_sample(content: bytes) -> dict[str, Array]:
    """Return the row that a `Stored.sample` holds, by column `[1, …]`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        return {name.removeprefix("column_"): found[name] for name in found.files}
