"""RDDs of results, whose actions raise the nodes' failures.

Runs in: driver. Spark Connect has no RDDs, and pyspark-client not their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import SparkdlError
from sparkdl.core.jobs import named_jobs
from sparkdl.driver.executors.executor import explained
from sparkdl.spark_versions import IS_SPARK_3

if TYPE_CHECKING or not IS_SPARK_3:
    from pyspark.core.rdd import PipelinedRDD
else:
    from pyspark.rdd import PipelinedRDD

if TYPE_CHECKING:
    from pyspark import RDD

Explain = Callable[[BaseException], SparkdlError | None]


class ResultRdd(PipelinedRDD[Any, Any]):
    """An RDD of results, or one derived from it without a shuffle.

    Actions of a DataFrame, and those behind a shuffle, raise Spark's own error, with the words of
    the task that failed.
    """

    def __init__(
        self, prev: RDD[Any], func: Any, is_kept: bool, explain: Explain, group: str
    ) -> None:
        super().__init__(prev, func, is_kept)
        self._explain = explain
        self._group = group

    @classmethod
    def of(cls, results: RDD[Any], explain: Explain, group: str) -> ResultRdd:
        """Wrap an RDD of results.

        Args:
            group: of the jobs that compute them.
        """
        return cls(results, _as_they_are, True, explain, group)

    def mapPartitionsWithIndex(self, f: Any, preservesPartitioning: bool = False) -> RDD[Any]:  # noqa: N802, N803 (pyspark calls it so)
        """Do what Spark's does: map, filter, count and others go through it."""
        return ResultRdd(self, f, preservesPartitioning, self._explain, self._group)

    def collect(self) -> list[Any]:
        """Do what Spark's does: count, sum, reduce, foreach and others go through it."""
        with self._scoring():
            return super().collect()

    def take(self, num: int) -> list[Any]:
        """Do what Spark's does; first and isEmpty go through it."""
        with self._scoring():
            return super().take(num)

    def saveAsTextFile(self, path: str, compressionCodecClass: str | None = None) -> None:  # noqa: N802, N803 (likewise)
        """Do what Spark's does."""
        with self._scoring():
            super().saveAsTextFile(path, compressionCodecClass)

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        with explained(self._explain), named_jobs(self.ctx, self._group, "scoring"):
            yield


def _as_they_are(_partition: int, results: Iterable[Any]) -> Iterable[Any]:
    return results
