"""The contestants of `launch.py`: repeated launches of a cluster in a warm session.

Each contestant is a context manager. Entering it starts a cluster of `NODES` nodes, which import
the framework and call `mark(folder)`; leaving it shuts the cluster down.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from harness import NODES, arguments, claim_stdout, mark, session, tf_cluster, wait_for_marks, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    Launch = Callable[[SparkSession, argparse.Namespace], AbstractContextManager[None]]


def map_fun(args: argparse.Namespace, ctx: Any = None) -> None:
    importlib.import_module(args.framework)
    mark(args.folder)


@contextmanager
def sparkdl(spark: SparkSession, args: argparse.Namespace) -> Iterator[None]:
    """`sparkdl.launch`, without a feed."""
    import sparkdl

    feeding = sparkdl.Feeding(fed=False)
    with sparkdl.launch(
        *(spark, map_fun, args), nodes=NODES, framework=args.framework, feeding=feeding
    ) as cluster:
        yield
        cluster.results()


@contextmanager
def tfos(spark: SparkSession, args: argparse.Namespace) -> Iterator[None]:
    """`TFCluster.run` and `shutdown`."""
    cluster = tf_cluster(spark, map_fun, args, args.mode)
    yield
    cluster.shutdown()


@contextmanager
def torch(spark: SparkSession, args: argparse.Namespace) -> Iterator[None]:
    """pyspark's TorchDistributor: everything is down when `run` returns."""
    from pyspark.ml.torch.distributor import TorchDistributor

    TorchDistributor(num_processes=NODES, local_mode=False, use_gpu=False).run(map_fun, args)
    yield


@contextmanager
def floor(spark: SparkSession, args: argparse.Namespace) -> Iterator[None]:
    """An empty Spark job, then two bare interpreters that import the framework.

    No launcher that starts a fresh process for each node from a Spark task can be faster.
    """
    spark.range(NODES, numPartitions=NODES).mapInArrow(lambda batches: batches, "id long").collect()
    program = f"import {args.framework}, harness; harness.mark({args.folder!r})"
    nodes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(NODES)]
    yield
    for node in nodes:
        node.wait()


WAYS: dict[str, tuple[Launch, str]] = {
    "sparkdl": (sparkdl, "from sparkdl import launch"),
    "tfos": (tfos, "from tensorflowonspark import TFCluster"),
    "torch": (torch, "import pyspark.ml.torch.distributor"),
    "floor": (floor, ""),
}
"""Contestants, each with the imports of the user's program."""


def main() -> None:
    args = arguments(mode="TENSORFLOW")
    lines = claim_stdout()
    launch, imports = WAYS[args.way]
    start = time.time()
    exec(imports)
    import_s = time.time() - start
    slots = 1 if args.way == "tfos" else 2  # it supports no other
    with session("bench-launch", slots) as spark:
        # Into the page cache; some launchers do so in the driver.
        subprocess.run([sys.executable, "-c", f"import {args.framework}"], check=True)
        write(lines, "ready", import_s=import_s)
        for _ in range(args.launches):
            with tempfile.TemporaryDirectory(prefix="bench-launch-") as args.folder:
                start = time.time()
                with launch(spark, args):
                    entered = wait_for_marks(args.folder, 120)
                down_s = time.time() - entered[-1]
                write(lines, "launch", entered_s=entered[-1] - start, down_s=down_s)


if __name__ == "__main__":
    main()
