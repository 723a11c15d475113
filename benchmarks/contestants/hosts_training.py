"""A driver program on one of three hosts: a training whose nodes are on the other two.

One of these is cut off by `hosts.py`. Each line is a JSON object with an `event` and `at_s`, Unix
time by the one clock that the hosts share.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from harness import NODES, wait_for_marks
from recovering import Said, arrive, prepare, step

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")
LAUNCHED_S = 150.0
ROWS = 10_000
BATCH = 8
CHECKPOINT_STEPS = 10
TFOS_ROWS = 1 << 16
BROADCAST_NBYTES = 16 << 20
FED = ("fed", "cached", "shuffled", "broadcast")
FEED_TIMEOUT_S = 60
"""Of TensorFlowOnSpark; it waits ten minutes by default."""


def train(folder: str, generation: int, batches: Iterable[T]) -> Iterator[T]:
    """Be the user's function on a node: step after step, each with an all-reduce of gloo."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    here, total = arrive(folder, generation), torch.zeros(1 << 16)
    for number, batch in enumerate(batches):
        distributed.all_reduce(total)
        step(here, number)
        yield batch


def map_fun(folder: str, ctx: Any) -> None:
    """Train on a node of sparkdl, without a feed."""
    for _ in train(folder, ctx.generation, range(100_000)):
        pass


def map_fun_fed(folder: str, ctx: Any) -> list[int]:
    """Train on a node of sparkdl, on the feed; return the rows in this node's part of the model."""
    seen: list[int] = []
    last = ctx.last_checkpoint
    if last is not None and ctx.rank == 0:
        for part in sorted(last.folder.glob("part-*.npy")):
            seen += np.load(part).tolist()
    steps = 0 if last is None else last.step
    batches = ctx.batches(BATCH, even=True, tail="pad")
    for used, batch in enumerate(train(folder, ctx.generation, batches), 1):
        seen += batch["id"][batch["sample_weight"] > 0].tolist()
        if used % CHECKPOINT_STEPS == 0:
            with ctx.checkpoint(steps + used, batches=used) as saved:
                np.save(saved / f"part-{ctx.rank}.npy", np.array(seen, np.int64))
    return seen


def train_first(folder: str) -> None:
    """Train in a process of TorchDistributor; an attempt that follows is the next generation."""
    has_begun = len(list(Path(folder, "0", "stepped").iterdir())) >= NODES
    for _ in train(folder, int(has_begun), range(100_000)):
        pass


def map_fun_tfos(args: argparse.Namespace, ctx: Any) -> None:
    """Train on a node of TensorFlowOnSpark, on the feed."""
    here, number = arrive(args.folder, 0), 0
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(BATCH)
        step(here, number)
        number += 1


def tell(event: str, **values: Any) -> None:
    """Print a line."""
    print(json.dumps({"event": event, "at_s": time.time(), **values}) + "\n", end="", flush=True)


def rows_of(spark: SparkSession, what: str) -> DataFrame:
    """Return the rows to feed, some of whose blocks or files are on the host that will be lost."""
    rows = spark.range(ROWS, numPartitions=4 * NODES)
    if what == "cached":
        rows = rows.cache()
        rows.count()
    elif what == "shuffled":
        rows = spark.createDataFrame(rows.rdd.repartition(4 * NODES), rows.schema)
        rows.count()  # the files of the shuffle are used again
    elif what == "broadcast":
        table = spark.sparkContext.broadcast(np.arange(BROADCAST_NBYTES, dtype=np.int8))

        def known(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            assert len(table.value) == BROADCAST_NBYTES
            return batches

        rows = rows.mapInArrow(known, rows.schema)
    return rows


def run_sparkdl(spark: SparkSession, folder: str, what: str, deadline_s: float) -> None:
    """Tell when the driver knows of the loss, and when a node of the next world has stepped.

    Args:
        what: is fed: a key of `FED`, or nothing if that is `sparkdl`.
    """
    import sparkdl
    from sparkdl.core.deadline import Deadline
    from sparkdl.driver.lifecycle.state import Running
    from tests.doubles.ledger import lost_and_doubled

    is_fed = what in FED
    cluster = sparkdl.launch(
        spark,
        map_fun_fed if is_fed else map_fun,
        folder,
        NODES,
        framework="torch",
        feeding=sparkdl.Feeding(fed=is_fed),
        max_restarts=1,
        checkpoint_dir=str(Path(folder, "checkpoints")) if is_fed else None,
        recovery=sparkdl.Recovery(min_nodes=1, wait_s=5.0),
    )
    try:
        feeding = cluster.feed_async(rows_of(spark, what)) if is_fed else None
        wait_for_marks(str(Path(folder, "0", "stepped")), LAUNCHED_S)
        tell("training", hosts=[member.host for member in cluster.world.members])
        cluster._controller.wait_for(
            lambda view: not isinstance(view.state, Running), Deadline.after(deadline_s)
        )
        tell("known")
        (at_s,) = wait_for_marks(str(Path(folder, "1", "stepped")), deadline_s, 1)
        tell("stepped", stepped_s=at_s)
        if feeding is None:
            tell("said", text=cluster.status())
        else:
            feeding.result(deadline_s)
            tell("fed")
            lost, doubled = lost_and_doubled(cluster.results(deadline_s), ROWS)
            tell("said", text=f"{lost} rows lost, {doubled} seen twice")
    finally:
        cluster.abort()


def await_end(run: Said, folder: str, deadline_s: float) -> None:
    """Tell when and how a peer's call ends, if it does."""
    wait_for_marks(str(Path(folder, "0", "stepped")), LAUNCHED_S)
    tell("training", hosts=[])
    run.wait(deadline_s)
    if run.at_s is not None:
        tell("known")
    tell("said", text=run.text)


def run_torch(spark: SparkSession, folder: str, deadline_s: float) -> None:
    """Tell when and how the call ends, if it does; it trains no further by itself."""
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=NODES, local_mode=False, use_gpu=False)
    await_end(Said(lambda: distributor.run(train_first, folder)), folder, deadline_s)
    spark.sparkContext.cancelAllJobs()


def run_tfos(spark: SparkSession, folder: str, deadline_s: float) -> None:
    """Tell when and how `train` ends, if it does; nothing trains again by itself."""
    from tensorflowonspark import TFCluster

    cluster = TFCluster.run(
        spark.sparkContext,
        map_fun_tfos,
        argparse.Namespace(folder=folder),
        num_executors=NODES,
        num_ps=0,
        input_mode=TFCluster.InputMode.SPARK,
        master_node="chief",
    )
    rows = spark.sparkContext.parallelize(range(TFOS_ROWS), 4 * NODES)
    train = Said(lambda: cluster.train(rows, feed_timeout=FEED_TIMEOUT_S))
    await_end(train, folder, deadline_s)
    tell("done")
    os._exit(0)  # its `shutdown` would wait for the lost node, and then exit so as well


def main() -> None:
    """Train until a host is lost, and tell what becomes of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["sparkdl", *FED, "torch", "tfos"])
    parser.add_argument("master")
    parser.add_argument("folder")
    parser.add_argument("--deadline-s", type=float, default=120.0)
    parsed = parser.parse_args()
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master(parsed.master).appName("bench-hosts").getOrCreate()
    prepare(parsed.folder)
    if parsed.what == "torch":
        run_torch(spark, parsed.folder, parsed.deadline_s)
    elif parsed.what == "tfos":
        run_tfos(spark, parsed.folder, parsed.deadline_s)
    else:
        run_sparkdl(spark, parsed.folder, parsed.what, parsed.deadline_s)
    tell("done")


if __name__ == "__main__":
    main()
