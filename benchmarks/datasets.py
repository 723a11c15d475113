"""The data that the feed is measured with: Parquet files of random values, made once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FILES = 8
"""Files of the data, and partitions that Spark makes of them."""
FEW_FILES = 2
"""Files of the smaller part, for contestants that need seconds for a few thousand rows."""
FEW_STEP = 256
"""What their rows are a multiple of: `DataFeed.next_batch(256)` waits for a batch to be full."""
_SLICE_NBYTES = 32 << 20


@dataclass(frozen=True)
class Kind:
    """A kind of table.

    Attributes:
        rows: Rows at scale 1.
        few: Rows of the smaller part at scale 1.
        make: Returns that many rows.
    """

    name: str
    rows: int
    few: int
    make: Callable[[np.random.Generator, int], pa.Table]


@dataclass(frozen=True)
class DataSet:
    """A folder with Parquet files, all of one size.

    Attributes:
        nbytes: Of the rows as Arrow arrays.
    """

    name: str
    path: str
    files: int
    rows: int
    nbytes: int


def _wide(random: np.random.Generator, rows: int) -> pa.Table:
    values = pa.array(random.random(rows * 784, np.float32))
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * 784)
    x = pa.ListArray.from_arrays(offsets, values)
    return pa.table({"x": x, "y": pa.array(random.integers(0, 10, rows, np.int32))})


def _scalars(random: np.random.Generator, rows: int) -> pa.Table:
    columns = {}
    for number in range(10):
        columns[f"double{number}"] = pa.array(random.random(rows))
        columns[f"int{number}"] = pa.array(random.integers(0, 1 << 31, rows, np.int32))
        columns[f"long{number}"] = pa.array(random.integers(0, 1 << 62, rows))
        columns[f"float{number}"] = pa.array(random.random(rows, np.float32))
    return pa.table(columns)


def _blobs(random: np.random.Generator, rows: int) -> pa.Table:
    blobs = [random.bytes(100_000) for _ in range(rows)]
    labels = random.integers(0, 10, rows)
    return pa.table({"image": pa.array(blobs, pa.binary()), "label": pa.array(labels)})


def _single(random: np.random.Generator, rows: int) -> pa.Table:
    return pa.table({"id": pa.array(random.integers(0, 1 << 62, rows))})


KINDS = (
    Kind("wide", 160_000, 8_000, _wide),
    Kind("scalars", 1_600_000, 8_000, _scalars),
    Kind("blobs", 4_800, 1_200, _blobs),
    Kind("single", 24_000_000, 10_000, _single),
)


def make(kind: Kind, folder: Path, scale: float) -> tuple[DataSet, DataSet]:
    """Return the data set and its smaller part, made unless `folder` has them already."""
    rows = max(FILES, int(kind.rows * scale))
    few = max(1, int(kind.few * min(1.0, scale)) // FEW_FILES // FEW_STEP) * FEW_STEP * FEW_FILES
    return (
        _make(kind, folder / kind.name, FILES, rows),
        _make(kind, folder / f"{kind.name}-few", FEW_FILES, few),
    )


def _make(kind: Kind, folder: Path, files: int, rows: int) -> DataSet:
    manifest = folder / "_manifest.json"  # Spark passes over such names
    each = rows // files
    if manifest.exists():
        found = DataSet(**json.loads(manifest.read_text()))
        if (found.files, found.rows) == (files, each * files):
            return found
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    nbytes = 0
    for number in range(files):
        table = kind.make(random, each)
        nbytes += table.nbytes
        a_slice = max(1, min(each, each * _SLICE_NBYTES // table.nbytes))
        pq.write_table(
            table,
            folder / f"part-{number:03}.parquet",
            row_group_size=a_slice,
            use_dictionary=False,
            compression="none",
        )
    made = DataSet(kind.name, str(folder), files, each * files, nbytes)
    manifest.write_text(json.dumps(asdict(made)))
    return made


TEST_ROWS = 10_000
_KNOWN = 1400
"""Of scikit-learn's 1,797 digits, those that training rows are made of; the rest is for tests."""


def make_digits(folder: Path, rows: int) -> tuple[DataSet, DataSet]:
    """Return training and test rows, made unless `folder` has them already.

    `image` is `array<float>` of 784 numbers from 0 to 1, `label` a digit: scikit-learn's digits
    three times as large, at random places in 28 x 28, with noise. A sixth as many test rows, at
    most 10,000, are made of other digits.
    """
    few = max(FILES, min(TEST_ROWS, rows // 6))
    train = Kind("digits", rows, few, partial(_digits, slice(_KNOWN)))
    test = Kind("digits", rows, few, partial(_digits, slice(_KNOWN, None)))
    return (
        _make(train, folder / "digits", FILES, rows),
        _make(test, folder / "digits-test", FILES, few),
    )


def _digits(which: slice, random: np.random.Generator, rows: int) -> pa.Table:
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = data.images[which].astype(np.float32) / 16, data.target[which]
    chosen = random.integers(0, len(labels), rows)
    places = random.integers(0, 5, (rows, 2))
    x = random.random((rows, 28, 28), np.float32) * 0.3
    for row, (number, (top, left)) in enumerate(zip(chosen, places, strict=True)):
        x[row, top : top + 24, left : left + 24] += np.kron(images[number], np.ones((3, 3)))
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * 784)
    image = pa.ListArray.from_arrays(offsets, pa.array(np.clip(x, 0, 1).ravel()))
    return pa.table({"image": image, "label": pa.array(labels[chosen].astype(np.int64))})
