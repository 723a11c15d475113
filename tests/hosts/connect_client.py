"""A client of a Spark Connect server: it launches two nodes, feeds them, and has one restart.

Runs in: a process on a host of its own. It prints JSON, a line for each event.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import sparkdl
from sparkdl.core.errors import ConfigError

ROWS = 400


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def total(_args: Any, ctx: Any) -> list[Any]:
    if ctx.rank == 0 and ctx.generation == 0:
        raise RuntimeError("once")
    large = bytes(3 << 20)  # more than one piece of the relay's
    return [sum(int(sum(batch["id"])) for batch in ctx.batches(10)), large]


def main(url: str, feeds_table: str = "") -> None:
    builder: Any = SparkSession.builder
    spark = builder.remote(url).getOrCreate()
    options: dict[str, Any] = {"framework": "plain", "max_restarts": 2}
    with sparkdl.launch(spark, total, nodes=2, **options) as cluster:
        say("launched", hosts=sorted({member.host for member in cluster.world.members}))
        if feeds_table:  # which is refused; it would be all that the nodes read
            try:
                cluster.feed(pa.table({"id": [1]}))
            except ConfigError as error:
                say("table", error=str(error))
        report = cluster.feed(spark.range(ROWS))
        results = cluster.results()
    say("trained", total=sum(t for t, _ in results), rows=report.rows_fed,
        nbytes=[len(large) for _, large in results])  # fmt: skip
    if feeds_table:
        found = sparkdl.doctor(spark, 2, framework="plain", quick=True).checks
        say("doctor", checks=[(each.name, each.verdict, each.finding) for each in found])
    say("shut down", queries=len(spark.streams.active))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
