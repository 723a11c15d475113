"""A driver program on one of three hosts: a training whose nodes are on the other two.

One of these is cut off by `hosts.py`. Each line is a JSON object with an `event` and `at_s`, Unix
time by the one clock that the hosts share.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import NODES, wait_for_marks
from recovering import Said, arrive, outcome, prepare, step

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LAUNCHED_S = 150.0
ROWS = 1 << 20
BATCH = 32


def train(folder: str, generation: int, batches: Any = None) -> None:
    """Be the user's function on a node: step after step, each with an all-reduce of gloo."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    here, total = arrive(folder, generation), torch.zeros(1 << 16)
    for number, _ in enumerate(batches or range(100_000)):
        distributed.all_reduce(total)
        step(here, number)


def map_fun(folder: str, ctx: Any) -> None:
    """Train on a node of sparkdl, without a feed."""
    train(folder, ctx.generation)


def map_fun_fed(folder: str, ctx: Any) -> None:
    """Train on a node of sparkdl, on batches of the feed."""
    train(folder, ctx.generation, ctx.batches(BATCH, even=True, tail="pad"))


def train_first(folder: str) -> None:
    """Train in a process of TorchDistributor; an attempt that follows is the next generation."""
    has_begun = len(list(Path(folder, "0", "stepped").iterdir())) >= NODES
    train(folder, int(has_begun))


def tell(event: str, **values: Any) -> None:
    """Print a line."""
    print(json.dumps({"event": event, "at_s": time.time(), **values}) + "\n", end="", flush=True)


def run_sparkdl(spark: SparkSession, folder: str, is_fed: bool, deadline_s: float) -> None:
    """Tell when the driver knows of the loss, and when a node of the next world has stepped."""
    import sparkdl
    from sparkdl.core.deadline import Deadline
    from sparkdl.driver.lifecycle.state import Running

    cluster = sparkdl.launch(
        spark,
        map_fun_fed if is_fed else map_fun,
        folder,
        NODES,
        framework="torch",
        input_mode="spark" if is_fed else "own",
        max_restarts=1,
        min_nodes=1,
        elastic_timeout=5.0,
        show_progress=False,
    )
    try:
        feeding = cluster.feed_async(spark.range(ROWS).coalesce(NODES)) if is_fed else None
        wait_for_marks(str(Path(folder, "0", "stepped")), LAUNCHED_S)
        tell("training", hosts=[member.host for member in cluster.world.members])
        cluster._controller.wait_for(
            lambda view: not isinstance(view.state, Running), Deadline.after(deadline_s)
        )
        tell("known")
        (at_s,) = wait_for_marks(str(Path(folder, "1", "stepped")), deadline_s, 1)
        tell("stepped", stepped_s=at_s)
        tell("said", text=cluster.status())
    finally:
        cluster.abort()
    if feeding is not None:
        outcome(lambda: feeding.result(deadline_s))


def run_torch(spark: SparkSession, folder: str, deadline_s: float) -> None:
    """Tell when and how the call ends, if it does; it trains no further by itself."""
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=NODES, local_mode=False, use_gpu=False)
    run = Said(lambda: distributor.run(train_first, folder))
    wait_for_marks(str(Path(folder, "0", "stepped")), LAUNCHED_S)
    tell("training", hosts=[])
    run.wait(deadline_s)
    if run.at_s is not None:
        tell("known")
    tell("said", text=run.text)
    spark.sparkContext.cancelAllJobs()


def main() -> None:
    """Train until a host is lost, and tell what becomes of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["sparkdl", "fed", "torch"])
    parser.add_argument("master")
    parser.add_argument("folder")
    parser.add_argument("--deadline-s", type=float, default=120.0)
    parsed = parser.parse_args()
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master(parsed.master).appName("bench-hosts").getOrCreate()
    prepare(parsed.folder)
    if parsed.what == "torch":
        run_torch(spark, parsed.folder, parsed.deadline_s)
    else:
        run_sparkdl(spark, parsed.folder, parsed.what == "fed", parsed.deadline_s)
    tell("done")


if __name__ == "__main__":
    main()
