"""An executor's daemon imports TensorFlow once, and its Python workers have it from their start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.tensorflow


def look(_rows: Iterator[int]) -> Iterator[tuple[bool, bool]]:
    """Return whether the worker has imported TensorFlow, and whether its parent has."""
    maps = Path(f"/proc/{os.getppid()}/maps").read_text(encoding="utf-8")
    yield "tensorflow" in sys.modules, "_pywrap_tensorflow" in maps


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_have_tensorflow_from_the_process_that_forks_them(spark_ml: SparkSession) -> None:
    context = spark_ml.sparkContext
    assert context.parallelize(range(4), 4).mapPartitions(look).collect() == [(True, True)] * 4
