"""`horovod.spark.run` on Spark, and what there is without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark import run, run_elastic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def place(base: int) -> tuple[int, int]:
    from sparkdl.horovod.spark.task import get_available_devices
    from sparkdl.node.context import current

    assert isinstance(get_available_devices(), list)
    ctx = current()
    assert ctx is not None
    return ctx.rank, base + ctx.num_workers


def test_run_takes_the_active_session(spark_local: SparkSession) -> None:
    found = run(place, args=(5,), num_proc=2, verbose=0, framework="plain")
    assert found == [(0, 7), (1, 7)]


def test_too_few_slots_are_an_error_before_the_start(spark_local: SparkSession) -> None:
    with pytest.raises(ConfigError, match="99 nodes need 99 task slots"):
        run(place, args=(5,), num_proc=99, verbose=0)
    with pytest.raises(ConfigError, match=r"^env="):
        run(place, num_proc=99, env={"A": 1})  # type: ignore[dict-item]


def test_run_without_a_session_says_so() -> None:
    from pyspark import SparkContext

    if SparkContext._active_spark_context is None:
        with pytest.raises(ConfigError, match="no active SparkSession"):
            run_elastic(place, num_proc=2)
