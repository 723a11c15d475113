"""Times become integers; rows of different lengths are filled up to one length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.values.columns import convert
from sparkdl.values.tensors import as_numbers, check_padding, no_tensor, padded, stored

LISTS = st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=8)


def column(values: list[Any], kind: pa.DataType | None = None) -> Any:
    return convert(pa.array(values, kind))


@pytest.mark.parametrize(
    ("values", "integers"),
    [
        (column([1, 86_400_000_000], pa.timestamp("us", "UTC")), [1, 86_400_000_000]),
        (column([0, 19_000], pa.date32()), [0, 19_000]),
        (column([-5, 7], pa.duration("us")), [-5, 7]),
        (column([3_000_000], pa.time64("us")), [3_000_000]),
        (np.array([2], "M8[s]"), [2_000_000]),
        (np.array([[1], [2]], "M8[us]"), [[1], [2]]),
    ],
)
def test_dates_are_days_and_other_times_microseconds(values: Any, integers: list[Any]) -> None:
    found = as_numbers("c", values)
    assert found.dtype == np.int64
    assert found.tolist() == integers


def test_nat_is_no_time() -> None:
    with pytest.raises(FeedTypeError, match="column 'c' holds NaT"):
        as_numbers("c", np.array(["NaT"], "M8[us]"))


@given(LISTS)
def test_padding_keeps_every_value_and_marks_the_rest(rows: list[list[int]]) -> None:
    made = padded({"c": column(rows, pa.list_(pa.int32()))}, {"c": None}, None)
    assert [row[mask].tolist() for row, mask in zip(made["c"], made["c.mask"], strict=True)] == rows
    assert made["c.length"].tolist() == list(map(len, rows))
    assert made["c"].shape == (len(rows), max(map(len, rows)))
    assert not made["c"][~made["c.mask"]].any()
    assert made["c"].dtype == np.int32
    wider = padded({"c": column(rows, pa.list_(pa.int32()))}, {"c": 7}, None)
    assert wider["c"].shape == wider["c.mask"].shape == (len(rows), 7)
    assert wider["c.mask"].sum(axis=1).tolist() == list(map(len, rows))


def test_rows_of_vectors_and_texts_are_padded_too() -> None:
    frames = column([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]])
    words = column([["a", "b"], ["c"]])
    made = padded({"f": frames, "w": words}, {"f": None, "w": 3}, None)
    assert made["f"].tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]
    assert made["w"].tolist() == [["a", "b", ""], ["c", "", ""]]


def test_further_columns_come_if_they_or_their_column_are_named() -> None:
    def names(*wanted: str) -> set[str]:
        columns = {"c": column([[1], [2, 3]]), "y": np.arange(2)}
        read = stored(wanted, {"c": 2})
        assert read is not None
        return set(padded({name: columns[name] for name in read}, {"c": 2}, wanted))

    assert names("c", "y") == {"c", "c.length", "c.mask", "y"}
    assert names("c.mask", "y") == {"c.mask", "y"}
    assert stored(None, {"c": 2}) is None


@pytest.mark.parametrize(
    ("values", "length", "words"),
    [
        (
            [[1, 2, 3]],
            2,
            r"row of length 3, and pad=\{'c': 2\} does not truncate.*slice\('c', 1, 2",
        ),
        (
            [[[1], [2, 3]]],
            None,
            "arrays of arrays of different lengths, and pad= can only fill one dimension",
        ),
        ([1, 2], None, "holds values of int64, and must hold arrays"),
        (["a", "b"], None, "holds text, and must hold arrays"),
    ],
)
def test_what_cannot_be_padded_is_refused(values: Any, length: int | None, words: str) -> None:
    with pytest.raises(FeedTypeError, match=f"column 'c' .*{words}|column 'c' {words}"):
        padded({"c": column(values)}, {"c": length}, None)


@pytest.mark.parametrize("pad", [{"c": 0}, {"c": "long"}, {"c": 1.5}, 7])
def test_padding_that_cannot_be_is_refused_before_a_row_is_read(pad: Any) -> None:
    with pytest.raises(ConfigError, match="pad="):
        check_padding(pad)


def test_columns_that_padding_misses_or_adds_are_refused() -> None:
    lists = column([[1], [2, 3]])
    with pytest.raises(
        ConfigError, match="pad= names 'd': must name columns of the feed, which ar"
    ):
        padded({"c": lists}, {"d": 1}, None)
    with pytest.raises(ConfigError, match=r"pad= adds a column 'c\.mask'"):
        padded({"c": lists, "c.mask": lists}, {"c": 2}, None)


def test_arrays_that_differ_in_two_dimensions_are_refused() -> None:
    odd = np.fromiter([np.zeros((2, 3)), np.zeros((2, 4))], object, 2)
    with pytest.raises(FeedTypeError, match="column 'c' holds arrays that differ in more than"):
        padded({"c": odd}, {"c": None}, None)


def test_error_about_lists_says_how_to_pad_them() -> None:
    lists = str(no_tensor("c", column([[1], [2, 3]]), "PyTorch"))
    assert "column 'c' holds arrays of different lengths, which PyTorch has no tensor for" in lists
    assert "pad={'c': None}" in lists
    assert "column 'c' holds text" in str(no_tensor("c", column(["a", "b"]), "JAX"))
    jagged = str(no_tensor("c", column([[[1], [2, 3]], [[1, 2], [3]]]), "JAX"))
    assert "column 'c' holds arrays of arrays of different lengths" in jagged
