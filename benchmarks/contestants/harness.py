"""What every contestant does alike: options, a warm Spark session, the clock and the JSON lines.

A contestant is a program with one context manager, `launch(spark, folder, ...)`: entering it starts
a cluster of `NODES` nodes, each of which imports the framework and calls `mark(folder)`; leaving it
shuts the cluster down. `compete` runs that manager `--launches` times in one session and writes one
JSON line for each.

Only the standard library is imported at the top: `mark` runs inside the nodes and must cost them
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    Launch = Callable[[SparkSession, str], AbstractContextManager[None]]

NODES = 2
POLL_S = 0.01


def mark(folder: str) -> None:
    """Record in `folder` that one node is inside the user's function now."""
    now = time.time()
    path = Path(folder, uuid.uuid4().hex)
    partial = path.with_suffix(".partial")
    partial.write_text(repr(now))
    partial.rename(path)


def wait_for_marks(folder: str, deadline_s: float, nodes: int = NODES) -> list[float]:
    """Return the times at which the nodes entered the user's function, in order."""
    give_up = time.monotonic() + deadline_s
    while True:
        marks = [path for path in Path(folder).iterdir() if not path.suffix]
        if len(marks) >= nodes:
            return sorted(float(path.read_text()) for path in marks)
        if time.monotonic() > give_up:
            raise TimeoutError(
                f"{len(marks)} of {nodes} nodes entered the function within {deadline_s:.0f} s"
            )
        time.sleep(POLL_S)


def options(description: str | None) -> argparse.ArgumentParser:
    """Return the parser with the options that every contestant has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--launches", type=int, default=2, help="launches, one after another, in the one session"
    )
    parser.add_argument(
        "--pause-s", type=float, default=0, help="between two launches, as between cells"
    )
    parser.add_argument(
        "--slots", type=int, default=2, help="task slots of each of the two executors"
    )
    parser.add_argument(
        "--deadline-s", type=float, default=120, help="longest wait for the nodes of one launch"
    )
    return parser


def compete(parsed: argparse.Namespace, framework: str, prepare: Callable[[], Launch]) -> None:
    """Run the contestant and write its JSON lines to standard output, where nothing else can write.

    Args:
        parsed: What `options(...)` parsed.
        framework: What the nodes import.
        prepare: Imports what the user's program would import and returns the manager to time.
    """
    lines = claim_stdout()
    start = time.time()
    launch = prepare()
    import_s = time.time() - start
    with session("bench-launch", parsed.slots) as spark:
        _warm_page_cache(framework)
        write(lines, {"event": "ready", "import_s": import_s})
        for number in range(parsed.launches):
            time.sleep(parsed.pause_s if number else 0)
            timed = _time_one(launch, spark, parsed.deadline_s)
            write(lines, {"event": "launch", "number": number, **timed})


def _time_one(launch: Launch, spark: SparkSession, deadline_s: float) -> dict[str, Any]:
    """Time one launch: until every node is in, and from then until everything is down again."""
    with tempfile.TemporaryDirectory(prefix="bench-launch-") as folder:
        start = time.time()
        with launch(spark, folder):
            entered = wait_for_marks(folder, deadline_s)
        return {
            "entered_s": entered[-1] - start,
            "down_s": time.time() - entered[-1],
            "nodes_s": [moment - start for moment in entered],
        }


@contextmanager
def session(
    name: str,
    slots: int,
    settings: Mapping[str, str] | None = None,
    executors: int = NODES,
    memory_mib: int = 1024,
) -> Iterator[SparkSession]:
    """Start a session whose executors are up, with a bare Python worker in each slot; stop it."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = (
        SparkSession.builder.master(f"local-cluster[{executors},{slots},{memory_mib}]")
        .appName(name)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
        .config("spark.scheduler.maxRegisteredResourcesWaitingTime", "60s")
    )
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    work = Path(
        os.environ.get("SPARK_HOME") or _spark_home(), "work", spark.sparkContext.applicationId
    )
    try:
        spark.sparkContext.setLogLevel("ERROR")
        _warm(spark, executors * slots)
        yield spark
    finally:
        spark.stop()
        shutil.rmtree(work, ignore_errors=True)


def _warm(spark: SparkSession, tasks: int) -> None:
    """Put a task into every slot: a barrier stage and tasks that last a moment share none."""
    for _ in range(2):
        spark.sparkContext.parallelize(range(tasks), tasks).barrier().mapPartitions(_linger).count()
        spark.range(tasks, numPartitions=tasks).mapInArrow(
            _linger_arrow, "id long", barrier=True
        ).collect()


def _warm_page_cache(framework: str) -> None:
    """Import the framework once, elsewhere; some launchers do so in the driver."""
    subprocess.run([sys.executable, "-c", f"import {framework}"], check=True)


def _linger(rows: Iterable[int]) -> Iterable[int]:
    time.sleep(0.2)
    return rows


def _linger_arrow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    time.sleep(0.2)
    return batches


def _spark_home() -> str:
    from pyspark.find_spark_home import _find_spark_home

    return str(_find_spark_home())


def claim_stdout() -> TextIO:
    """Return standard output as a file of its own; what others print goes to standard error."""
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return lines


def write(lines: TextIO, record: dict[str, Any]) -> None:
    lines.write(json.dumps(record) + "\n")
    lines.flush()
