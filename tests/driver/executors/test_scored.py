"""Which columns a scored DataFrame has: kept ones and declared ones."""

from __future__ import annotations

import pytest
from pyspark.sql.types import StructType

from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.scored import check_names, kept_columns, result_schema


def test_columns_are_kept_as_asked() -> None:
    assert kept_columns(["a", "b"], True) == (0, 1)
    assert kept_columns(["a", "b"], False) == ()
    assert kept_columns(["a", "b", "c"], ["c", "a"]) == (2, 0)
    with pytest.raises(
        ConfigError, match=r"names 'z': must name columns of the DataFrame, which are a, b"
    ):
        kept_columns(["a", "b"], ["z"])
    with pytest.raises(ConfigError, match=r"keep=\['a'\]"):
        kept_columns(["a"], "a")


def test_two_columns_of_one_name_are_refused() -> None:
    check_names(["a"], ["b"])
    with pytest.raises(
        ConfigError,
        match=r"two columns 'label'.*Rename the results with schema=.*withColumnRenamed.*df.drop",
    ):
        check_names(["Label", "x"], ["label"])
    check_names(["Label", "x"], ["label"], is_exact=True)
    with pytest.raises(ConfigError, match=r"two columns 'x': the DataFrame's"):
        check_names(["x"], ["x"], is_exact=True)


def test_name_of_several_columns_is_refused_with_what_to_do() -> None:
    check_names(["V", "v"], ["x"], is_exact=True)
    advice = r"several columns 'V', 'v'; its columns are V, v. Give each its own name: df.toDF"
    with pytest.raises(ConfigError, match=advice):
        check_names(["V", "v"], ["x"])
    with pytest.raises(ConfigError, match="several columns 'x'; its columns are x, y, x"):
        kept_columns(["x", "y", "x"], ["y", "x"])
    assert kept_columns(["x", "y", "x"], ["y"]) == (1,)


def test_schema_that_is_none_is_refused() -> None:
    for wrong in (StructType([]), 7):
        with pytest.raises(ConfigError, match="schema="):
            result_schema(wrong)  # type: ignore[arg-type]
