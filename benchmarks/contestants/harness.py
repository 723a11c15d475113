"""What the contestants share: a warm Spark session, marks of nodes, JSON lines, resource usage.

Only the standard library is imported at the top: `mark` runs inside the nodes and must cost them
nothing. The usage of processes comes from Linux's `/proc`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NODES = 2
MARK = "BENCH_RUN"
"""The environment variable that identifies a contestant's processes in any process group."""
_TICKS = os.sysconf("SC_CLK_TCK")


def arguments(**defaults: Any) -> argparse.Namespace:
    """Return the benchmark's arguments, parsed from JSON."""
    return argparse.Namespace(**defaults | json.loads(sys.argv[1]))


def mark(folder: str) -> None:
    """Record in `folder` that a node has entered the user's function."""
    now = time.time()
    path = Path(folder, uuid.uuid4().hex)
    partial = path.with_suffix(".partial")
    partial.write_text(repr(now))
    partial.rename(path)


def marks(folder: str | Path) -> list[Path]:
    return [path for path in Path(folder).iterdir() if not path.suffix]


def wait_for_marks(folder: str | Path, deadline_s: float, nodes: int = NODES) -> list[float]:
    """Return the times of the nodes' marks, in order."""
    give_up = time.monotonic() + deadline_s
    while len(marks(folder)) < nodes:
        if time.monotonic() > give_up:
            there = f"{len(marks(folder))} of {nodes} nodes"
            raise TimeoutError(f"{there} entered the function within {deadline_s:.0f} s")
        time.sleep(0.01)
    return sorted(float(path.read_text()) for path in marks(folder))


@contextmanager
def session(
    name: str, slots: int, settings: Mapping[str, str] | None = None, memory_mib: int = 1024
) -> Iterator[SparkSession]:
    """Start a session whose executors are up, with a bare Python worker in each slot; stop it."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.find_spark_home import _find_spark_home
    from pyspark.sql import SparkSession

    everywhere = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    }
    builder = SparkSession.builder.master(f"local-cluster[{NODES},{slots},{memory_mib}]")
    for key, value in (everywhere | dict(settings or {})).items():
        builder = builder.config(key, value)
    spark = builder.appName(name).getOrCreate()
    home = os.environ.get("SPARK_HOME") or _find_spark_home()
    work = Path(home, "work", spark.sparkContext.applicationId)
    try:
        spark.sparkContext.setLogLevel("ERROR")
        _warm(spark, NODES * slots)
        yield spark
    finally:
        spark.stop()
        shutil.rmtree(work, ignore_errors=True)


def _warm(spark: SparkSession, tasks: int) -> None:
    """Put a task into every slot: tasks of a barrier stage, which last a moment, share no slot."""
    for _ in range(2):
        spark.sparkContext.parallelize(range(tasks), tasks).barrier().mapPartitions(_linger).count()
        rows = spark.range(tasks, numPartitions=tasks)
        rows.mapInArrow(_linger, "id long", barrier=True).collect()


def _linger(parts: Any) -> Any:
    time.sleep(0.2)
    return parts


def tf_cluster(
    spark: SparkSession, map_fun: Any, args: argparse.Namespace, mode: str = "SPARK"
) -> Any:
    """Start TensorFlowOnSpark's cluster, which needs one task slot on each executor."""
    from tensorflowonspark import TFCluster

    return TFCluster.run(
        *(spark.sparkContext, map_fun, args),
        num_executors=NODES,
        num_ps=0,
        input_mode=getattr(TFCluster.InputMode, mode),
        master_node="chief",
    )


def claim_stdout() -> TextIO:
    """Return standard output as a separate file, and redirect other output to standard error."""
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return lines


def write(lines: TextIO, event: str, **figures: Any) -> None:
    lines.write(json.dumps({"event": event, **figures}) + "\n")
    lines.flush()


def marked(token: str | None = None) -> dict[int, str]:
    """Return the processes of a contestant, by default this one: their commands by process id."""
    needle = f"{MARK}={os.environ.get(MARK, '') if token is None else token}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = command.decode(errors="replace").strip()[:200]
    return found


def cpu_s() -> float:
    """Return the CPU time, user and system, of all processes of this contestant so far.

    For ended processes, this is the time that their parents have collected.
    """
    total = 0
    for pid in marked():
        with contextlib.suppress(OSError):
            total += sum(map(int, _stat(pid)[11:15]))
    return total / _TICKS


def own_cpu_s(pids: Iterable[int]) -> dict[str, float]:
    """Return the CPU time of each process, without its children's, by process id and start time."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = _stat(pid)
            found[f"{pid} {fields[19]}"] = sum(map(int, fields[11:13])) / _TICKS
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the command, which may hold blanks: proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def pss(pid: int) -> int:
    """Return a process's memory in bytes, shared pages divided by the number of their users."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
