"""An executor's daemon imports frameworks once, and its Python workers have them at their start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch]


def look(_rows: Iterable[int]) -> Iterator[list[bool]]:
    """Return whether the worker has imported them, and whether its parent has."""
    maps = Path(f"/proc/{os.getppid()}/maps").read_text(encoding="utf-8")
    own = [name in sys.modules for name in ("tensorflow", "torch")]
    yield own + [library in maps for library in ("_pywrap_tensorflow", "libtorch")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_have_frameworks_from_the_process_that_forks_them(spark_ml: SparkSession) -> None:
    context = spark_ml.sparkContext
    assert context.parallelize(range(4), 4).mapPartitions(look).collect() == [[True] * 4] * 4
