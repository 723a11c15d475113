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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
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
from sparkdl.values.columns import convert
from sparkdl.values.ndarrays import Array

_ABOUT = "about.json"


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
        self._arrays = {
            name: np.memmap(folder / file, dtype, "r", shape=(self.num_rows, *shape))
            for name, (file, dtype, shape) in about["columns"].items()
            # An empty file cannot be mapped.
            if self.num_rows
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
    rows, digest, sample = 0, 0, b""
    kinds: dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]] = {}
    with ExitStack() as stack:
        files: list[IO[bytes]] = [
            stack.enter_context((draft / str(number)).open("wb")) for number in range(len(columns))
        ]
        for batch in batches:
            if not batch.num_rows:
                continue
            # By place: Spark does not find a name with a dot in it.
            values = {c.name: c.values(batch.column(p)) for p, c in enumerate(columns)}
            for (name, array), file in zip(values.items(), files, strict=True):
                kind = kinds.setdefault(name, (array.dtype, array.shape[1:]))
                if kind != (array.dtype, array.shape[1:]):
                    raise FeedTypeError(
                        f"column {name!r} holds rows of {kind[0]} {list(kind[1])} and of "
                        f"{array.dtype} {list(array.shape[1:])}; make all rows the same shape"
                    )
                data = np.ascontiguousarray(array).data
                # A checksum is enough: nobody has a reason to forge it.
                digest = zlib.crc32(data, digest)
                file.write(data)
            rows += batch.num_rows
            sample = sample or _as_sample({name: array[:1] for name, array in values.items()})
    found = {
        column.name: (str(number), kinds[column.name][0].str, kinds[column.name][1])
        for number, column in enumerate(columns)
        if column.name in kinds
    }
    (draft / _ABOUT).write_text(json.dumps({"rows": rows, "digest": digest, "columns": found}))
    return Stored(rows, digest, sample)


def _as_sample(values: Mapping[str, Array]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **{f"column_{name}": value for name, value in values.items()})  # type: ignore[arg-type]
    return file.getvalue()


def read_sample(content: bytes) -> dict[str, Array]:
    """Return the row that a `Stored.sample` holds, by column `[1, …]`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        return {name.removeprefix("column_"): found[name] for name in found.files}
