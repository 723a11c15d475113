"""Tables of other libraries become batches: each row once, in order, with its values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.values import tables
from sparkdl.values.columns import concat, to_columns
from sparkdl.values.tables import holds_tables, tables_in


def columns_of(data: Any) -> dict[str, Any]:
    assert holds_tables(data)
    (batches,) = tables_in(data)
    found = [concat([to_columns(batch) for batch in batches]) for _ in range(2)]
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name])  # every epoch begins at the first row
    return found[0]


def test_pandas_columns_keep_dtype_and_nan_and_lose_the_index() -> None:
    frame = pd.DataFrame(
        {
            "f": np.array([1.5, np.nan], np.float32),
            "u": np.array([1, 255], np.uint8),
            "t": pd.Categorical(["a", "b"]),
            "v": [np.array([1.0, 2.0]), np.array([3.0, 4.0])],
            7: [True, False],
        },
        index=[5, 3],
    )
    found = columns_of(frame)
    assert list(found) == ["f", "u", "t", "v", "7"]
    assert found["f"].dtype == np.float32
    assert np.isnan(found["f"][1])
    assert found["u"].dtype == np.uint8
    assert found["u"].tolist() == [1, 255]
    assert found["t"].tolist() == ["a", "b"]
    assert found["v"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_missing_values_of_pandas_are_nulls_which_are_refused_by_name() -> None:
    with pytest.raises(FeedTypeError, match="column 's' holds 1 null"):
        columns_of(pd.DataFrame({"s": ["a", None]}))


def test_pandas_column_without_a_type_is_named() -> None:
    frame = pd.DataFrame({"m": [np.eye(2), np.eye(2)]})
    with pytest.raises(FeedTypeError, match=r"column 'm' of the pandas.DataFrame.*createDataFrame"):
        tables_in(frame)


def test_large_table_has_batches_of_bounded_size() -> None:
    (batches,) = tables_in(pa.table({"x": np.arange(200_000)}))
    sizes = [batch.num_rows for batch in batches]
    assert sum(sizes) == 200_000
    assert max(sizes) <= 65_536


def test_tensors_of_arrow_keep_their_shape() -> None:
    images = np.arange(12, dtype=np.int32).reshape(3, 2, 2)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    table = pa.table({"image": pa.chunked_array([tensors[:2], tensors[2:]])})
    assert columns_of(table)["image"].tolist() == images.tolist()
    assert columns_of(pa.record_batch({"image": tensors}))["image"].shape == (3, 2, 2)


def test_frame_that_streams_arrow_is_a_table_and_a_reader_is_none() -> None:
    class Frame:
        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return pa.table({"x": [1, 2]}).__arrow_c_stream__(requested_schema)

    assert columns_of(Frame())["x"].tolist() == [1, 2]
    reader = pa.RecordBatchReader.from_batches(pa.schema([]), [])
    assert not any(map(holds_tables, (reader, [1, 2], [], "text", {"x": [1]})))


def test_dataset_is_read_in_order_with_its_formats_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_DATASET_ROWS", 60)
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "x": datasets.Value("int64"),
            "y": datasets.ClassLabel(names=["no", "yes"]),
            "m": datasets.Array2D((2, 1), "int32"),
            "s": datasets.Value("string"),
        }
    )
    rows = {
        "x": list(range(100)),
        "y": [0, 1] * 50,
        "m": [[[i], [i]] for i in range(100)],
        "s": ["a"] * 100,
    }
    dataset = datasets.Dataset.from_dict(rows, features=features)
    shuffled = dataset.shuffle(seed=1).select(range(90))
    found = columns_of(shuffled)
    assert found["x"].tolist() == list(shuffled["x"]) != sorted(shuffled["x"])
    assert found["m"].shape == (90, 2, 1)
    assert found["m"][:, 0, 0].tolist() == found["x"].tolist()
    assert found["y"].tolist() == [x % 2 for x in found["x"].tolist()]
    assert list(columns_of(dataset.with_format("numpy", columns=["y"]))) == ["y"]


def test_dataset_with_a_transform_and_a_dict_of_datasets_are_refused() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"x": [1]})
    with pytest.raises(ConfigError, match=r"has a transform.*dataset\.map\("):
        tables_in(dataset.with_transform(lambda rows: rows))
    with pytest.raises(ConfigError, match=r"splits 'train', 'test'; feed one of them"):
        tables_in(datasets.DatasetDict(train=dataset, test=dataset))
