"""Tables in the driver's memory as Arrow batches: of pyarrow, pandas, Polars, Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.values.ndarrays import nest

TABLES = "a pandas.DataFrame, a pyarrow.Table or a datasets.Dataset"
_KINDS = (("pandas", "DataFrame"), ("datasets", "Dataset"), ("datasets", "DatasetDict"))
_MAX_ROWS = 65_536
_DATASET_ROWS = 8_192


@dataclass(frozen=True)
class Batches:
    """The rows of a pyarrow.Table, or of a datasets.Dataset, read as they are fed."""

    table: Any

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        is_arrow = isinstance(self.table, pa.Table)
        for part in [self.table] if is_arrow else _read(self.table):
            if part.num_rows:
                yield from _plain(part).to_batches(max_chunksize=_MAX_ROWS)


def holds_tables(data: Any) -> bool:
    is_list = isinstance(data, (list, tuple)) and bool(data)
    return _is_table(data) or (is_list and all(map(_is_table, data)))


def tables_in(data: Any) -> list[Batches]:
    """Return a partition for each table of `data`, for which `holds_tables` is true.

    The index of a pandas.DataFrame is left out, and NaN in its columns of floats stays NaN. A
    Dataset gives the columns of its format, as they are stored.
    """
    return [
        Batches(_opened(part)) for part in (data if isinstance(data, (list, tuple)) else [data])
    ]


def _is_table(data: Any) -> bool:
    is_known = isinstance(data, (pa.Table, pa.RecordBatch)) or any(_is_of(data, *k) for k in _KINDS)
    return is_known or _has_stream(data)


def _has_stream(data: Any) -> bool:
    """Whether any number of Arrow streams can be had of `data`, as of Polars' frames.

    Spark's DataFrames have streams as well, and cross Spark; a reader is read once.
    """
    is_again = not isinstance(data, (pa.RecordBatchReader, Iterator))
    return is_again and hasattr(data, "__arrow_c_stream__") and not hasattr(data, "mapInArrow")


def _is_of(data: Any, package: str, name: str) -> bool:
    """Whether `data` is of a class that an optional package exports, without importing it."""
    kinds = type(data).__mro__
    return any(k.__name__ == name and k.__module__.split(".")[0] == package for k in kinds)


def _opened(data: Any) -> Any:
    if _is_of(data, "datasets", "DatasetDict"):
        raise ConfigError(
            f"a DatasetDict holds the splits {', '.join(map(repr, data))}; feed one of them: "
            f"data[{next(iter(data), 'train')!r}]"
        )
    if _is_of(data, "datasets", "Dataset"):
        if data.format["type"] == "custom":
            raise ConfigError(
                "this Dataset has a transform (set_transform, with_transform), which computes rows "
                "when they are read; feeding takes the stored ones. Feed dataset.map(transform, "
                "batched=True), or call dataset.reset_format() and transform in the nodes"
            )
        return data
    if _is_of(data, "pandas", "DataFrame"):
        return _from_pandas(data)
    return pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else pa.table(data)


def _from_pandas(frame: Any) -> pa.Table:
    names = list(map(str, frame.columns))
    # By place: pandas allows several columns of one name.
    columns = [_column(name, frame.iloc[:, index]) for index, name in enumerate(names)]
    return pa.Table.from_arrays(columns, names)


def _column(name: str, series: Any) -> pa.Array | pa.ChunkedArray:
    if isinstance(series.dtype, np.dtype) and series.dtype.kind == "f":
        return pa.array(series.to_numpy())  # as pandas' own, it would turn NaN into null
    try:
        return pa.array(series, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise FeedTypeError(
            f"column {name!r} of the pandas.DataFrame has no type of Arrow: {error}. Make it lists "
            "of numbers, numbers or text, or feed spark.createDataFrame(frame)"
        ) from error


def _read(dataset: Any) -> Iterator[pa.Table]:
    """Yield the rows in the order that `shuffle`, `select` and others gave them."""
    columns: Sequence[str] = dataset.format["columns"]
    # In Arrow's format no row becomes Python objects, and `iter` follows the dataset's indices.
    yield from dataset.with_format("arrow", columns=columns).iter(_DATASET_ROWS)


def _plain(table: pa.Table) -> pa.Table:
    """Return the values as Arrow's own types, without the metadata of the table's library."""
    columns = [_unwrapped(column) for column in table.columns]
    return pa.Table.from_arrays(columns, table.column_names)


def _unwrapped(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        # As by the other ways to a node (`spark_type`): values, not dictionaries.
        return column.cast(column.type.value_type)
    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    is_tensor = isinstance(column.type, pa.FixedShapeTensorType)
    return pa.chunked_array(
        [nest(c.to_numpy_ndarray()) if is_tensor else c.storage for c in column.chunks]
    )
