"""Each type of a column is the same to all that read or write it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as t
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type

from sparkdl.core.errors import ConfigError
from sparkdl.data.examples import arrow_schema, columns_of
from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.training import check_schema
from sparkdl.ml.scoring.columns import mapped_outputs
from sparkdl.ml.scoring.inputs import InputColumn, input_columns, input_values
from sparkdl.ml.scoring.source import ANY, Signature, Tensor
from sparkdl.values.columns import convert
from sparkdl.values.results import result_columns
from sparkdl.values.rows import encode_rows
from sparkdl.values.types import BY_DTYPE, SPARK_NAMES, family, fits, spark_family

OWN = ("bool", "int8", "int16", "int32", "int64", "float32", "float64", "string")
"""Types that a column and a tensor both have."""
OTHERS = (t.TimestampType(), t.MapType(t.StringType(), t.LongType()), t.NullType(), t.StructType())


def values(dtype: str) -> Any:
    return np.array(["a", "é"], object) if dtype == "string" else np.array([1, 0]).astype(dtype)


@pytest.mark.parametrize("dtype", BY_DTYPE)
@pytest.mark.parametrize("dims", [(), (2,), (1, 2)])
def test_output_becomes_a_column_and_is_read_again(dtype: str, dims: tuple[int, ...]) -> None:
    tensor = Tensor("y", dtype, (None, *dims))
    schema, (output,) = mapped_outputs({}, {}, Signature((), (tensor,)))
    array = np.resize(values(dtype), (2, *dims))
    column = output.column(array.astype(object) if dtype == "string" else array)
    assert column.type == output.type
    assert schema["y"].dataType == from_arrow_type(output.type)
    assert fits(output.type, dtype, tensor.shape or ())
    taken = input_values((InputColumn("y", tensor),), [column])["y"]
    assert taken.tolist() == array.tolist()
    assert taken.dtype == (object if dtype == "string" else dtype)


@pytest.mark.parametrize("dtype", OWN)
def test_all_readers_take_a_column_of_the_type(dtype: str) -> None:
    arrow = BY_DTYPE[dtype]
    spark = from_arrow_type(arrow)
    assert (to_arrow_type(spark), spark.simpleString()) == (arrow, SPARK_NAMES[arrow])
    assert spark_family(t.ArrayType(t.ArrayType(spark))) == spark_family(spark) == family(arrow)
    array = convert(pa.array(values(dtype), arrow))
    assert array.dtype == (object if dtype == "string" else dtype)
    for batch in encode_rows(array.tolist()):  # results of Python
        (column,) = result_columns(batch, pa.schema([pa.field("y", arrow)]))
        assert column == pa.array(values(dtype), arrow)
    schema = t.StructType([t.StructField("x", spark), t.StructField("a", t.ArrayType(spark))])
    assert [column.leaf for column in columns_of(arrow_schema(schema))] == [arrow, arrow]  # files
    for wanted in (dtype, ANY):  # models
        assert input_columns(
            {"x": "x"}, Signature((Tensor("x", wanted, (None,)),), ()), schema
        ) == (InputColumn("x", Tensor("x", wanted, (None,))),)
    check_schema(Columns({"x": "", "a": ""}, {}), schema)  # estimators


@pytest.mark.parametrize("kind", OTHERS, ids=str)
def test_what_is_no_number_and_no_text_feeds_no_model(kind: t.DataType) -> None:
    schema = t.StructType([t.StructField("x", kind)])
    assert spark_family(kind) == "other"
    with pytest.raises(ConfigError, match="which a TFRecord cannot hold"):
        arrow_schema(schema)
    for dtype in ("float32", "string"):
        with pytest.raises(ConfigError, match="which cannot feed the model's input"):
            input_columns({"x": "x"}, Signature((Tensor("x", dtype, (None,)),), ()), schema)
    with pytest.raises(ConfigError, match="features must be numbers, vectors, text"):
        check_schema(Columns({"x": ""}, {}), schema)


def test_vectors_and_decimals_are_numbers() -> None:
    assert spark_family(VectorUDT()) == "vector"
    assert spark_family(t.DecimalType(10, 2)) == family(pa.decimal128(10, 2)) == "number"
