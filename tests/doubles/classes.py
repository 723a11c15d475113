"""Writes an archive of the classes that Spark's JVMs load: `python -m tests.doubles.classes FILE`.

A JVM that is given it (`-XX:SharedArchiveFile`) starts a session with half the CPU time, since it
need not read, verify and link ten thousand classes. One that cannot use it, for Java or Spark is
another one meanwhile, starts without.

Runs in: a process of its own, see the Makefile
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.doubles import sessions
from tests.doubles.sessions import SparkSessions, make_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_OTHERS = ("executor.CoarseGrainedExecutorBackend", "deploy.worker.ExecutorRunner")
_DONE_S = 300.0


def same(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


def use(spark: SparkSession, folder: str) -> None:
    """Do what tests do most: rows from and to Python, by Arrow too, and files."""
    spark.sparkContext.parallelize(range(4), 2).map(str).collect()
    numbers = [(n, float(n), [n]) for n in range(4)]
    rows = spark.createDataFrame(numbers, "a long, b double, c array<long>")
    rows.write.parquet(folder)
    read = spark.read.parquet(folder).where("a > 0").orderBy("b")
    read.mapInArrow(same, read.schema).collect()
    read.groupBy("a").count().toPandas()


def write(path: Path) -> None:
    """Run a session in a JVM that writes the archive at its end: driver and tasks are in it.

    Spark's home of that session stays beside it: a JVM takes an archive only while the class path
    with which it was written is still there. Its own may be links to the same files.
    """
    from pyspark import SparkContext

    path.parent.mkdir(parents=True, exist_ok=True)
    new, home = path.with_suffix(".new"), path.with_suffix(".home")
    shutil.rmtree(home, ignore_errors=True)
    os.environ["SPARK_HOME"] = str(make_home(home))
    java = f"{_OPTIONS} -XX:ArchiveClassesAtExit={new} -Xlog:disable"
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--driver-java-options '{java}' pyspark-shell"
    with tempfile.TemporaryDirectory() as folder:
        spark_sessions = SparkSessions(Path(folder))
        spark = spark_sessions.get(sessions.LOCAL)
        use(spark, f"{folder}/rows")
        jvm: Any = spark.sparkContext._jvm
        for name in _OTHERS:
            jvm.java.lang.Class.forName(f"org.apache.spark.{name}")
        gateway: Any = SparkContext._gateway
        spark_sessions.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()  # upon which the JVM ends
        gateway.proc.wait(_DONE_S)
    new.replace(path)


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
