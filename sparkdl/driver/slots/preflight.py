"""What can be known to fail before anything starts, and what a setting would change about it.

Runs in: driver
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable

from pyspark import SparkContext
from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, LaunchError, SparkdlError
from sparkdl.core.jobs import raised_in_task
from sparkdl.core.spec import ClusterSpec, InputMode
from sparkdl.driver.slots.placement import Placing, Standing, Topology, stand
from sparkdl.driver.slots.queue import Need, Turn, gate_of
from sparkdl.node.check import parse_problem

_log = logging.getLogger(__name__)

EXECUTORS_WAIT_S = 15.0
"""How long executors that are still registering are waited for before slots are called missing."""
YOUNG_S = 30.0
SPARE_WAIT_S = 3.0
"""An application that has run for less than `YOUNG_S` may still get executors; how long a slot for
feeding is waited for then."""
_POLL_S = 0.05
_CONNECT_POLL_S = 1.0
_DYNAMIC = "spark.dynamicAllocation.enabled"
_SPLITS = ("spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism")


def read_topology(spark: SparkSession, num_nodes: int, is_fed: bool) -> Topology | None:
    """Return the slots there are, having given executors a moment to register.

    A young application is given a moment for the slot that feeding needs beside the nodes', too,
    and one of which it is known that more are to come as long as for the nodes' own.

    Returns:
        `None` where it cannot be known: over Spark Connect.
    """
    try:
        sc = spark.sparkContext
    except Exception:  # noqa: BLE001 (Connect sessions raise one of several errors here)
        return None
    age_s = time.time() - sc.startTime / 1000
    for_nodes = Deadline.after(EXECUTORS_WAIT_S)
    expected = _expected_slots(sc)
    may_grow_s = min(SPARE_WAIT_S, YOUNG_S - age_s) if expected == math.inf else EXECUTORS_WAIT_S
    for_spare = Deadline.after(max(0.0, may_grow_s) if is_fed else 0.0)
    pause = threading.Event()
    while True:
        topology = _topology(sc)
        if topology.is_dynamic or for_nodes.has_passed or topology.slots >= expected:
            return topology
        if topology.slots > num_nodes or (topology.slots == num_nodes and for_spare.has_passed):
            return topology
        pause.wait(_POLL_S)


def check_slots_over_connect(spark: SparkSession, num_nodes: int) -> None:
    """Check that a Spark Connect server has a slot for each node, as far as it tells.

    It tells the number of its cores, by how a range would be split, unless that is set otherwise.

    Raises:
        ConfigError: if it has fewer when those that may still register have had a moment to.
    """
    conf, pause = spark.conf, threading.Event()
    if any(conf.get(name, None) for name in _SPLITS) or conf.get(_DYNAMIC, "false") == "true":
        return
    is_local = str(conf.get("spark.master", "")).partition("[")[0] == "local"
    deadline = Deadline.after(0.0 if is_local else EXECUTORS_WAIT_S)
    while True:
        plan = "".join(row[0] for row in spark.sql("EXPLAIN SELECT * FROM range(1)").collect())
        found = re.search(r"splits=(\d+)", plan)
        slots = int(found[1]) // int(conf.get("spark.task.cpus", "1") or 1) if found else num_nodes
        if slots >= num_nodes:
            return
        if deadline.has_passed:
            raise ConfigError(
                f"{num_nodes} nodes need {num_nodes} task slots at once, and the Spark Connect "
                f"server has {slots}. Ask for fewer nodes (nodes=, num_executors=), or raise the "
                "number of its executors or of their cores (spark.executor.instances, "
                "spark.executor.cores, spark.cores.max)"
            )
        pause.wait(_CONNECT_POLL_S)


def turn_of(
    session: SparkSession, spec: ClusterSpec, topology: Topology | None, placing: Placing
) -> Turn | None:
    """Return the turn that the cluster has to wait for.

    Where slots cannot be counted, or come as they are asked for, nobody waits.
    """
    if topology is None or topology.is_dynamic:
        return None
    cpus = placing.node_cpus or topology.task_cpus
    gpus = topology.task_gpus if placing.node_cpus is None else placing.node_gpus
    need = Need(
        spec.cluster_id,
        spec.num_tasks,
        spec.num_tasks * topology.slots_of(cpus, gpus),
        spec.input_mode is InputMode.SPARK and placing.is_attached,
        topology.room(cpus, gpus),
    )
    context = session.sparkContext
    gate = gate_of(str(context.applicationId))
    timeout_s = spec.settings.reservation_timeout_s
    return Turn(gate, need, lambda: _topology(context).slots, timeout_s)


def counting(
    session: SparkSession, spec: ClusterSpec, placing: Placing, topology: Topology | None
) -> Callable[[], Standing | None] | None:
    """Return what says what the slots mean for the cluster; `None` if it says it cannot count.

    Returns:
        `None` where it does not matter: nothing is fed, or Spark brings executors for what waits.
    """
    if spec.input_mode is not InputMode.SPARK:
        return None
    if topology is None:
        is_dynamic = session.conf.get("spark.dynamicAllocation.enabled", "false") == "true"
        return (lambda: None) if placing.is_attached and not is_dynamic else None
    sc = session.sparkContext
    if topology.is_dynamic or _is_local(sc):
        return None
    gate = gate_of(str(sc.applicationId))

    def count() -> Standing | None:
        try:
            return stand(spec, placing, _topology(sc), gate.others(spec.cluster_id))
        except Exception:  # noqa: BLE001 (Spark is ending, perhaps; which error varies)
            _log.debug("The slots of %s cannot be counted", spec.cluster_id, exc_info=True)
            return None

    return count


def node_profile(placing: Placing) -> ResourceProfile | None:
    """Return what a node's task asks of Spark, or `None` for the session's default.

    A profile of cores alone would have no GPUs, whatever `spark.task.resource.gpu.amount` says.
    """
    if placing.node_cpus is None:
        return None
    requests = TaskResourceRequests().cpus(placing.node_cpus)
    if placing.node_gpus:
        requests.resource("gpu", placing.node_gpus)
    return ResourceProfileBuilder().require(requests).build


def explain_job_failure(error: Exception) -> SparkdlError:
    """Turn the failure of the nodes' Spark job into the error that says what to change."""
    text = str(error)
    problem = parse_problem(text)
    if problem is not None:
        return problem.at_driver()
    if "PYTHON_VERSION_MISMATCH" in text:
        detail = next(line for line in text.splitlines() if "PYTHON_VERSION_MISMATCH" in line)
        return ConfigError(
            f"driver and executors run different versions of Python: {detail.strip()}. Set "
            "PYSPARK_PYTHON (or spark.pyspark.python) to the same version on all machines"
        )
    if "No module named 'sparkdl'" in text:
        return ConfigError(
            "the executors' Python has no sparkdl; install sparkdl-cluster there, or ship an "
            "environment with spark.archives and point PYSPARK_PYTHON into it"
        )
    return LaunchError(f"the Spark job that carries the nodes failed: {raised_in_task(error)}")


def _expected_slots(sc: SparkContext) -> float:
    """Return with how many slots there is no more to come.

    `local` has all of its own at once, and those of `local-cluster[n, cores, memory]` are known.
    """
    if _is_local(sc):
        return 0
    found = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", str(sc.master))
    return _of(sc, (int(found[2]),) * int(found[1])).slots if found else math.inf


def _is_local(sc: SparkContext) -> bool:
    return str(sc.master).partition("[")[0] == "local"


def _topology(sc: SparkContext) -> Topology:
    if _is_local(sc):
        return _of(sc, (sc.defaultParallelism,))
    executors = sc._jsc.sc().statusStore().executorList(True)
    cores = []
    for i in range(executors.size()):
        executor = executors.apply(i)
        if executor.id() != "driver":
            cores.append(executor.totalCores())
    return _of(sc, tuple(count for count in cores if count))


def _of(sc: SparkContext, cores: tuple[int, ...]) -> Topology:
    conf, has_resources = sc.getConf(), not _is_local(sc)
    return Topology(
        str(sc.master),
        cores,
        int(conf.get("spark.task.cpus", "1") or 1),
        conf.get(_DYNAMIC, "false") == "true",
        int(conf.get("spark.executor.resource.gpu.amount", "0") or 0) if has_resources else 0,
        float(conf.get("spark.task.resource.gpu.amount", "0") or 0) if has_resources else 0.0,
    )
