from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.doubles import sessions
from tests.doubles.sessions import SparkSessions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One row a partition: the folder of its executor."""
    import pyarrow as pa

    for _ in batches:
        pass
    yield pa.RecordBatch.from_pydict({"folder": [os.getcwd()]})


def executors(spark: SparkSession, partitions: int) -> list[str]:
    frame = spark.range(partitions, numPartitions=partitions)
    rows = frame.mapInArrow(where, "folder string").collect()
    return [row.folder for row in rows]


def test_local_session_has_four_slots(spark_local: SparkSession) -> None:
    assert spark_local.sparkContext.defaultParallelism == 4
    assert len(executors(spark_local, 4)) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_jvm_takes_its_classes_from_the_archive(spark_local: SparkSession) -> None:
    """A JVM that cannot use it says nothing, and takes twice as long."""
    archive = re.search("SharedArchiveFile=([^ ]+)", os.environ["JAVA_TOOL_OPTIONS"])
    if archive is None:
        pytest.skip("there is no archive")
    gateway: Any = spark_local.sparkContext._gateway
    maps = Path("/proc", str(gateway.proc.pid), "maps")
    assert archive[1] in maps.read_text(encoding="utf-8")


def test_session_is_reused_for_the_same_master(
    spark_local: SparkSession, spark_sessions: SparkSessions
) -> None:
    assert spark_sessions.get(sessions.LOCAL) is spark_local


def test_session_that_a_test_stopped_is_replaced(
    spark_session_on: Callable[[str], SparkSession],
) -> None:
    spark = spark_session_on("local[1]")
    spark.stop()
    assert spark_session_on("local[1]").range(3).count() == 3


def test_two_executors_of_two_slots(spark_cluster: SparkSession) -> None:
    assert _executors_are_two(spark_cluster)


def test_standalone_workers_are_processes_of_their_own(spark_standalone: SparkSession) -> None:
    assert str(spark_standalone.sparkContext.master).startswith("spark://127.0.0.1:")
    assert _executors_are_two(spark_standalone)


def _executors_are_two(spark: SparkSession) -> bool:
    import pyspark

    folders = set(executors(spark, 8))
    package = Path(pyspark.__file__).parent.resolve()
    assert not any(Path(folder).resolve().is_relative_to(package) for folder in folders)
    return len(folders) == 2
