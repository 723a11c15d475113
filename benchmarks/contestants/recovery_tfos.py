"""TensorFlowOnSpark: a fed training of two nodes, of which a process is killed."""

from __future__ import annotations

import argparse
import tempfile
from typing import TYPE_CHECKING, Any

from harness import claim_stdout, session, write
from recovering import (
    Said,
    arrive,
    kill,
    options_of_kills,
    outcome,
    prepare,
    return_s,
    step,
    victim,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 1 << 16
BATCH = 32


def map_fun(args: argparse.Namespace, ctx: Any) -> None:
    """Be the user's function on a node."""
    import tensorflow  # noqa: F401

    here = arrive(args.folder, 0)
    feed = ctx.get_data_feed()
    number = 0
    while not feed.should_stop():
        feed.next_batch(BATCH)
        step(here, number)
        number += 1


def recover(spark: SparkSession, parsed: argparse.Namespace) -> dict[str, Any]:
    """Launch, kill, and wait for what the driver says."""
    from tensorflowonspark import TFCluster

    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
        prepare(folder)
        cluster = TFCluster.run(
            spark.sparkContext,
            map_fun,
            argparse.Namespace(folder=folder),
            num_executors=2,
            num_ps=0,
            input_mode=TFCluster.InputMode.SPARK,
            master_node="chief",
        )
        rows = spark.sparkContext.parallelize(range(ROWS), 2)
        train = Said(lambda: cluster.train(rows, feed_timeout=parsed.feed_timeout_s))
        at_s = kill(victim(folder, parsed.after_s))
        train.wait(parsed.deadline_s)
        known_s = train.at_s - at_s if train.at_s else None
        shutdown = outcome(lambda: cluster.shutdown(timeout=60))  # in the main thread: SIGALRM
        times = return_s(folder, at_s, 0)
    said = f"train {train.text}; shutdown {shutdown}"
    return {"known_s": known_s, "said": said, **times}


if __name__ == "__main__":
    parser = options_of_kills(__doc__)
    parser.set_defaults(slots=1, deadline_s=480)
    parser.add_argument("--feed-timeout-s", type=int, default=60, help="600 by default")
    parsed = parser.parse_args()
    lines = claim_stdout()
    with session("bench-recovery", parsed.slots) as spark:
        for _ in range(parsed.kills):
            write(lines, {"event": "recovery", **recover(spark, parsed)})
