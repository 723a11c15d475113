"""Counting the task slots, and the checks before anything starts."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests

from sparkdl.core.deadline import Deadline
from sparkdl.core.jobs import context_of
from sparkdl.core.spec import ClusterSpec
from sparkdl.driver.slots.draining import draining_executors
from sparkdl.driver.slots.lost_hosts import executors_left, executors_of
from sparkdl.driver.slots.placement import (
    Placing,
    Topology,
    choose_placing,
    is_attached,
    needs,
    outlook,
)

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

EXECUTORS_WAIT_S = 15.0
"""How long to wait for further executors if the caller gives no limit."""
_POLL_S = 0.1
_DYNAMIC = "spark.dynamicAllocation.enabled"


def read_topology(
    spark: SparkSession,
    spec: ClusterSpec,
    timeout_s: float = EXECUTORS_WAIT_S,
    silent_s: float = 2.0,
) -> Topology | None:
    """Return the task slots, after a wait for executors if the nodes do not fit yet.

    Args:
        timeout_s: how long to wait if more executors may come. There is no wait if the nodes can
            never fit.
        silent_s: after which a wait is worth a line of the log.

    Returns:
        `None` over Spark Connect, where they are unknown.

    Raises:
        ConfigError: if Spark's settings do not give the GPUs that are asked for.
    """
    sc = context_of(spark)
    if sc is None:
        return None
    deadline, silence, pause = (
        Deadline.after(timeout_s),
        Deadline.after(silent_s),
        threading.Event(),
    )
    has_warned = False
    while True:
        topology = _topology(sc)
        if outlook(spec, topology) != "may fit" or deadline.has_passed:
            return topology
        if silence.has_passed and not has_warned:
            has_warned = True
            _log.warning(
                "Waiting up to %g s for executors: %s at once, and Spark has %s. Give Spark more "
                "executors or cores, or launch fewer nodes",
                *(timeout_s, needs(spec.num_tasks), topology.describe()),
            )
        pause.wait(_POLL_S)


def placing_of(session: SparkSession, spec: ClusterSpec, topology: Topology | None) -> Placing:
    """Decide between attached and detached nodes.

    Raises:
        ConfigError, ReservationTimeoutError: see `choose_placing`.
    """
    if topology is not None:
        return choose_placing(spec, topology)
    attached = is_attached(spec, session.conf.get(_DYNAMIC, "false") == "true")
    return Placing(attached, "the slots of a Spark Connect server are not known")


def node_profile(placing: Placing, task_cpus: int) -> ResourceProfile | None:
    """Return the resource profile of a node's task, or `None` for the session's default.

    A profile of cores alone would have no GPUs, whatever `spark.task.resource.gpu.amount` says.
    """
    if placing.node_gpus is None:
        return None
    requests = TaskResourceRequests().cpus(task_cpus)
    if placing.node_gpus:
        requests.resource("gpu", placing.node_gpus)
    return ResourceProfileBuilder().require(requests).build


def _topology(sc: SparkContext) -> Topology:
    if str(sc.master).partition("[")[0] == "local":
        # In local mode the driver runs the tasks itself, so no executor is waited for.
        cores = (sc.defaultParallelism,)
    else:
        # Spark lists these executors for a while, though they get no more tasks.
        left = executors_left(sc) | draining_executors(sc)
        cores = tuple(
            cores
            for there in executors_of(sc)
            if there.id() not in left and (cores := there.totalCores())
        )
    return Topology.of(str(sc.master), cores, sc.getConf().get)
