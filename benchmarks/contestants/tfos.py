"""TensorFlowOnSpark: `TFCluster.run` with a function that imports TensorFlow, then `shutdown`.

It wants one task slot on each executor.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from harness import NODES, compete, mark, options

if TYPE_CHECKING:
    from harness import Launch
    from pyspark.sql import SparkSession


def map_fun(args: argparse.Namespace, ctx: Any) -> None:
    """Be the user's function on a node."""
    import tensorflow  # noqa: F401

    mark(args.folder)


@contextmanager
def launch(spark: SparkSession, folder: str, input_mode: int) -> Iterator[None]:
    """Start the cluster, and shut it down."""
    from tensorflowonspark import TFCluster

    args = argparse.Namespace(folder=folder)
    cluster = TFCluster.run(
        spark.sparkContext,
        map_fun,
        args,
        num_executors=NODES,
        num_ps=0,
        input_mode=input_mode,
        master_node="chief",
    )
    yield
    cluster.shutdown()


def prepare(mode: str) -> Launch:
    """Import TensorFlowOnSpark, which imports TensorFlow into the driver."""
    from tensorflowonspark import TFCluster

    return partial(launch, input_mode=getattr(TFCluster.InputMode, mode.upper()))


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(slots=1)
    parser.add_argument("--input-mode", choices=["tensorflow", "spark"], required=True)
    parsed = parser.parse_args()
    compete(parsed, "tensorflow", partial(prepare, parsed.input_mode))
