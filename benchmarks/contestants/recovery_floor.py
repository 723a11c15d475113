"""What nobody can be faster than: bare imports on all nodes at once, and Spark's own replacement.

`import`: as many processes as there are nodes import the framework at the same time.
`executor`: an executor of a session that does nothing else is killed; until a Python task has run
on the one that replaces it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

from harness import NODES, claim_stdout, session, write
from recovering import executor_of, kill, options_of_kills

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def import_s(framework: str) -> float:
    """Return how long the slower of the processes takes, from its start to its end."""
    start = time.time()
    them = [subprocess.Popen([sys.executable, "-c", f"import {framework}"]) for _ in range(NODES)]
    for one in them:
        if one.wait():
            raise RuntimeError(f"import {framework} failed")
    return time.time() - start


def replacement_s(spark: SparkSession, slots: int) -> float:
    """Kill an executor; return how long it takes until Python has run on all executors again."""

    def where(_: object) -> list[int]:
        time.sleep(0.1)
        return [executor_of(__import__("os").getpid())]

    def executors() -> set[int]:
        tasks = NODES * slots
        return set(
            spark.sparkContext.parallelize(range(tasks), tasks).mapPartitions(where).collect()
        )

    before = executors()
    at_s = kill(min(before))
    while len(executors() - {min(before)}) < NODES:
        time.sleep(0.01)
    return time.time() - at_s


if __name__ == "__main__":
    parser = options_of_kills(__doc__)
    parser.add_argument("--framework", default="tensorflow")
    parser.add_argument("--of", choices=["import", "executor"], default="import")
    parsed = parser.parse_args()
    lines = claim_stdout()
    if parsed.of == "import":
        import_s(parsed.framework)  # into the page cache
        for _ in range(parsed.kills):
            write(lines, {"event": "recovery", "back_s": import_s(parsed.framework)})
    else:
        settings = {"spark.deploy.maxExecutorRetries": "-1"}
        with session("bench-recovery", parsed.slots, settings) as spark:
            for _ in range(parsed.kills):
                back_s = replacement_s(spark, parsed.slots)
                write(lines, {"event": "recovery", "back_s": back_s})
