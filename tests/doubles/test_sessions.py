from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_jvm_takes_its_classes_from_the_archive(spark_local: SparkSession) -> None:
    """A JVM that cannot use it says nothing, and takes twice as long."""
    archive = re.search("SharedArchiveFile=([^ ]+)", os.environ["JAVA_TOOL_OPTIONS"])
    if archive is None:
        pytest.skip("there is no archive")
    gateway: Any = spark_local.sparkContext._gateway
    maps = Path("/proc", str(gateway.proc.pid), "maps")
    assert archive[1] in maps.read_text(encoding="utf-8")
