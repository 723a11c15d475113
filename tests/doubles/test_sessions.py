from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.doubles import sessions
from tests.doubles.sessions import SparkSessions
from tests.doubles.until import until

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


def test_process_that_outlives_its_cluster_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process of a cluster inherits the mark of its daemons."""
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    outlives = f"{sys.executable} -c 'input()' <&3 &"
    (home / "bin" / "spark-class").write_text(f"#!/bin/sh\nexec 3<>{tmp_path}/never\n{outlives}\n")
    (home / "bin" / "spark-class").chmod(0o700)
    os.mkfifo(tmp_path / "never")
    monkeypatch.setenv("SPARK_HOME", str(home))
    monkeypatch.setattr(sessions, "_GONE_S", 0.0)
    spark, folder = SparkSessions(tmp_path), str(tmp_path)
    spark.add_worker("spark://nobody", 0, 1)

    def has_begun() -> bool:
        with suppress(psutil.Error):  # the shell is ending
            return any("input()" in p.cmdline() for p in sessions._processes_of(folder))
        return False

    assert until(has_begun)
    with pytest.raises(AssertionError, match=r"a stopped cluster left processes(?s:.*)input"):
        spark.stop()
    monkeypatch.setattr(sessions, "_GONE_S", 30.0)
    assert not sessions._left_of(folder)
