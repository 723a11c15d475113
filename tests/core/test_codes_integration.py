"""Codes survive what Spark makes of an error: of tasks of DataFrames and RDDs, and of the JVM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession, functions

from sparkdl.core.errors import LaunchError
from sparkdl.core.failure import Code
from sparkdl.feed.transfer.messages import FeederError

STORY = 'worker:0 raised\n\tat line 1: "é" in [C:\\] 100%\n\nCaused by: 你好'


def lose_feed(_: Iterable[Any]) -> Iterator[Any]:
    raise FeederError("worker:0: reset by peer")


def raise_story(_: Iterable[Any]) -> Iterator[Any]:
    raise LaunchError(Code.RAISED.mark("NodeFailedError", STORY)) from KeyError("of the node")


@pytest.mark.parametrize("way", ["DataFrame", "RDD"])
@pytest.mark.parametrize(
    ("task", "code", "values"),
    [(lose_feed, Code.FEED_LOST, ()), (raise_story, Code.RAISED, ("NodeFailedError", STORY))],
)
def test_code_is_read_again_from_the_failure_of_a_job(
    spark_local: SparkSession, way: str, task: Any, code: Code, values: tuple[str, ...]
) -> None:
    rows = spark_local.range(1)
    with pytest.raises(Exception, match=code.value) as raised:
        if way == "RDD":
            rows.rdd.mapPartitions(task).collect()
        else:
            rows.mapInArrow(task, "id long").collect()
    assert code.values_in(raised.value) == values


def test_code_in_an_expression_of_spark_is_read_again(spark_local: SparkSession) -> None:
    text = functions.lit(f"{Code.NULL_VALUE.mark('a `b`')} fill it")
    with pytest.raises(Exception, match="fill it") as raised:
        spark_local.range(1).select(functions.raise_error(text)).collect()
    assert Code.NULL_VALUE.values_in(raised.value) == ("a `b`",)
