"""Which columns a scored DataFrame has: kept ones, declared ones, and those that results make."""

from __future__ import annotations

from collections import namedtuple
from datetime import date
from typing import Any

import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import Row
from pyspark.sql.types import StructType

from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.scored import check_names, kept_columns, result_schema, schema_of

Scored = namedtuple("Scored", "label score")


@pytest.mark.parametrize(
    ("results", "schema"),
    [
        ([1.5], "struct<prediction:double>"),
        ([1, 2.5, None], "struct<prediction:double>"),
        ([True], "struct<prediction:boolean>"),
        ([np.float32(1), np.float32(2)], "struct<prediction:float>"),
        ([np.uint8(1)], "struct<prediction:smallint>"),
        ([np.zeros(3, np.float32), np.zeros(2, np.float32)], "struct<prediction:array<float>>"),
        ([np.zeros((2, 2), np.int64)], "struct<prediction:array<array<bigint>>>"),
        ([[1.0], [], [2.0, 3.0]], "struct<prediction:array<double>>"),
        ([(1, "a")], "struct<_1:bigint,_2:string>"),
        ([Scored(1, 0.5)], "struct<label:bigint,score:double>"),
        ([Row(a=1, b=Row(c=b"x"))], "struct<a:bigint,b:struct<c:binary>>"),
        ([{"a": date(2026, 1, 1), "b": {"k": 1}}], "struct<a:date,b:map<string,bigint>>"),
    ],
)
def test_results_tell_their_columns(results: list[Any], schema: str) -> None:
    assert schema_of(results).simpleString() == schema


def test_vectors_stay_vectors() -> None:
    (field,) = schema_of([Vectors.dense(1.0), Vectors.sparse(3, [1], [2.0])]).fields
    assert field.dataType == Vectors.dense(1.0).__UDT__


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([None], "'prediction' cannot be told: None or empty"),
        ([[], []], "cannot be told"),
        ([1, "a"], "cannot be told: bigint, string"),
        ([(1,), (1, 2)], "not all of one kind"),
        ([1j], "builtins.complex, for which Spark has no type"),
    ],
)
def test_results_that_do_not_tell_ask_for_a_schema(results: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        schema_of(results)


def test_columns_are_kept_as_asked() -> None:
    assert kept_columns(["a", "b"], True) == (0, 1)
    assert kept_columns(["a", "b"], False) == ()
    assert kept_columns(["a", "b", "c"], ["c", "a"]) == (2, 0)
    with pytest.raises(ConfigError, match=r"names 'z', and the DataFrame's columns are a, b"):
        kept_columns(["a", "b"], ["z"])
    with pytest.raises(ConfigError, match=r"keep=\['a'\]"):
        kept_columns(["a"], "a")


def test_two_columns_of_one_name_are_refused() -> None:
    check_names(["a"], ["b"])
    with pytest.raises(
        ConfigError, match=r"two columns 'label'.*otherwise with schema=.*withColumnRenamed.*keep="
    ):
        check_names(["Label", "x"], ["label"])


def test_schema_that_is_none_is_refused() -> None:
    for wrong in (StructType([]), 7):
        with pytest.raises(ConfigError, match="schema="):
            result_schema(wrong)  # type: ignore[arg-type]
