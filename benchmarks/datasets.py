"""The data of the benchmarks: Parquet files of random values or of digits, written once."""

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
"""Number of files, and of Spark's partitions of them."""
FEW_FILES = 2
"""Number of files of the smaller part, for contestants that need seconds per thousand rows."""
FEW_STEP = 256
"""Their rows are a multiple of this: `DataFeed.next_batch(256)` waits for a full batch."""
TEST_ROWS = 10_000
_SLICE_NBYTES = 32 << 20
_KNOWN = 1400
"""How many of scikit-learn's 1,797 digits make up training rows; the rest make up test rows."""
_Make = Callable[[np.random.Generator, int], pa.Table]


@dataclass(frozen=True)
class DataSet:
    """A folder of Parquet files of equal size; `nbytes` is the size of the rows in Arrow."""

    name: str
    path: str
    files: int
    rows: int
    nbytes: int


def _images(values: np.ndarray) -> pa.Array:
    """Return rows of 784 floats as lists."""
    offsets = pa.array(np.arange(values.size // 784 + 1, dtype=np.int32) * 784)
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel()))


def _wide(random: np.random.Generator, rows: int) -> pa.Table:
    x = _images(random.random(rows * 784, np.float32))
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


def _texts(random: np.random.Generator, rows: int) -> pa.Table:
    """Sentences of 3 to 60 words, most of them short."""
    words = np.array(["a", "the", "film", "plot", "end", "good", "great", "bad", "very", "not"])
    counts = np.clip(random.lognormal(2.5, 0.7, rows), 3, 60).astype(int)
    return pa.table({"text": [" ".join(random.choice(words, count)) for count in counts]})


KINDS: dict[str, tuple[int, int, _Make]] = {
    "wide": (160_000, 8_000, _wide),
    "scalars": (1_600_000, 8_000, _scalars),
    "blobs": (4_800, 1_200, _blobs),
    "single": (24_000_000, 10_000, _single),
    "texts": (384, 384, _texts),  # in batches of 32, each file has whole ones
}
"""Each set's rows at scale 1, those of its smaller part, and the function that makes rows."""


def make(name: str, folder: Path, scale: float) -> tuple[DataSet, DataSet]:
    """Return the data set and its smaller part; create them if `folder` lacks them."""
    rows, few, table = KINDS[name]
    rows = max(FILES, int(rows * scale))
    few = max(1, int(few * min(1.0, scale)) // FEW_FILES // FEW_STEP) * FEW_STEP * FEW_FILES
    return (
        _make(name, table, folder / name, FILES, rows),
        _make(name, table, folder / f"{name}-few", FEW_FILES, few),
    )


def make_digits(folder: Path, rows: int) -> tuple[DataSet, DataSet]:
    """Return training and test rows; create them if `folder` lacks them.

    `image` is `array<float>` of 784 numbers from 0 to 1, `label` a digit: scikit-learn's digits
    three times as large, at random places in 28 x 28, with noise. A sixth as many test rows, at
    most 10,000, are made of other digits.
    """
    few = max(FILES, min(TEST_ROWS, rows // 6))
    train, test = partial(_digits, slice(_KNOWN)), partial(_digits, slice(_KNOWN, None))
    return (
        _make("digits", train, folder / "digits", FILES, rows),
        _make("digits", test, folder / "digits-test", FILES, few),
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
    label = pa.array(labels[chosen].astype(np.int64))
    return pa.table({"image": _images(np.clip(x, 0, 1)), "label": label})


def _make(name: str, make: _Make, folder: Path, files: int, rows: int) -> DataSet:
    manifest = folder / "_manifest.json"  # Spark ignores names with this prefix
    each = rows // files
    if manifest.exists():
        found = DataSet(**json.loads(manifest.read_text()))
        if (found.files, found.rows) == (files, each * files):
            return found
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    nbytes = 0
    for number in range(files):
        table = make(random, each)
        nbytes += table.nbytes
        a_slice = max(1, min(each, each * _SLICE_NBYTES // table.nbytes))
        file = folder / f"part-{number:03}.parquet"
        pq.write_table(
            table, file, row_group_size=a_slice, use_dictionary=False, compression="none"
        )
    made = DataSet(name, str(folder), files, each * files, nbytes)
    manifest.write_text(json.dumps(asdict(made)))
    return made
