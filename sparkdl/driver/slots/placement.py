"""Placement of nodes: how many fit, their GPUs, and whether they keep their task slots.

It is decided once, before the launch.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, ReservationTimeoutError, SparkConfigError, SparkdlError
from sparkdl.core.jobs import context_of
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.texts import count
from sparkdl.driver.slots.lost_hosts import executors_left, executors_of

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

_DYNAMIC = "spark.dynamicAllocation"
EXECUTORS_WAIT_S = 15.0
"""How long to wait for further executors if the caller gives no limit."""
_POLL_S = 0.1
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)")


@dataclass(frozen=True)
class Topology:
    """The task slots of a Spark application: `cores` of each live executor.

    Attributes:
        task_gpus: below 1, tasks share a GPU.
        most: how many executors Spark starts; where that is not known, as many as workers register.
    """

    master: str
    cores: tuple[int, ...]
    task_cpus: int = 1
    is_dynamic: bool = False
    executor_gpus: int = 0
    task_gpus: float = 0.0
    most: float = math.inf

    @classmethod
    def of(
        cls, master: str, cores: tuple[int, ...], get: Callable[[str, str], str | None]
    ) -> Topology:
        """Return the topology of an application, by its settings."""
        # In local mode Spark assigns no GPUs and starts no executors, whatever the settings say.
        is_local = master.partition("[")[0] == "local"
        is_dynamic = not is_local and get(f"{_DYNAMIC}.enabled", "false") == "true"
        most: float = 1 if is_local else math.inf
        if found := _LOCAL_CLUSTER.match(master):
            most = int(found[1])
        elif master == "yarn" or master.startswith("k8s://"):
            most = int(get("spark.executor.instances", "2") or 2)
        gpus = "0" if is_local else get("spark.executor.resource.gpu.amount", "0")
        task_gpus = "0" if is_local else get("spark.task.resource.gpu.amount", "0")
        return cls(
            master,
            cores,
            int(get("spark.task.cpus", "1") or 1),
            is_dynamic,
            int(gpus or 0),
            float(task_gpus or 0),
            most,
        )

    @property
    def slots(self) -> int:
        return self.room(self.task_cpus, self.task_gpus)

    @property
    def takes_profiles(self) -> bool:
        """Whether a node's task may request other resources than the session's tasks.

        Spark refuses task resource profiles on `local` and `local-cluster` masters.
        """
        return not self.master.startswith("local") and not self.is_dynamic

    def room(self, cpus: int, gpus: float) -> int:
        if gpus <= 0:
            by_gpus = sys.maxsize
        elif gpus < 1:
            # Spark lets so many tasks share a GPU, and never splits a task's share over two.
            by_gpus = self.executor_gpus * int(1 / gpus)
        else:
            by_gpus = self.executor_gpus // int(gpus)
        return sum(min(cores // cpus, by_gpus) for cores in self.cores)

    def describe(self) -> str:
        gpus = (
            f", {count(self.executor_gpus, 'GPU')} each, "
            f"spark.task.resource.gpu.amount={self.task_gpus:g}"
            if self.executor_gpus
            else ""
        )
        return (
            f"{count(self.slots, 'task slot')} ({count(len(self.cores), 'executor')} with "
            f"{list(self.cores)} cores, spark.task.cpus={self.task_cpus}{gpus})"
        )


def may_come(spec: ClusterSpec, topology: Topology) -> bool:
    """Whether the nodes do not fit, and executors are still to come."""
    # Dynamic allocation starts executors for waiting tasks only: a wait before is in vain.
    is_served = topology.is_dynamic or _fits(spec, topology, _node_gpus(spec, topology))
    return not is_served and len(topology.cores) < topology.most


@dataclass(frozen=True)
class SlotPlan:
    """Whether nodes keep their slots, and why.

    Attributes:
        node_gpus: GPUs that a node's task requests; `None` for what the session's tasks have.
    """

    is_attached: bool
    why: str
    node_gpus: float | None = None


def is_attached(spec: ClusterSpec, is_dynamic: bool) -> bool:
    """Whether nodes keep their slots: `auto` where Spark feeds none, or adds slots on demand."""
    if spec.placement == "auto":
        return is_dynamic or not spec.is_fed
    return spec.placement == "attached"


def choose_placement(spec: ClusterSpec, topology: Topology) -> SlotPlan:
    """Decide between attached and detached nodes."""
    gpus = _node_gpus(spec, topology)
    if not (topology.is_dynamic or _fits(spec, topology, gpus)):
        raise _refusal(spec, topology, gpus)
    attached = is_attached(spec, topology.is_dynamic)
    if not attached and topology.is_dynamic:
        raise ConfigError(
            "detached nodes hold no slot, so spark.dynamicAllocation would remove their executors; "
            "set spark.dynamicAllocation.enabled=false, or placement='attached'"
        )
    there = f"{count(topology.slots, 'slot')}, {count(spec.num_tasks, 'node')}"
    why = "Spark tasks feed the nodes" if spec.is_fed else "no Spark task feeds the nodes"
    return SlotPlan(attached, f"{there}: {why}", None if gpus == topology.task_gpus else gpus)


def needs(nodes: int) -> str:
    """Return `2 nodes need 2 task slots`."""
    return f"{count(nodes, 'node')} need{'s' if nodes == 1 else ''} {count(nodes, 'task slot')}"


def _fits(spec: ClusterSpec, topology: Topology, gpus: float) -> bool:
    if topology.room(topology.task_cpus, gpus) < spec.num_tasks:
        return False
    by_gpus = math.ceil(gpus / topology.task_gpus) if topology.task_gpus else 0
    taken = spec.num_tasks * max(1, by_gpus)
    feeds_beside = spec.is_fed and not topology.is_dynamic and is_attached(spec, False)
    return not feeds_beside or topology.slots > taken


def _refusal(spec: ClusterSpec, topology: Topology, gpus: float) -> SparkdlError:
    nodes = spec.num_tasks
    wants_more_gpus = gpus > topology.task_gpus
    room = topology.room(topology.task_cpus, gpus)
    needed = f"{needs(nodes)} at once"
    lacks_feeder = room >= nodes
    if lacks_feeder:
        needed += ", and one more for feeding tasks (placement='attached')"
    if wants_more_gpus and room < nodes:
        needed = f"no room for {count(nodes, 'node')} with num_gpus={gpus:g}, only for {room}"
    text = f"{needed}, and Spark has {topology.describe()}"
    may_grow = len(topology.cores) < topology.most
    if may_grow:
        text += ". No more executors came in time: raise Startup(timeout_s=…) if they come later"
    text += ". Ask for fewer nodes (nodes=, num_executors=)"
    if lacks_feeder:
        text += " or for placement='detached'"
    if wants_more_gpus:
        text += " or GPUs (num_gpus)"
    if gpus:
        text += ", or raise spark.executor.resource.gpu.amount"
    text += f", or {_more_slots(topology, nodes)}"
    never = SparkConfigError if wants_more_gpus else ConfigError
    return (ReservationTimeoutError if may_grow else never)(text)


def _more_slots(topology: Topology, nodes: int) -> str:
    master, cpus = topology.master, topology.task_cpus
    if master.partition("[")[0] == "local":
        return (
            f"stop the session and start it with the master local[{nodes * cpus}] instead of "
            f"{master}, or run the nodes beside Spark, with executor='local'"
        )
    return (
        "raise spark.executor.instances or spark.executor.cores (standalone: start more workers, "
        "raise spark.cores.max)" + (", or lower spark.task.cpus" if cpus > 1 else "")
    )


def _node_gpus(spec: ClusterSpec, topology: Topology) -> float:
    """Return how many GPUs a node's task requests from Spark."""
    asked, given = _asked_gpus(spec, topology), topology.task_gpus
    if not topology.takes_profiles:
        if given and asked is not None and asked > max(1.0, given):
            raise SparkConfigError(
                f"num_gpus={spec.num_gpus}, and Spark gives a task {given:g} GPUs. Raise "
                "spark.task.resource.gpu.amount and spark.executor.resource.gpu.amount, or lower "
                "num_gpus"
            )
        return given
    # Spark has no GPUs to give here. Nodes claim those of their hosts themselves.
    if not topology.executor_gpus:
        return 0.0
    if asked is None:
        # A GPU each by default, unless then fewer nodes would fit.
        wanted = given or 1.0
        fits = topology.room(topology.task_cpus, wanted) >= spec.num_tasks
        return wanted if fits else given
    if asked > topology.executor_gpus:
        raise SparkConfigError(
            f"num_gpus={spec.num_gpus}, and Spark gives an executor {topology.executor_gpus} GPUs. "
            "Raise spark.executor.resource.gpu.amount, or lower num_gpus"
        )
    return float(asked)


def _asked_gpus(spec: ClusterSpec, topology: Topology) -> int | None:
    """Return the GPUs for the node that wants most, since all nodes are tasks of one stage."""
    counts = [spec.gpus_of(node) for node in spec.nodes[spec.driver_nodes :]]
    most = max((count for count in counts if count is not None), default=0)
    return most if None not in counts or most > max(1.0, topology.task_gpus) else None


# of a session


def read_topology(
    spark: SparkSession,
    spec: ClusterSpec,
    timeout_s: float = EXECUTORS_WAIT_S,
    silent_s: float = 2.0,
) -> Topology | None:
    """Return the task slots, after a wait for executors if the nodes do not fit yet, but may.

    After `silent_s` the log says so. `None` over Spark Connect, where slots are unknown.
    """
    sc = context_of(spark)
    if sc is None:
        return None
    deadline, silence = Deadline.after(timeout_s), Deadline.after(silent_s)
    pause, has_warned = threading.Event(), False
    while True:
        topology = _topology(sc)
        if not may_come(spec, topology) or deadline.has_passed:
            return topology
        if silence.has_passed and not has_warned:
            has_warned = True
            _log.warning(
                "Waiting up to %g s for executors: %s at once, and Spark has %s. Give Spark more "
                "executors or cores, or launch fewer nodes",
                *(timeout_s, needs(spec.num_tasks), topology.describe()),
            )
        pause.wait(_POLL_S)


def placement_of(session: SparkSession, spec: ClusterSpec, topology: Topology | None) -> SlotPlan:
    """Decide between attached and detached nodes."""
    if topology is not None:
        return choose_placement(spec, topology)
    attached = is_attached(spec, session.conf.get(f"{_DYNAMIC}.enabled", "false") == "true")
    return SlotPlan(attached, "the slots of a Spark Connect server are not known")


def node_profile(plan: SlotPlan, task_cpus: int) -> ResourceProfile | None:
    """Return the resource profile of a node's task, or `None` for the session's default.

    A profile of cores alone would have no GPUs, whatever `spark.task.resource.gpu.amount` says.
    """
    if plan.node_gpus is None:
        return None
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    requests = TaskResourceRequests().cpus(task_cpus)
    if plan.node_gpus:
        requests.resource("gpu", plan.node_gpus)
    return ResourceProfileBuilder().require(requests).build


def _topology(sc: SparkContext) -> Topology:
    if str(sc.master).partition("[")[0] == "local":
        # In local mode the driver runs the tasks itself, so no executor is waited for.
        cores = (sc.defaultParallelism,)
    else:
        # Spark lists these executors for a while, though they get no more tasks.
        left = executors_left(sc)
        cores = tuple(
            cores
            for there in executors_of(sc)
            if there.id() not in left and (cores := there.totalCores())
        )
    return Topology.of(str(sc.master), cores, sc.getConf().get)
