"""Results of inference whose actions raise what a node raised, not what Spark made of it.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark import RDD
from pyspark.core.rdd import PipelinedRDD

from sparkdl.core.errors import SparkdlError

Explain = Callable[[BaseException], SparkdlError | None]


@contextmanager
def explained(explain: Explain) -> Iterator[None]:
    """Raise the failure of the nodes that is behind an error, if one is."""
    try:
        yield
    except Exception as error:
        problem = explain(error)
        if problem is None:
            raise
        raise problem from None


class ResultRdd(PipelinedRDD[Any, Any]):
    """An RDD of results, and what is made of it without a shuffle.

    Actions of a DataFrame, and those behind a shuffle, raise Spark's own error, with the words of
    the task that failed.
    """

    def __init__(self, prev: RDD[Any], func: Any, is_kept: bool, explain: Explain) -> None:
        super().__init__(prev, func, is_kept)
        self._explain = explain

    @classmethod
    def of(cls, results: RDD[Any], explain: Explain) -> ResultRdd:
        """Return these results as such an RDD."""
        return cls(results, _as_they_are, True, explain)

    def mapPartitionsWithIndex(self, f: Any, preservesPartitioning: bool = False) -> RDD[Any]:  # noqa: N802, N803 (pyspark calls it so)
        """Do what Spark's does: map, filter, count and others go through it."""
        return ResultRdd(self, f, preservesPartitioning, self._explain)

    def collect(self) -> list[Any]:
        """Do what Spark's does: count, sum, reduce, foreach and others go through it."""
        with explained(self._explain):
            return super().collect()

    def take(self, num: int) -> list[Any]:
        """Do what Spark's does; first and isEmpty go through it."""
        with explained(self._explain):
            return super().take(num)

    def saveAsTextFile(self, path: str, compressionCodecClass: str | None = None) -> None:  # noqa: N802, N803 (likewise)
        """Do what Spark's does."""
        with explained(self._explain):
            super().saveAsTextFile(path, compressionCodecClass)


def _as_they_are(_partition: int, results: Iterable[Any]) -> Iterable[Any]:
    return results
