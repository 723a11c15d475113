"""A program over Spark Connect: a launch with as many nodes as slots.

Runs in: a process of its own, since a process has sessions of Spark Connect or classic ones
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

import sparkdl
from sparkdl.core.options import Feeding


def count(_args: Any, ctx: Any) -> int:
    return sum(len(batch["id"]) for batch in ctx.batches(5))


def main() -> None:
    builder = SparkSession.builder.config("spark.ui.enabled", "false")
    spark: Any = builder.remote("local[2]").getOrCreate()
    options: dict[str, Any] = {"framework": "plain", "feeding": Feeding(timeout_s=60)}
    try:
        with sparkdl.launch(spark, count, nodes=2, **options) as cluster:
            cluster.feed(spark.range(40))
            print("2 nodes:", cluster.spec.placement, sum(cluster.results()))
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
