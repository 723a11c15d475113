"""Schemas hold what all records hold, and say so where that cannot be."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from sparkdl.core.errors import ConfigError
from sparkdl.data.examples import Kind, list_type
from sparkdl.data.infer import Features as Looks, Rules, add_up, see
from tests.data.records import Feature, chunk, example

INT64, FLOAT, BYTES = Kind.INT64, Kind.FLOAT, Kind.BYTES
LENIENT = Rules(is_empty_null=True, floats=pa.float64(), binary=("b",))


def kind_of(lists: Sequence[Feature], rules: Rules | None = None) -> pa.DataType:
    records = [example({"f": each}) for each in lists]
    schema = (rules or Rules()).schema(see([chunk(records)]))
    return schema.field("f").type


@pytest.mark.parametrize(
    ("lists", "kind", "lenient"),
    [
        ([(INT64, [1])], pa.int64(), None),
        ([(FLOAT, [1])], pa.float32(), pa.float64()),
        ([(BYTES, [b"a"]), (BYTES, ["é".encode()])], pa.string(), None),
        ([(BYTES, [b"a"]), (BYTES, [b"\xff"])], pa.binary(), None),
        ([(INT64, [1]), (INT64, [1, 2])], list_type(pa.int64()), None),
        ([(INT64, [1]), (INT64, [])], list_type(pa.int64()), pa.int64()),
        ([(INT64, []), (FLOAT, [1, 2])], list_type(pa.float32()), list_type(pa.float64())),
        ([(FLOAT, [])], list_type(pa.float32()), pa.float64()),
        ([(INT64, [1]), None], pa.int64(), None),
        ([None], pa.string(), None),
    ],
)
def test_the_type_is_that_of_all_records(
    lists: Sequence[Feature], kind: pa.DataType, lenient: pa.DataType | None
) -> None:
    assert kind_of(lists) == kind
    assert kind_of(lists[::-1]) == kind
    assert kind_of(lists, LENIENT) == (lenient or kind)


def test_features_come_sorted_whichever_record_has_them() -> None:
    records = [example({"b": (BYTES, [b"x"])}), example({"a": (INT64, [1]), "c": None})]
    schema = Rules().schema(see([chunk(records)]))
    assert schema == pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.string())])
    assert LENIENT.schema(see([chunk(records)])).field("b").type == pa.binary()


def test_values_of_two_kinds_are_an_error_that_names_both_places() -> None:
    with pytest.raises(ConfigError, match=r"'f' holds .* in file at byte 0 .* in file at byte"):
        kind_of([(INT64, [1]), (FLOAT, [1])])


LISTS = st.none() | st.one_of(
    st.tuples(st.just(INT64), st.lists(st.integers(-9, 9), max_size=3)),
    st.tuples(st.just(FLOAT), st.lists(st.just(0.5), max_size=3)),
    st.tuples(st.just(BYTES), st.lists(st.binary(max_size=2), max_size=3)),
)


@given(st.lists(st.dictionaries(st.sampled_from("ab"), LISTS), max_size=30), st.integers(1, 5))
def test_parts_add_up_to_the_whole(rows: list[dict[str, Feature]], size: int) -> None:
    records = [example(row) for row in rows]
    whole = see([chunk(records)])
    parts = [see([chunk(records[i : i + size])]) for i in range(0, len(records), size)]
    sent = [msgspec.json.decode(msgspec.json.encode(part), type=Looks) for part in parts]
    total = add_up(sent)
    assert total.keys() == whole.keys()
    for name, seen in whole.items():
        assert set(total[name].kinds) == set(seen.kinds)
        assert (total[name].low, total[name].high) == (seen.low, seen.high)
        assert total[name].is_text == seen.is_text
