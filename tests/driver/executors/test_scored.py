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
        ConfigError, match=r"two columns 'label'.*otherwise with schema=.*withColumnRenamed.*keep="
    ):
        check_names(["Label", "x"], ["label"])


def test_schema_that_is_none_is_refused() -> None:
    for wrong in (StructType([]), 7):
        with pytest.raises(ConfigError, match="schema="):
            result_schema(wrong)  # type: ignore[arg-type]
