"""A driver program: it feeds nodes on a standalone cluster, and prints what becomes of it.

Runs in: the driver, on a host of the bed

Each line that it prints is a JSON object with an `event`, and `at_s` of the clock that all hosts
share.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.core.options import Recovery
from sparkdl.driver.lifecycle.state import Running
from sparkdl.driver.options import OBJECTS
from sparkdl.driver.view import ClusterView
from tests.doubles.ledger import Plan, lost_and_doubled, train
from tests.doubles.nodes import has_checkpoint

_WAIT_S = 200.0


def options_of(text: str) -> dict[str, Any]:
    """Return options of `launch` from JSON, in which an object is a dict of its fields."""
    found = json.loads(text)
    return {
        name: OBJECTS[name](**value) if name in OBJECTS else value for name, value in found.items()
    }


def tell(event: str, **values: Any) -> None:
    """Print a line, in one piece: what is logged goes to the same file."""
    line = json.dumps({"event": event, "at_s": time.monotonic(), **values})
    print(f"{line}\n", end="", flush=True)


def has_rows(view: ClusterView) -> bool:
    return any(count.given.rows for count in view.feeds.values())


def has_stopped(view: ClusterView) -> bool:
    """Whether the first generation has ended."""
    return not isinstance(view.state, Running) or has_begun_again(view)


def has_begun_again(view: ClusterView) -> bool:
    """Whether a second generation runs."""
    return isinstance(view.state, Running) and view.state.world.generation > 0


def main() -> None:
    """Feed rows to nodes, and compare what the model has seen with them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("master")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--partitions", type=int, default=8)
    parser.add_argument("--rows-are", choices=["made", "cached", "here"], default="made")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step")
    parser.add_argument("--slow-once", action="store_true", help="pause in the first world alone")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--fault-within", type=float, default=60.0, help="seconds; 0 for none")
    parser.add_argument("--options", default="{}", help="further options of launch, as JSON")
    parser.add_argument("--spark", default="{}", help="settings of Spark, as JSON")
    args = parser.parse_args()
    builder = SparkSession.builder.master(args.master).appName("hosts")
    spark = builder.config(map=json.loads(args.spark)).getOrCreate()
    options: dict[str, Any] = {
        "max_restarts": 3,
        "checkpoint_dir": str(args.folder / "checkpoints"),
        "recovery": Recovery(min_nodes=1, wait_s=5.0),
        **options_of(args.options),
    }
    rows = spark.range(args.rows, numPartitions=args.partitions).withColumnRenamed("id", "row")
    if args.rows_are == "cached":  # on all executors
        rows.cache().count()
    data = rows.toPandas() if args.rows_are == "here" else rows
    plan = Plan(every=args.every, pause_s=args.pause, is_slow_once=args.slow_once)
    cluster = sparkdl.launch(spark, train, plan, args.nodes, framework="plain", **options)
    try:
        tell("launched", placement=str(cluster.spec.placement))
        feeding = cluster.feed_async(data)
        controller = cluster._controller
        for event, has_come in (("rows", has_rows), ("checkpoint", has_checkpoint)):
            if not controller.wait_for(has_come, Deadline.after(_WAIT_S)):
                raise SystemExit(f"no {event}: {controller.look(lambda view: view.state)}")
            tell(event, nodes={m.node.name: m.host for m in cluster.world.members})
        if controller.wait_for(has_stopped, Deadline.after(args.fault_within)):
            tell("noticed", status=cluster.status())
        if controller.wait_for(has_begun_again, Deadline.after(args.fault_within)):
            tell("again", nodes={m.node.name: m.host for m in cluster.world.members})
        report = feeding.result(_WAIT_S)
        tell("fed", rows_used=report.rows_used, rows_unused=report.rows_unused)
        lost, doubled = lost_and_doubled(cluster.results(_WAIT_S), args.rows)
        tell("trained", lost=lost, doubled=doubled)
    except BaseException as error:
        tell("failed", type=type(error).__name__, message=str(error))
        raise
    finally:
        cluster.shutdown()
        tell("shut down")
    spark.stop()


if __name__ == "__main__":
    main()
