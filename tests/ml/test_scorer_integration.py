"""One model for the task slots of an executor, on Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession, functions as f

from sparkdl import predict

ROWS = 100
PARTITIONS = 4
SIZE = 64


@pytest.mark.smoke
def test_slots_share_one_process_and_spark_repeats_what_it_loses(
    spark_cluster: SparkSession, tmp_path: Path
) -> None:
    """Two executors of two slots; the function's first call waits for the rows of both slots."""
    is_lost, is_proved = tmp_path / "lost", tmp_path / "proved"

    def make() -> Any:
        import os
        import signal
        import sys
        import threading
        import time

        calls: list[int] = []

        def fn(columns: dict[str, Any]) -> dict[str, Any]:
            end_s = time.monotonic() + 30
            while not calls and not is_proved.exists() and time.monotonic() < end_s:
                waiting = [frame.f_code.co_name for frame in sys._current_frames().values()]
                if waiting.count("do_exchange") >= 4:
                    break
                threading.Event().wait(0.02)
            calls.append(0)
            if 3 in columns["id"] and is_proved.exists() and not is_lost.exists():
                is_lost.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return {"twice": 2 * columns["id"], "pid": [os.getpid()] * len(columns["id"])}

        return fn

    frame = spark_cluster.range(PARTITIONS * ROWS, numPartitions=PARTITIONS)
    frame = frame.withColumn("partition", f.spark_partition_id())

    def rows(model_per: str) -> list[Any]:
        schema = "twice long, pid long"
        names = ["id", "partition"]
        scored = predict(
            frame, make, names, schema, batch_size=SIZE, keep=names, model_per=model_per
        )
        return scored.collect()

    found = rows("executor")
    assert [row.id for row in found] == list(range(PARTITIONS * ROWS))
    assert [row.twice for row in found] == [2 * row.id for row in found]
    assert len({row.pid for row in found}) == 2
    assert {*Counter(row.pid for row in found).values()} == {2 * ROWS}
    is_proved.touch()
    again = rows("executor")
    lost = int(is_lost.read_text())
    assert lost in {row.pid for row in found}
    assert np.array_equal([row.twice for row in again], [row.twice for row in found])
    assert lost not in {row.pid for row in again if row.partition == 0}
