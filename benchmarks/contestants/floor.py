"""The floor: an empty Spark job, then two bare interpreters that import the framework.

No launcher that starts a fresh process for each node from a Spark task can be faster.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from harness import NODES, compete, options

if TYPE_CHECKING:
    import pyarrow as pa
    from harness import Launch
    from pyspark.sql import SparkSession


def echo(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Be the body of an empty task."""
    return batches


@contextmanager
def launch(spark: SparkSession, folder: str, framework: str) -> Iterator[None]:
    """Run the empty job, then start the bare interpreters."""
    spark.range(NODES, numPartitions=NODES).mapInArrow(echo, "id long").collect()
    program = f"import {framework}, harness; harness.mark({folder!r})"
    nodes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(NODES)]
    yield
    for node in nodes:
        node.wait()


def prepare(framework: str) -> Launch:
    """Return the launch; there is nothing to import."""
    return partial(launch, framework=framework)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--framework", choices=["tensorflow", "torch"], required=True)
    parsed = parser.parse_args()
    compete(parsed, parsed.framework, partial(prepare, parsed.framework))
