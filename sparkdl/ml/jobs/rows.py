"""A partition's rows on its executor's disk, and which of them make a mini-batch.

Runs in: feeder. `num_steps` in the driver.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import FeedTypeError
from sparkdl.ml.scoring.inputs import (
    InputColumn,
    check_classes,
    check_weights,
    fitting,
    tensor_values,
)
from sparkdl.ml.scoring.source import Tensor
from sparkdl.values.columns import convert, is_packed
from sparkdl.values.ndarrays import Array

_ABOUT, _ROWS = "about.json", "rows.arrow"
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
        self._batches: list[pa.RecordBatch] = []
        if self.num_rows:
            file = pa.ipc.open_file(pa.memory_map(str(folder / _ROWS)))
            self._batches = [file.get_batch(n) for n in range(file.num_record_batches)]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self._order: tuple[tuple[int, int], Array] | None = None

    def batch(
        self, columns: Sequence[Column], step: int, steps: int, order: tuple[int, int] | None
    ) -> dict[str, Array]:
        """Return the rows of one of `steps` mini-batches: every row is in one of them.

        Args:
            columns: those that `store` was given.
            order: seed and epoch, which decide the order; None for the order that Spark gave.
        """
        # By fractions: the batches differ by one row at most.
        start, stop = (at * self.num_rows // steps for at in (step, step + 1))
        if start == stop:
            return {}
        # Ascending, as the mapped file has them: a gradient does not depend on their order.
        places = (
            np.arange(start, stop) if order is None else np.sort(self._places(order)[start:stop])
        )
        cuts = np.searchsorted(places, self._starts)
        parts = [
            batch.take(pa.array(places[first:last] - number))
            for batch, number, first, last in zip(
                self._batches, self._starts, cuts, cuts[1:], strict=False
            )
            if first < last
        ]
        return {
            column.name: column.values(pa.concat_arrays([part.column(place) for part in parts]))
            for place, column in enumerate(columns)
        }

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

    Raises:
        FeedTypeError: see `Column.values`; or if rows have different shapes.
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
    rows, sample = 0, b""
    checks = [_Check(column) for column in columns]
    with ExitStack() as stack:
        for batch in batches:
            if not batch.num_rows:
                continue
            # By place: Spark does not find a name with a dot in it.
            for check, column in zip(checks, batch.columns, strict=True):
                for part in _pieces(column):
                    check.add(part)
            if not rows:
                sample = _as_sample(batch.slice(0, 1))
                writer = stack.enter_context(pa.ipc.new_file(str(draft / _ROWS), batch.schema))
            writer.write_batch(batch)
            rows += batch.num_rows
    digest = zlib.crc32(b"".join(check.digest.to_bytes(4, "big") for check in checks))
    (draft / _ABOUT).write_text(json.dumps({"rows": rows, "digest": digest}))
    return Stored(rows, digest, sample)


def _pieces(column: pa.Array) -> Iterator[pa.Array]:
    """Cut vectors into pieces that are not large as arrays either."""
    rows = len(column)
    if is_packed(column.type) and not column.null_count:
        rows = max(1, _PIECE_NBYTES // max(1, convert(column[:1]).nbytes))
    for start in range(0, len(column), rows):
        yield column[start : start + rows]


class _Check:
    """Checks the values of a column.

    Attributes:
        digest: of what was added, whatever the pieces.
    """

    def __init__(self, column: Column) -> None:
        self._column, self._kind, self.digest = column, "", 0

    def add(self, part: pa.Array) -> None:
        array = self._column.values(part)
        kind = f"{array.dtype} {list(array.shape[1:])}"
        if kind != (self._kind or kind):
            raise FeedTypeError(
                f"column {self._column.name!r} holds rows of {self._kind} and of {kind}; make all "
                "rows the same shape"
            )
        self._kind = kind
        # A checksum is enough: nobody has a reason to forge it.
        self.digest = zlib.crc32(np.ascontiguousarray(array).data, self.digest)


def _as_sample(row: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as writer:
        writer.write_batch(row)
    return bytes(sink.getvalue())


def read_sample(content: bytes, columns: Sequence[Column]) -> dict[str, Array]:
    """Return the row that a `Stored.sample` holds, by column `[1, …]`."""
    row = pa.ipc.open_stream(content).read_next_batch()
    return {c.name: c.values(values) for c, values in zip(columns, row.columns, strict=True)}
