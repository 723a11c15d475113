"""Counting the task slots, and the checks before anything starts.

Runs in: driver
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests

from sparkdl.core.deadline import Deadline
from sparkdl.core.jobs import context_of
from sparkdl.core.spec import ClusterSpec
from sparkdl.driver.slots.draining import draining_executors
from sparkdl.driver.slots.lost_hosts import executors_left, executors_of
from sparkdl.driver.slots.placement import (
    Placing,
    Standing,
    Topology,
    choose_placing,
    needs,
    outlook,
    stand,
)
from sparkdl.driver.slots.queue import Need, Turn, gate_of

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

EXECUTORS_WAIT_S = 15.0
"""How long to wait for further executors if the caller gives no limit."""
YOUNG_S = 30.0
SPARE_WAIT_S = 3.0
"""How long to wait for a slot for feeding where an application has run for less than `YOUNG_S`: it
may still get executors."""
_DYNAMIC = "spark.dynamicAllocation.enabled"


@dataclass(frozen=True)
class Pace:
    """How a wait for executors passes, in seconds.

    Attributes:
        poll_s: between two looks, before the log mentions the wait.
        slow_poll_s: after that.
        silent_s: how long a wait is not worth a line of the log.
    """

    poll_s: float = 0.05
    slow_poll_s: float = 0.5
    silent_s: float = 2.0


def read_topology(
    spark: SparkSession,
    spec: ClusterSpec,
    timeout_s: float = EXECUTORS_WAIT_S,
    pace: Pace = Pace(),
) -> Topology | None:
    """Return the task slots, after a wait for executors if the nodes do not fit yet.

    In a young application it also waits a moment for the slot that feeding needs, longer if Spark's
    settings promise more executors.

    Args:
        timeout_s: how long to wait if more executors may come. There is no wait if the nodes can
            never fit.

    Returns:
        `None` over Spark Connect, where they are unknown.

    Raises:
        ConfigError: if Spark's settings do not give the GPUs that are asked for.
    """
    sc = context_of(spark)
    if sc is None:
        return None
    # A local cluster starts a lost executor again within seconds.
    is_young = time.time() - sc.startTime / 1000 < YOUNG_S
    may_get_spare = is_young or str(sc.master).startswith("local-cluster")
    is_fed = spec.is_fed
    wait = _ExecutorWait(spec.num_tasks, timeout_s, pace)
    for_spare: Deadline | None = None
    while True:
        topology = _topology(sc)
        found = outlook(spec, topology)
        if found == "may fit":
            if not wait.goes_on(topology.describe()):
                return topology
            may_get_spare |= wait.has_warned
            continue
        has_spare = not is_fed or topology.slots > spec.num_tasks or topology.is_dynamic
        if found == "never" or has_spare or topology.has_all:
            return topology
        if for_spare is None:
            spare_s = SPARE_WAIT_S if topology.most is None else EXECUTORS_WAIT_S
            for_spare = Deadline.after(spare_s if may_get_spare else 0.0)
        if for_spare.has_passed:
            return topology
        threading.Event().wait(pace.poll_s)


class _ExecutorWait:
    """A wait for executors, which the log mentions once it has lasted for a moment."""

    def __init__(self, nodes: int, timeout_s: float, pace: Pace) -> None:
        self.has_warned = False
        self._nodes, self._timeout_s, self._pace = nodes, timeout_s, pace
        self._deadline, self._silence = Deadline.after(timeout_s), Deadline.after(pace.silent_s)
        self._pause = threading.Event()

    def goes_on(self, there: str) -> bool:
        """Wait for a moment; return whether there was time left.

        Args:
            there: the slots that there are.
        """
        if self._deadline.has_passed:
            return False
        if self._silence.has_passed and not self.has_warned:
            self.has_warned = True
            _log.warning(
                "Waiting up to %g s for executors: %s at once, and Spark has %s. Give Spark more "
                "executors or cores, or launch fewer nodes",
                *(self._timeout_s, needs(self._nodes), there),
            )
        self._pause.wait(self._pace.slow_poll_s if self.has_warned else self._pace.poll_s)
        return True


def placing_of(session: SparkSession, spec: ClusterSpec, topology: Topology | None) -> Placing:
    """Decide between attached and detached nodes.

    A Spark Connect server does not show its slots: without a topology, nodes to feed keep theirs
    only if Spark adds executors on demand.

    Raises:
        ConfigError, ReservationTimeoutError: see `choose_placing`.
    """
    if topology is not None:
        return choose_placing(spec, topology)
    is_dynamic = session.conf.get(_DYNAMIC, "false") == "true"
    attached = spec.placement == "attached" or (
        spec.placement == "auto" and (is_dynamic or not spec.is_fed)
    )
    return Placing(attached, None, "the slots of a Spark Connect server are not known")


def turn_of(
    session: SparkSession, spec: ClusterSpec, topology: Topology | None, placing: Placing
) -> Turn | None:
    """Return the turn that the cluster has to wait for.

    `None` where slots cannot be counted, or come on demand: no cluster waits there.
    """
    if topology is None or topology.is_dynamic:
        return None
    cpus = placing.node_cpus or topology.task_cpus
    gpus = topology.task_gpus if placing.node_cpus is None else placing.node_gpus
    need = Need(
        spec.cluster_id,
        spec.num_tasks,
        spec.num_tasks * topology.slots_of(cpus, gpus),
        spec.is_fed and placing.is_attached,
        topology.room(cpus, gpus),
    )
    context = session.sparkContext
    gate = gate_of(str(context.applicationId))
    timeout_s = spec.settings.start_timeout_s
    return Turn(gate, need, lambda: _topology(context).slots, timeout_s)


def counting(
    session: SparkSession, spec: ClusterSpec, placing: Placing, topology: Topology | None
) -> Callable[[], Standing | None] | None:
    """Return a function that counts the slots; it returns `None` when it cannot.

    Returns:
        `None` where slots do not matter: nothing is fed, or Spark adds executors on demand.
    """
    if not spec.is_fed:
        return None
    if topology is None:
        is_dynamic = session.conf.get(_DYNAMIC, "false") == "true"
        return (lambda: None) if placing.is_attached and not is_dynamic else None
    sc = session.sparkContext
    # The slots of `local[n]` never change, and dynamic allocation adds slots when tasks wait.
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
    """Return the resource profile of a node's task, or `None` for the session's default.

    A profile of cores alone would have no GPUs, whatever `spark.task.resource.gpu.amount` says.
    """
    if placing.node_cpus is None:
        return None
    requests = TaskResourceRequests().cpus(placing.node_cpus)
    if placing.node_gpus:
        requests.resource("gpu", placing.node_gpus)
    return ResourceProfileBuilder().require(requests).build


def _is_local(sc: SparkContext) -> bool:
    return str(sc.master).partition("[")[0] == "local"


def _topology(sc: SparkContext) -> Topology:
    if _is_local(sc):
        # In local mode the driver runs the tasks itself, so no executor is waited for.
        return _of(sc, (sc.defaultParallelism,))
    # Spark lists these executors for a while, though they get no more tasks.
    left = executors_left(sc) | draining_executors(sc)
    cores = [there.totalCores() for there in executors_of(sc) if there.id() not in left]
    return _of(sc, tuple(count for count in cores if count))


def _of(sc: SparkContext, cores: tuple[int, ...]) -> Topology:
    return Topology.of(str(sc.master), cores, sc.getConf().get)
