"""Numbers are packed only if all are what they seem; anything else is left alone."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.values.encode import pack_rows

INTS = st.integers(-(2**31), 2**31 - 1)
OTHERS = st.one_of(
    st.floats(), st.integers(), st.booleans(), st.none(), st.text("gi", max_size=20),
    st.binary(max_size=12), st.floats().map(np.float64), st.lists(st.floats(), max_size=3),
)  # fmt: skip


def unpacked(parts: list[Any]) -> list[str]:
    """Return each row of packed parts as the text of a list."""
    rows = zip(*(part.tolist() for part in parts), strict=True)
    return [repr(list(chain.from_iterable(row))) for row in rows]


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 5), st.data())
def test_rows_are_packed_by_runs(floats: list[bool], count: int, data: Any) -> None:
    row = st.tuples(*(st.floats() if is_float else INTS for is_float in floats))
    rows = data.draw(st.lists(row, min_size=count, max_size=count))
    rows = data.draw(st.sampled_from([rows, list(map(list, rows))]))
    packed = pack_rows(rows, max_runs=12)
    assert packed is not None
    assert unpacked(packed) == [repr(list(row)) for row in rows]


@given(st.lists(st.tuples(OTHERS, OTHERS, OTHERS), min_size=1, max_size=4))
def test_rows_that_are_packed_have_the_types_they_had(rows: list[tuple[Any, ...]]) -> None:
    packed = pack_rows(rows, max_runs=3)
    if packed is not None:
        assert unpacked(packed) == [repr(list(row)) for row in rows]


@pytest.mark.parametrize(
    "rows", [[(1.0, 2)] * 2 + [(1, 2.0)], [(1.0, "x")], [(1.0, 2**31)], [(1.0, object())]]
)
def test_other_rows_are_left_alone(rows: list[Any]) -> None:
    assert pack_rows(rows, max_runs=9) is None


def test_rows_whose_type_changes_too_often_are_left_alone() -> None:
    assert pack_rows([(1.0, 2, 3.0)], max_runs=2) is None
    assert pack_rows([(1.0, 2, 3.0)], max_runs=3) is not None
