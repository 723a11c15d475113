"""A client of a Spark Connect server: it launches two nodes, feeds them, and has one restart.

Runs in: a process on a host of its own. It prints JSON, a line for each event.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import SparkSession

import sparkdl
from sparkdl.core.errors import SparkdlError

ROWS = 400


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def total(_args: Any, ctx: Any) -> int:
    if ctx.rank == 0 and ctx.generation == 0:
        raise RuntimeError("once")
    return sum(int(sum(batch["id"])) for batch in ctx.batches(10))


def main(url: str) -> None:
    builder: Any = SparkSession.builder
    spark = builder.remote(url).getOrCreate()
    try:
        with sparkdl.launch(spark, total, nodes=2, framework="plain", max_restarts=2) as cluster:
            cluster.feed(spark.range(ROWS))
            say("trained", total=sum(cluster.results()))
    except SparkdlError as error:
        say("refused", error=str(error))
    say("shut down")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
