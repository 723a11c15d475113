"""A DataFrame with a column of every Spark type goes through the feed's batches as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyspark
import pytest
from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT
from pyspark.sql import DataFrame, Row, SparkSession, types as t

from sparkdl.core.errors import FeedTypeError
from sparkdl.values.columns import concat, to_columns
from sparkdl.values.rows import encode_rows, rows

SPARK = tuple(map(int, pyspark.__version__.split(".")[:2]))
POINT = t.StructType(
    [t.StructField("x", t.DoubleType()), t.StructField("tags", t.ArrayType(t.StringType()))]
)
COLUMNS: dict[str, tuple[t.DataType, list[Any]]] = {
    "byte": (t.ByteType(), [1, -128]),
    "short": (t.ShortType(), [1, -(2**15)]),
    "int": (t.IntegerType(), [1, -(2**31)]),
    "long": (t.LongType(), [2**53 + 1, -(2**63)]),
    "float": (t.FloatType(), [1.5, -0.0]),
    "double": (t.DoubleType(), [0.1, float("inf")]),
    "flag": (t.BooleanType(), [True, False]),
    "text": (t.StringType(), ["é\0", ""]),
    "data": (t.BinaryType(), [b"\0\xff", b""]),
    "day": (t.DateType(), [date(1, 1, 1), date(9999, 12, 31)]),
    "at": (t.TimestampType(), [datetime(2020, 7, 1, 1, 2, 3, 4), datetime(1960, 1, 1)]),
    "ntz": (t.TimestampNTZType(), [datetime(2020, 3, 8, 2, 30), datetime(1, 1, 1, 0, 0, 0, 1)]),
    "took": (t.DayTimeIntervalType(), [timedelta(days=-1, microseconds=1), timedelta(0)]),
    "money": (t.DecimalType(38, 18), [Decimal("1.500000000000000001"), Decimal("-1")]),
    "list": (t.ArrayType(t.FloatType()), [[1.0, 2.0], [3.0, 4.0]]),
    "ragged": (t.ArrayType(t.IntegerType()), [[], [1, None]]),
    "lists": (t.ArrayType(t.ArrayType(t.ShortType())), [[[1], [2]], [[3], [4]]]),
    "blobs": (t.ArrayType(t.BinaryType()), [[b"a", None], []]),
    "point": (POINT, [Row(x=1.5, tags=["a"]), Row(x=None, tags=[None])]),
    "points": (t.ArrayType(POINT), [[Row(x=1.5, tags=[]), None], []]),
    "map": (t.MapType(t.StringType(), POINT), [{"k": Row(x=0.5, tags=None), "n": None}, {}]),
    "at_of": (t.MapType(t.IntegerType(), t.TimestampType()), [{1: datetime(2020, 1, 1)}, {}]),
    "vector": (VectorUDT(), [DenseVector([1, 2]), SparseVector(2, {1: 4.0})]),
    "vectors": (t.ArrayType(VectorUDT()), [[DenseVector([1]), None], []]),
}
WITH_NULLS_INSIDE = {"blobs", "point"}
WITHOUT_ARRAY = {"map", "at_of", "vectors", "ragged", "points"}


def frame(spark: SparkSession, nulls: bool) -> DataFrame:
    """Return two rows without nulls at the top, and with `nulls` a third of nothing else."""
    fields = [t.StructField(name, kind) for name, (kind, _) in COLUMNS.items()]
    data = list(zip(*(values for _, values in COLUMNS.values()), strict=True))
    if nulls:
        data.insert(1, (None,) * len(fields))
    return spark.createDataFrame(data, t.StructType(fields)).coalesce(1)


def batches(df: DataFrame) -> list[pa.RecordBatch]:
    """Return the batches that a feeder gets, from a Spark task by way of Arrow IPC."""

    def collect(given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in given:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            yield pa.record_batch({"ipc": pa.array([sink.getvalue().to_pybytes()], pa.binary())})

    streams = [row.ipc for row in df.mapInArrow(collect, "ipc binary").collect()]
    return [batch for stream in streams for batch in pa.ipc.open_stream(bytes(stream))]


def differences(a: Any, b: Any, where: str = "row") -> list[str]:
    """Return where two values differ in type, value, names or order."""
    if SPARK < (4, 1):
        a, b = (bytes(each) if isinstance(each, bytearray) else each for each in (a, b))
    if type(a) is not type(b):
        return [f"{where}: {type(a)} is not {type(b)}"]
    if isinstance(a, Row) and list(a.__fields__) != list(b.__fields__):
        return [f"{where}: {a.__fields__} is not {b.__fields__}"]
    if isinstance(a, dict):
        a, b = list(a.items()), list(b.items())
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{where}: {len(a)} elements, not {len(b)}"]
        names = getattr(a, "__fields__", range(len(a)))
        parts = zip(a, b, names, strict=True)
        return [each for x, y, name in parts for each in differences(x, y, f"{where}.{name}")]
    return [] if a == b and repr(a) == repr(b) else [f"{where}: {a!r} is not {b!r}"]


@pytest.mark.parametrize(("nulls", "zone"), [(False, "UTC"), (True, "America/Los_Angeles")])
def test_rows_of_a_batch_are_the_rdds(spark_local: SparkSession, nulls: bool, zone: str) -> None:
    was = spark_local.conf.get("spark.sql.session.timeZone")
    spark_local.conf.set("spark.sql.session.timeZone", zone)
    try:
        df = frame(spark_local, nulls)
        found = [row for batch in batches(df) for row in rows(batch)]
        assert differences(found, df.rdd.collect()) == []
        assert differences(found, df.collect()) == []
    finally:
        spark_local.conf.set("spark.sql.session.timeZone", str(was))


def test_rows_of_an_rdd_come_back_from_the_encoder(spark_local: SparkSession) -> None:
    df = frame(spark_local, nulls=True).drop("took")

    def there_and_back(given: Iterable[Row]) -> Iterable[Row]:
        return (row for batch in encode_rows(given) for row in rows(batch))

    found = df.rdd.mapPartitions(there_and_back).collect()
    pickled = df.rdd.map(lambda row: row).collect()
    assert differences(found, pickled) == []


def test_times_come_back_and_variants_as_they_are_stored(spark_local: SparkSession) -> None:
    if SPARK < (4, 2):
        pytest.skip("this Spark has no such types")
    query = """select parse_json('{"a": [1, null]}') v, time'12:34:56.789' clock, null nothing,
        named_struct() e"""
    df = spark_local.sql(query)
    (batch,) = batches(df)
    assert isinstance(rows(batch.select(["v"]))[0].v.value, bytes)
    (row,), (expected,) = rows(batch.select(["clock", "nothing", "e"])), df.collect()
    assert differences(row[:2], expected[1:3]) == []
    assert differences(row.e, expected.e) == []
    assert len(rows(batch.select([]))) == 1
    clock = to_columns(batch, ["clock"])["clock"]
    assert clock.dtype == "m8[ns]"
    assert clock[0].astype("m8[us]").item() == timedelta(
        hours=12, minutes=34, seconds=56, milliseconds=789
    )
    with pytest.raises(FeedTypeError, match="column 'nothing'"):
        to_columns(batch, ["nothing"])


EXPECTED: dict[str, tuple[str, tuple[int, ...]]] = {
    "byte": ("<i1", ()), "short": ("<i2", ()), "int": ("<i4", ()), "long": ("<i8", ()),
    "float": ("<f4", ()), "double": ("<f8", ()), "flag": ("?", ()), "text": ("O", ()),
    "data": ("O", ()), "day": ("<M8[D]", ()), "at": ("<M8[us]", ()), "ntz": ("<M8[us]", ()),
    "took": ("<m8[us]", ()), "money": ("<f8", ()), "list": ("<f4", (2,)),
    "lists": ("<i2", (2, 1)), "vector": ("<f8", (2,)),
}  # fmt: skip


def test_every_type_that_can_be_an_array_is_one(spark_local: SparkSession) -> None:
    df = frame(spark_local, nulls=False)
    (batch,) = batches(df)
    wanted = [name for name in COLUMNS if name not in WITHOUT_ARRAY | WITH_NULLS_INSIDE]
    arrays = to_columns(batch, wanted)
    assert {name: (a.dtype, a.shape[1:]) for name, a in arrays.items()} == {
        name: (np.dtype(dtype), shape) for name, (dtype, shape) in EXPECTED.items()
    }
    first, second = df.collect()
    for name in ("byte", "short", "int", "long", "float", "double", "flag", "text", "data", "day",
                 "ntz", "took", "list", "lists"):  # fmt: skip
        assert arrays[name].tolist() == [first[name], second[name]]
    in_utc = [row.at.astimezone(timezone.utc).replace(tzinfo=None) for row in (first, second)]
    assert arrays["at"].tolist() == in_utc
    assert np.array_equal(arrays["vector"], [first.vector.toArray(), second.vector.toArray()])
    assert arrays["money"].tolist() == [1.5, -1.0]


def test_every_type_that_is_no_array_is_refused_by_name(spark_local: SparkSession) -> None:
    (batch,) = batches(frame(spark_local, nulls=False).select(*WITHOUT_ARRAY))
    for name in WITHOUT_ARRAY:
        with pytest.raises(FeedTypeError, match=f"column '{name}'"):
            to_columns(batch.select([name]))


def test_a_dataframe_without_rows_has_columns_of_the_same_types(spark_local: SparkSession) -> None:
    df = frame(spark_local, nulls=False)
    (full,) = batches(df)
    assert sum(batch.num_rows for batch in batches(df.limit(0))) == 0
    empty = full.slice(0, 0)
    assert rows(empty) == []
    names = list(EXPECTED)
    arrays, expected = to_columns(empty, names), to_columns(full, names)
    for name, array in arrays.items():
        assert (len(array), array.dtype) == (0, expected[name].dtype)
    joined = concat([arrays, to_columns(full, names), arrays])
    for name, array in joined.items():
        assert repr(array) == repr(expected[name])
